"""Loading and evaluating trained runs with a companion, and skip evaluation of trained hybrids with its controls."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.data.shards import prepare
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout, skipped_layers
from headtohead.study.config.spec import build_study
from headtohead.study.plan.planner import plan_study
from headtohead.study.store.run_store import RunDirectory, Store

HYBRID, FIXED = "even(rnd_emb_qk)", "(fixed_seq_qk standard)"
SMALL = {"tokens": 5120, "batch": 256, "seeds": 1, "lr": 5e-3}


@pytest.fixture(scope="module")
def raced(story: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, RunDirectory]]:
    """A standard run and two hybrids of two layers, trained briefly."""
    folder = tmp_path_factory.mktemp("hybrids")
    corpus = f"file:{story}"
    h2h.Study(arms=["standard", HYBRID, FIXED], corpus=corpus, **SMALL).run(folder, workers=1, quiet=True)
    return corpus, {run.spec().arm: run for run in Store(folder).runs()}


def score(raced: tuple[str, dict[str, RunDirectory]], arm: str, **settings: object) -> float:
    corpus, runs = raced
    return h2h.evaluate(runs[arm].path, corpus, quiet=True, device="cpu", **settings).nats  # type: ignore[arg-type]


def test_a_loaded_run_has_its_companion_and_its_score(raced: tuple[str, dict[str, RunDirectory]]) -> None:
    corpus, runs = raced
    for arm in (HYBRID, FIXED):
        result = runs[arm].result()
        assert result is not None
        assert result.status == "done"
        assert score(raced, arm) == pytest.approx(result.test.values["nats"], rel=1e-6)
    model, _ = h2h.load(runs[FIXED].path)
    train = prepare(corpus).splits["train"].tokens
    assert model.companion is not None
    assert model.companion.tolist() == train[:128].tolist(), "the first tokens of the train split"
    noise = h2h.load(runs[HYBRID].path).model.companion
    assert noise is not None
    assert float(noise.std()) == pytest.approx(0.02, rel=0.1)


def test_a_loaded_run_generates_text(raced: tuple[str, dict[str, RunDirectory]]) -> None:
    for arm in (HYBRID, FIXED):
        assert "".join(h2h.generate_text(raced[1][arm].path, "the cat", tokens=20, device="cpu"))
    with pytest.raises(UserError, match="companion has 128 tokens"):
        "".join(h2h.generate_text(raced[1][FIXED].path, "the cat", tokens=200, device="cpu"))


def test_skipping_the_variant_is_the_model_without_its_blocks(
    raced: tuple[str, dict[str, RunDirectory]],
) -> None:
    whole = score(raced, HYBRID)
    variant, standard = (score(raced, HYBRID, skip=kind) for kind in ("variant", "standard"))
    assert len({whole, variant, standard}) == 3
    assert whole < min(variant, standard), "both kinds of layers have learned something"
    assert variant == score(raced, HYBRID, skip="1")
    assert standard == score(raced, HYBRID, skip="2")
    kept = score(raced, HYBRID, skip="variant", keep_ffn=True)
    assert kept not in (whole, variant)


def test_the_control_skips_the_same_layers_of_the_standard_run(
    raced: tuple[str, dict[str, RunDirectory]],
) -> None:
    assert score(raced, "standard", skip="1") > score(raced, "standard")
    model, _ = h2h.load(raced[1]["standard"].path)
    text = torch.arange(20).view(1, -1)
    shorter = model.logits(text)
    model.skip([2])
    x = model.embedding(text, h2h.Frame(time=20))
    frame = h2h.Frame(time=20, rotary=model.rotary, embeddings=x)
    by_hand = model.norm(model.layers[0](x, frame)) @ model.readout.T
    assert torch.allclose(model.logits(text), by_hand, atol=1e-5)
    assert not torch.allclose(by_hand, shorter)


def test_the_companion_does_not_run_when_no_remaining_layer_uses_it(
    raced: tuple[str, dict[str, RunDirectory]],
) -> None:
    model, _ = h2h.load(raced[1][FIXED].path)
    calls: list[int] = []
    model.layers[1].mechanism.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    model.skip([1])
    model.logits(torch.zeros(3, 5, dtype=torch.long))
    assert calls == [3], "only the data"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip": "varient"}, "did you mean 'variant'"),
        ({"skip": "3"}, "not a layer from 1 to 2"),
        ({"skip": "0"}, "not a layer from 1 to 2"),
        ({"skip": "2-1"}, "not a layer from"),
        ({"skip": "1,,2"}, "variant, standard or layers"),
        ({"skip": "1-2"}, "at least one must remain"),
        ({"keep_ffn": True}, "give skip too"),
    ],
)
def test_an_invalid_skip_is_rejected(
    raced: tuple[str, dict[str, RunDirectory]], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        score(raced, HYBRID, **settings)


def test_a_standard_run_has_no_variant_and_a_uniform_one_no_standard() -> None:
    with pytest.raises(UserError, match="every layer of this model is standard"):
        skipped_layers(parse_layout("standard:window=4").layers(4), "variant")
    with pytest.raises(UserError, match="no layer of this model is standard"):
        skipped_layers(parse_layout("prefix_mean").layers(4), "standard")
    hybrid = parse_layout("quarter(token_mlp)").layers(8)
    assert skipped_layers(hybrid, "standard") == [4, 8]
    assert skipped_layers(hybrid, "variant") == [1, 2, 3, 5, 6, 7]
    assert skipped_layers(hybrid, "2,4-6, 8") == [2, 4, 5, 6, 8]


def test_the_command_line_skips_layers(
    raced: tuple[str, dict[str, RunDirectory]], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, runs = raced
    command = ["evaluate", str(runs[HYBRID].path), "--corpus", corpus, "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--skip", "variant", "--keep-ffn", "--json"])
    assert ended.value.code == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["skip"], record["keep_ffn"]) == ("variant", True)
    assert record["nats"] == pytest.approx(score(raced, HYBRID, skip="variant", keep_ffn=True))
    for given, message in ((["--skip", "7"], "layer from 1 to 2"), (["--keep-ffn"], "give skip too")):
        with pytest.raises(SystemExit) as ended:
            main([*command, *given])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_plans_divide_the_companion_by_the_batch_and_reject_short_texts(story: Path) -> None:
    def planned(arm: str, batch: int, size: str = "nano"):  # type: ignore[no-untyped-def]
        spec = build_study({"arms": [arm], "corpus": f"file:{story}", "size": size, **SMALL, "batch": batch})
        return plan_study(spec).compared()[0]

    standard, few, many = planned("standard", 256), planned(FIXED, 128), planned(FIXED, 2560)
    assert few.flops_per_token > many.flops_per_token
    assert many.flops_per_token < standard.flops_per_token, (
        "half of the layers have no queries and keys of their own"
    )
    assert planned("standard", 128).flops_per_token == standard.flops_per_token
    assert many.cache_bytes_per_token == standard.cache_bytes_per_token * 3 // 4, (
        "only values in one of two layers; tables are not per token"
    )
    assert few.id != planned("(fixed_seq_qk:offset=1 standard)", 128).id
    with pytest.raises(UserError, match="the companion takes 99,999 from token 0 on"):
        planned("fixed_seq_qk:length=99999", 256)


def test_old_names_are_accepted(tmp_path: Path) -> None:
    assert h2h.bench_stack is h2h.bench_population
    study = h2h.Study(arms=["standard", "diagonal"], tokens=512, batch=256, seeds=1)
    result = study.run(tmp_path, workers=1, seconds=0.0, stack=False, quiet=True)
    assert result.summary.stopped
    with pytest.raises(TypeError, match="population, or stack, its old name"):
        study.run(tmp_path, stack=False, population=False)


def test_init_from_is_stored_under_its_old_name() -> None:
    arms = ["standard", {"arm": "standard", "name": "mine", "init_from": "b/c"}]
    for key in ("init_from", "from_"):
        study = h2h.Study(arms=arms, tasks=["recall"], **{key: "a/b"})
        assert study.spec.start == "a/b"
        assert study.spec.arms[1].start == "b/c"
        assert study.values["from"] == "a/b"


def test_a_loaded_run_reads_text(raced: tuple[str, dict[str, RunDirectory]]) -> None:
    path = raced[1]["standard"].path
    run = h2h.load(path)
    ids = run.tokenizer.encode("the cat é")
    assert run.tokenizer.decode(ids) == run.tokenizer.decode(torch.tensor(ids.tolist())) == "the cat é"
    logits = run.logits("the cat")
    assert logits.shape == (7, 256)
    assert torch.equal(logits, run.model.logits(torch.tensor([[*b"the cat"]]))[0])
    maps = run.attention("the cat")
    assert [weights.shape for weights in maps] == [(4, 7, 7)] * 2
    assert torch.allclose(maps[0].sum(-1), torch.ones(4, 7))
    assert run.generate("the", tokens=9) == "".join(h2h.generate_text(path, "the", tokens=9, device="cpu"))
    greedy = run.generate("the cat", tokens=1, sampling=h2h.Sampling(temperature=0))
    assert greedy.encode() == bytes([int(logits[-1].argmax())])
    model, tokenizer = run
    assert (model, tokenizer) == (run.model, run.tokenizer)


def test_a_loaded_run_is_short_when_printed(raced: tuple[str, dict[str, RunDirectory]]) -> None:
    run = raced[1]["standard"]
    name = raced[0].rpartition("/")[2]
    assert repr(h2h.load(run.path)).startswith(f"LoadedRun({run.id}: standard, seed 1, ")
    assert name in repr(h2h.load(run.path))
    assert len(repr(h2h.load(run.path))) < 200


@pytest.mark.parametrize("text", ["", "x" * 129])
def test_a_text_that_does_not_fit_the_context_is_rejected(
    text: str, raced: tuple[str, dict[str, RunDirectory]]
) -> None:
    run = h2h.load(raced[1]["standard"].path)
    for read in (run.logits, run.attention):
        with pytest.raises(UserError, match=f"the text has {len(text)} tokens; allowed: 1 to 128"):
            read(text)


def test_a_loaded_run_that_mixes_nothing_has_no_map(raced: tuple[str, dict[str, RunDirectory]]) -> None:
    run = h2h.load(raced[1]["standard"].path)
    size, layers = run.model.size, parse_layout("(standard no_attention)*1").layers(2)
    mixed = dataclasses.replace(run, model=Decoder(size, layers, seed=1))
    assert [weights is None for weights in mixed.attention("cat")] == [False, True]


def test_a_study_converts_to_data_frames(raced: tuple[str, dict[str, RunDirectory]]) -> None:
    folder = raced[1]["standard"].path.parent.parent
    result = h2h.open_study(folder)
    runs, curves, verdicts = result.runs(), result.curves(), result.verdicts_frame()
    assert list(runs.columns) == (folder / "runs.csv").read_text().splitlines()[0].split(",")
    assert set(runs["run"]) == {run.id for run in raced[1].values()}
    stored = {run.id: run.result().test.values["nats"] for run in raced[1].values()}  # type: ignore[union-attr]
    assert dict(zip(runs["run"], runs["test_nats"], strict=True)) == stored
    one = curves[curves["run"] == raced[1]["standard"].id]
    logged = raced[1]["standard"].logged_rows()
    assert one["step"].tolist() == [row.step for row in logged]
    assert one["nats"].dropna().tolist() == [row.nats for row in logged if row.nats is not None]
    assert {"label", "seed", "corpus", "tokens", "lr"} <= set(curves.columns)
    assert verdicts["verdict"].tolist() == [row.verdict for row in result.verdicts]
    assert verdicts.equals(result.to_pandas())


def test_damaged_curves_are_left_out_and_named(
    raced: tuple[str, dict[str, RunDirectory]], tmp_path: Path
) -> None:
    folder = shutil.copytree(raced[1]["standard"].path.parent.parent, tmp_path / "copy")
    damaged = folder / "runs" / raced[1]["standard"].id / "metrics.jsonl"
    damaged.write_text('{"step": 1, "tokens": 256, "nats": 1.0}\n')
    result = h2h.open_study(folder)
    curves = result.curves()
    assert set(curves["run"]) == {run.id for arm, run in raced[1].items() if arm != "standard"}
    assert len([line for line in result.damage if str(damaged) in line]) == 1
    result.curves()
    assert len([line for line in result.damage if str(damaged) in line]) == 1


def test_without_pandas_the_error_names_it(
    raced: tuple[str, dict[str, RunDirectory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = h2h.open_study(raced[1]["standard"].path.parent.parent)
    monkeypatch.setitem(sys.modules, "pandas", None)
    for table in (result.runs, result.curves, result.verdicts_frame, result.to_pandas):
        with pytest.raises(UserError, match=r"^data frames need pandas: pip install pandas$"):
            table()


def test_studies_and_results_are_short_when_printed(raced: tuple[str, dict[str, RunDirectory]]) -> None:
    study = h2h.Study(arms=["standard", "sharing:tie=kv"], name="mine", seeds=3)
    assert repr(study) == "Study('mine': standard, (Q, K=V); 3 seeds; stdlib; nano)"
    many = h2h.Study(arms=["standard", *(f"standard:window={n}" for n in range(1, 9))], seeds=1)
    assert repr(many).count("window") == 3
    assert ", ...; 1 seed; stdlib; nano)" in repr(many)
    folder = raced[1]["standard"].path.parent.parent
    result = h2h.open_study(folder)
    words = "; ".join(f"{row.label} {row.verdict}" for row in result.verdicts)
    assert repr(result) == f"StudyResult({str(folder)!r}: 3 of 3 runs done; {words})"


def test_a_notebook_shows_a_styled_and_escaped_table(
    raced: tuple[str, dict[str, RunDirectory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    result = h2h.open_study(raced[1]["standard"].path.parent.parent)
    hostile = "<script>alert(1)</script>"
    result.verdicts[0] = dataclasses.replace(result.verdicts[0], label=hostile, notes=[hostile])
    shown = result._repr_html_()
    assert shown is not None
    assert shown.startswith('<div class="h2h-verdicts"><style>.h2h-verdicts')
    assert "<script" not in shown
    assert shown.count("&lt;script&gt;alert(1)") == 2
    # Every rule is limited to the table: the notebook's own look is not changed.
    rules = re.findall(r"([^{}]+)\{", shown.partition("<style>")[2].partition("</style>")[0])
    assert all(one.strip().startswith(".h2h-verdicts") for rule in rules for one in rule.split(","))
    monkeypatch.setitem(sys.modules, "headtohead.report.templates", None)
    assert result._repr_html_() is None


def test_the_loaded_run_in_the_documents_works(raced: tuple[str, dict[str, RunDirectory]]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "studies.md").read_text()
    block = next(text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "h2h.load(" in text)
    names: dict[str, object] = {}
    exec(block.replace("races/mine/ID", str(raced[1]["standard"].path)), names)
    assert isinstance(names["run"], h2h.LoadedRun)
