"""Probes: measurements on trained runs other than their loss."""

import itertools
import json
import lzma
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headtohead import Study, load
from headtohead.common.errors import DamagedFile, UserError
from headtohead.common.stop import Stop
from headtohead.data.shards import prepare
from headtohead.evaluation.loss import nats_by_position, score_split
from headtohead.interpret.maps import indicators, layer_maps
from headtohead.model.decoder import Decoder
from headtohead.model.decoding import one_step
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import find_size
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.planner import plan_study
from headtohead.study.probes import PROBES, Probe, Subject, number_at, probe_names, read_found
from headtohead.study.probes import take as take_probe
from headtohead.study.probes.positions import Positions
from headtohead.study.run.training import TrainingPass
from headtohead.study.store.run_store import Store
from tests.story import story_file

CORPUS = f"file:{story_file()}"
TINY: dict[str, Any] = {"corpus": CORPUS, "size": "nano", "tokens": "2k", "batch": 512, "seeds": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of one run without probes, copied by the tests."""
    return race(tmp_path_factory.mktemp("trained")).path


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A writable copy of that study."""
    return shutil.copytree(trained, tmp_path / "study")


def race(folder: Path, **changes: object) -> Store:
    Study(["standard"], **(TINY | changes)).run(folder, quiet=True, workers=1)
    return Store(folder)


def take(name: str, one: Subject) -> Any:
    """Return the result of a probe as it is stored; it can be read again."""
    found = take_probe(name, one)
    stored = msgspec.to_builtins(found)
    assert read_found(name, stored) == found
    return stored


def test_a_probe_is_taken_once_and_stored_with_the_result(copied: Path) -> None:
    store = race(copied, probes=["positions"])
    (run,) = store.runs()
    found = run.probe("positions")
    assert isinstance(found, Positions)
    bins = found.bins
    assert [first for first, _, _ in bins] == [1, 2, 4, 8, 16, 32, 64, 128][: len(bins)]
    before = (run.path / "probes" / "positions.json").stat().st_mtime_ns
    race(copied, probes=["positions"])
    assert (run.path / "probes" / "positions.json").stat().st_mtime_ns == before


def test_a_probe_requested_later_uses_the_weights_and_does_not_change_the_run(copied: Path) -> None:
    store = race(copied)
    (run,) = store.runs()
    result = (run.path / "result.json").read_bytes()
    race(copied, probes=["positions"])
    assert (run.path / "result.json").read_bytes() == result
    model, _ = load(run.path)
    test = prepare(CORPUS, "bytes").splits["test"]
    assert run.probe("positions") == Positions(nats_by_position(model, test))


def test_loss_by_position_averages_to_the_loss(copied: Path) -> None:
    (run,) = race(copied).runs()
    model, tokenizer = load(run.path)
    test = prepare(CORPUS, "bytes").splits["test"]
    bins = nats_by_position(model, test)
    mean = sum((last - first + 1) * nats for first, last, nats in bins) / model.size.context
    assert mean == pytest.approx(score_split(model, test, tokenizer.token_bytes()).nats, rel=2e-3)
    assert bins[-1][1] == model.size.context


def test_a_damaged_probe_is_named_and_taken_again(copied: Path) -> None:
    (run,) = race(copied, probes=["positions"]).runs()
    path = run.path / "probes" / "positions.json"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"[1,", b"[2,", 1))
    with pytest.raises(DamagedFile, match=r"positions\.json"):
        run.probe("positions")
    race(copied, probes=["positions"])
    assert path.read_bytes() == good


def test_a_probe_that_fails_leaves_the_run_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(subject: object, argument: str) -> Positions:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setitem(PROBES, "positions", Probe("fails", fail, Positions))
    result = Study(["standard"], probes="positions", **TINY).run(tmp_path, quiet=True, workers=1)
    assert result.summary.trouble == ["probe positions: ZeroDivisionError: on purpose"]
    (run,) = Store(tmp_path).runs()
    assert run.state() == "done"
    assert run.probe("positions") is None


def test_an_interrupted_probe_is_taken_at_the_next_start(tmp_path: Path) -> None:
    study = Study(["standard"], probes=["indicators", "positions"], **TINY)
    study.run(tmp_path / "whole", quiet=True, workers=1)
    store = Store(tmp_path / "parts")
    store.make()
    (planned,) = plan_study(study.spec).compared()
    run = store.run(planned.id)
    run.open(planned)

    def taken(patience: int) -> list[str]:
        asked = itertools.count()
        given = {"probes": study.spec.probes, "stop": Stop(lambda: run.finished() and next(asked) > patience)}
        assert TrainingPass(store, [planned], ExecutionSettings(), **given).run() == ["done"]
        return sorted(path.stem for path in (run.path / "probes").glob("*"))

    assert taken(3) == []
    assert taken(18) == ["indicators"]
    assert taken(0) == ["indicators"]
    assert taken(1000) == ["indicators", "positions"]
    for name in study.spec.probes:
        assert run.probe(name) == Store(tmp_path / "whole").run(run.id).probe(name)


def test_a_study_interrupted_in_a_probe_reports_an_unfinished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(subject: Subject, argument: str) -> Positions:
        signal.raise_signal(signal.SIGINT)
        subject.progress(0.5)
        return Positions([])

    monkeypatch.setitem(PROBES, "positions", Probe("interrupted", interrupted, Positions))
    summary = Study(["standard"], probes="positions", **TINY).run(tmp_path, quiet=True, workers=1).summary
    assert (summary.stopped, summary.left, summary.trouble) == (True, 1, [])
    (run,) = Store(tmp_path).runs()
    assert run.state() == "done"
    assert run.probe("positions") is None


def test_a_finished_run_without_weights_is_left_unchanged(tmp_path: Path) -> None:
    Study(["standard"], **TINY).run(tmp_path, quiet=True, workers=1, keep_weights=False)
    result = Study(["standard"], probes="positions", **TINY).run(tmp_path, quiet=True, workers=1)
    assert result.summary.left == 0
    (run,) = Store(tmp_path).runs()
    assert run.probe("positions") is None


def test_damaged_weights_prevent_a_probe_and_keep_the_result(copied: Path) -> None:
    (run,) = race(copied).runs()
    result = (run.path / "result.json").read_bytes()
    run.weights.write_bytes(run.weights.read_bytes()[:-8])
    again = Study(["standard"], probes="positions", **TINY).run(copied, quiet=True, workers=1)
    assert len(again.summary.trouble) == 1
    assert "final.safetensors" in again.summary.trouble[0]
    assert (run.path / "result.json").read_bytes() == result


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["position"], "unknown probe 'position'.*positions"),
        (["positions:3"], "takes no argument"),
        (3, "takes a name or a list"),
        (["indicators:0"], "the number of windows"),
        (["indicators:many"], "the number of windows"),
        (["skip:-3"], "the number of tokens"),
        (["maps:2"], "LAYER.HEAD"),
        (["maps:0.1"], "counted from 1"),
        (["tasks"], "needs task names"),
        (["tasks:lambda"], "unknown task 'lambda'.*lambada"),
    ],
)
def test_an_invalid_probe_is_rejected(given: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        probe_names(given)


def test_arguments_have_a_canonical_form() -> None:
    given = ["indicators:16", "indicators", "maps: 1.2,2.1,1.2", "tasks:copa,all", "skip:0512"]
    assert probe_names(given) == ("indicators", "maps:1.2,2.1", "tasks:all", "skip:512")


def subject(arm: str, data_dir: str = "") -> Subject:
    """Return an untrained model of an arm as the subject of a probe."""
    size = find_size("nano")
    corpus = prepare(CORPUS, "bytes")
    model = Decoder(
        size, parse_layout(arm).layers(size.layers), 1, companion=corpus.splits["train"].tokens
    ).eval()
    return Subject(model, corpus, CORPUS, "float32", data_dir)


def test_projections_and_phases_are_measured_where_they_exist() -> None:
    found = take("projections:2", subject("standard"))
    assert found["windows"] == 2
    assert found["kv_above_qk"]["weights"] == pytest.approx(
        found["mean"]["weights"]["kv"] - found["mean"]["weights"]["qk"]
    )
    assert found["chance"] == pytest.approx(0.5)
    assert "no layer has separate" in take("projections", subject("sharing:tie=kv"))["none"]
    found = take("phases:2", subject("kuramoto"))
    first, last = found["layers"]
    assert found["mean"]["order"] == pytest.approx((first["order"] + last["order"]) / 2)
    assert found["mean"]["order"] > found["chance"] / 2
    assert "no layer has phases" in take("phases", subject("standard"))["none"]


def test_copies_split_the_loss_by_the_longest_earlier_match() -> None:
    one = subject("standard")
    found = take("copies:8", one)
    windows = one.windows(8, one.model.size.context + 1)
    counts, nats = found["tokens"], found["nats"]
    assert sum(counts.values()) == windows[:, 1:].numel()
    assert counts["0"] >= len(windows), "the first token of a window has no earlier one"
    whole = sum(counts[name] * (nats[name] or 0.0) for name in counts)
    assert whole == pytest.approx(float(one.model.nats(windows[:, :-1], windows[:, 1:]).double().sum()))
    deep = sum(counts[name] for name in ("4", "8", "16"))
    assert found["copied"] * deep + found["new"] * (windows[:, 1:].numel() - deep) == pytest.approx(whole)


def test_windows_are_spread_over_the_test_split() -> None:
    one = subject("standard")
    text = np.asarray(one.corpus.splits["test"].tokens)
    windows = one.windows(4, 128)
    assert windows.shape == (4, 128)
    starts = [index * (len(text) // 128) // 4 * 128 for index in range(4)]
    assert windows.tolist() == [text[start : start + 128].tolist() for start in starts]
    assert one.windows(10**9, 2_000).shape == (1, 2_000)


def test_maps_are_the_weights_of_each_layer() -> None:
    """The map of a layer times its values, projected, equals the layer's output."""
    one = subject("standard")
    tokens = one.windows(2, 32)
    found = layer_maps(one.model, tokens)
    assert [layer.mechanism for layer in found] == ["standard"] * 2
    block = one.model.layers[0]
    given: dict[str, torch.Tensor] = {}
    handle = block.mechanism.register_forward_hook(
        lambda _, inputs, output: given.update(x=inputs[0], y=output)
    )
    with torch.no_grad():
        one.model.hidden(tokens)
    handle.remove()
    mechanism = block.mechanism
    with torch.no_grad():
        _, _, v = mechanism.project(given["x"], None)  # type: ignore[operator]
        written = mechanism.write(found[0].weights @ v, None)  # type: ignore[operator]
    assert torch.allclose(written, given["y"], atol=1e-5)


@pytest.mark.parametrize("arm", ["standard", "non_approximate", "sharing:tie=kv", "fixed_seq_qk", "kuramoto"])
def test_the_largest_score_is_taken_before_the_softmax(arm: str) -> None:
    """A softmax maps score differences to weight ratios, so the range of the log weights is at most twice the peak."""
    for layer in layer_maps(subject(arm).model, subject(arm).windows(1, 48)):
        assert layer.weights is not None
        assert layer.largest_score is not None
        logs = torch.where(layer.weights > 0, layer.weights.double(), 1.0).log()
        rows = logs.masked_fill(layer.weights <= 0, -torch.inf).amax(-1) - logs.masked_fill(
            layer.weights <= 0, torch.inf
        ).amin(-1)
        span = float(rows[torch.isfinite(rows)].max())
        assert 0 < span <= 2 * layer.largest_score + 1e-4


def test_a_layer_without_softmax_has_no_largest_score() -> None:
    assert {
        layer.largest_score for layer in layer_maps(subject("approximate").model, torch.zeros(1, 8).long())
    } == {None}


def test_indicators_are_means_over_windows_and_layers() -> None:
    one = subject("even(token_mlp)")
    found = take("indicators:3", one)
    assert found["windows"] == 3
    first, second = found["layers"]
    assert first["none"] == "token_mlp gives no attention map"
    maps = [layer_maps(one.model, window[None])[1].weights for window in one.windows(3, 128)]
    expected = indicators(torch.cat([weights for weights in maps if weights is not None]))
    for name, value in expected.items():
        assert second["values"][name] == pytest.approx(value, rel=1e-6)
        assert found["mean"][name] == second["values"][name]
    assert found["log_largest_score"] == second["values"]["log_largest_score"]


def test_signed_maps_are_marked_and_arms_without_a_map_give_a_reason() -> None:
    signed = take("indicators:1", subject("differential"))
    assert [layer["signed"] for layer in signed["layers"]] == [True, True]
    for probe in ("indicators:1", "maps"):
        found = take(probe, subject("token_mlp"))
        assert found == {"none": "token_mlp gives no attention map"}


def test_maps_are_pooled_and_name_their_tokens() -> None:
    one = subject("standard")
    found = take("maps", one)
    assert found["group"] == 3
    assert len(found["tokens"]) == 43
    assert "".join(found["tokens"]) == one.tokenizer.decode(one.windows(1, 128)[0].tolist())
    assert {row["why"] for row in found["maps"]} == {"most local", "most on the first token", "most spread"}
    for row in found["maps"]:
        assert [len(line) for line in row["rows"]] == list(range(1, 44))
        assert [sum(line) for line in row["rows"]] == pytest.approx([1000] * 43, abs=25)
    outside = take("maps:9.9", one)
    assert outside == {"none": "no map for 9.9; this model has 1.1 to 1.4, 2.1 to 2.4"}
    asked = take("maps:2.3,1.1,9.9", one)
    assert [(row["layer"], row["head"]) for row in asked["maps"]] == [(1, 1), (2, 3)]
    assert asked["absent"] == ["9.9"]


def test_skipped_layers_are_restored() -> None:
    one = subject("even(prefix_mean)")
    found = take("skip:2048", one)
    assert (found["variant"]["layers"], found["standard"]["layers"]) == ([1], [2])
    whole = found["whole"]
    for group in ("variant", "standard"):
        for part in ("block", "attention"):
            row = found[group][part]
            assert row["bits_per_byte"] == pytest.approx(whole + row["rise"])
            assert row["rise"] != 0
    assert take("skip:2048", one)["whole"] == whole
    assert "does not mix" in take("skip", subject("standard"))["none"]


def test_decoding_is_timed_at_half_and_full_windows() -> None:
    found = take("decode", subject("standard"))
    rates = found["tokens_per_second"]
    assert set(rates) == {f"batch {batch}, {fill}" for batch in (1, 8) for fill in ("half", "full")}
    assert min(rates.values()) > 0
    assert found["headline"] == rates["batch 8, full"]
    assert found["cached"]
    assert "cpu" in found["device"]
    one = subject("standard").model
    assert found["bytes"] == 4 * one.parameter_count() + one.cache_bytes(8, 128, torch.float32)  # type: ignore[operator]


@pytest.mark.parametrize("arm", ["standard", "latent"])
def test_no_arm_decodes_with_a_cuda_graph(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, taken = subject(arm), []
    assert one.model.graph_safe == (arm == "standard")

    def counted(*given: Any) -> Any:
        taken.append(1)
        return one_step(*given)

    monkeypatch.setattr("headtohead.study.probes.decode.one_step", counted)
    found = take("decode", one)
    assert len(taken) == found["steps"] * len(found["tokens_per_second"])


def test_missing_tasks_are_a_one_line_error_before_anything_runs(tmp_path: Path) -> None:
    settings = TINY | {"probes": ["tasks:copa,rte"], "seeds": 2}
    with pytest.raises(
        UserError, match=r"^copa, rte not found; download them with: h2h data get copa rte --data"
    ):
        Study(["standard"], **settings).run(tmp_path / "s", quiet=True, workers=1, data_dir=tmp_path)
    assert not (tmp_path / "s").exists()


def test_tasks_are_scored_with_chance(tmp_path: Path) -> None:
    folder = tmp_path / "zeroshot"
    folder.mkdir()
    rows = "".join(
        json.dumps({"query": f"the cat {word}", "choices": ["sat", "ran"], "gold": index % 2}) + "\n"
        for index, word in enumerate(["one", "two", "three", "four"])
    )
    with lzma.open(folder / "copa.jsonl.xz", "wt") as stream:
        stream.write(rows)
    found = take("tasks:copa", subject("standard", str(tmp_path)))
    score = found["tasks"]["copa"]
    assert (score["n"], score["chance"]) == (4, 0.5)
    assert found["mean"]["above_chance"] == score["accuracy"] - 0.5


def test_finished_runs_without_weights_are_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = TINY | {"seeds": 2}
    Study(["standard"], **settings).run(tmp_path, quiet=True, workers=1, keep_weights=False)
    capsys.readouterr()
    Study(["standard"], probes=["positions", "maps"], **settings).run(tmp_path, workers=1)
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count(
        "2 finished runs kept no weights: positions, maps cannot be taken"
    ) == 1


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ({"bins": [[1, 2, 2.5]], "more": "x"}, True),
        ({"bins": [[True]]}, False),
        ({"bins": [[float("nan")]]}, False),
        ({"bins": [[1e300]]}, False),
        ({"bins": [[10**400]]}, False),
        ({"bins": [[None]]}, False),
        ({"bins": [["x"]]}, False),
        ({"none": "no text"}, True),
        ({"none": 3}, False),
        ("text", False),
        ({}, False),
    ],
)
def test_values_from_a_file_are_validated(value: object, good: bool) -> None:
    with nullcontext() if good else pytest.raises(ValueError, match=r"Expected|missing"):
        read_found("positions", value)


def test_a_probe_result_of_another_form_is_damaged(copied: Path) -> None:
    (run,) = race(copied, probes=["indicators:1"]).runs()
    run.keep_probe("indicators:1", Positions([]))
    with pytest.raises(DamagedFile, match="not a valid result of probe indicators:1"):
        run.probe("indicators:1")
    race(copied, probes=["indicators:1"])
    assert run.probe("indicators:1") is not None


def test_a_number_is_found_by_its_path() -> None:
    found = {"mean": {"sink": 0.25, "words": "many"}, "bytes": None}
    assert number_at(found, "mean.sink") == 0.25
    for path in ("mean", "mean.words", "mean.sink.deeper", "bytes", "none"):
        assert number_at(found, path) is None
    assert number_at(None, "mean") is None
