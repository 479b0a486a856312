"""What is measured on trained runs besides their loss."""

from pathlib import Path

import pytest

from headtohead import Study, load
from headtohead.common.errors import DamagedFile, UserError
from headtohead.data.shards import prepare
from headtohead.measure.loss import nats_by_position, score_split
from headtohead.study.probes import PROBES, Probe, probe_names
from headtohead.study.store import Store

TINY = {"size": "nano", "tokens": "4k", "batch": 1024, "seeds": 1}


def race(folder: Path, **changes: object) -> Store:
    Study(["standard"], **(TINY | changes)).run(folder, quiet=True, workers=1)
    return Store(folder)


def test_a_probe_is_taken_once_and_kept_beside_the_result(tmp_path: Path) -> None:
    store = race(tmp_path, probes=["positions"])
    (run,) = store.runs()
    found = run.probe("positions")
    assert found is not None
    bins = found["bins"]
    assert [first for first, _, _ in bins] == [1, 2, 4, 8, 16, 32, 64, 128][: len(bins)]
    before = (run.path / "probes" / "positions.json").stat().st_mtime_ns
    race(tmp_path, probes=["positions"])
    assert (run.path / "probes" / "positions.json").stat().st_mtime_ns == before


def test_a_probe_asked_for_later_uses_the_weights_and_leaves_the_run_alone(tmp_path: Path) -> None:
    store = race(tmp_path)
    (run,) = store.runs()
    result = (run.path / "result.json").read_bytes()
    race(tmp_path, probes=["positions"])
    assert (run.path / "result.json").read_bytes() == result
    model, _ = load(run.path)
    test = prepare("stdlib", "bytes").splits["test"]
    assert run.probe("positions") == {"bins": nats_by_position(model, test)}


def test_loss_by_position_is_the_loss(tmp_path: Path) -> None:
    (run,) = race(tmp_path).runs()
    model, tokenizer = load(run.path)
    test = prepare("stdlib", "bytes").splits["test"]
    bins = nats_by_position(model, test)
    mean = sum((last - first + 1) * nats for first, last, nats in bins) / model.size.context
    assert mean == pytest.approx(score_split(model, test, tokenizer.token_bytes()).nats, rel=2e-3)
    assert bins[-1][1] == model.size.context


def test_a_damaged_probe_is_named_and_taken_again(tmp_path: Path) -> None:
    (run,) = race(tmp_path, probes=["positions"]).runs()
    path = run.path / "probes" / "positions.json"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"1,", b"2,", 1))
    with pytest.raises(DamagedFile, match=r"positions\.json"):
        run.probe("positions")
    race(tmp_path, probes=["positions"])
    assert path.read_bytes() == good


def test_a_probe_that_fails_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(subject: object, argument: str) -> dict[str, object]:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setitem(PROBES, "positions", Probe("fails", fail, {}))
    result = Study(["standard"], probes="positions", **TINY).run(tmp_path, quiet=True, workers=1)
    assert result.summary.trouble == ["probe positions: ZeroDivisionError: on purpose"]
    (run,) = Store(tmp_path).runs()
    assert run.state() == "done"
    assert run.probe("positions") is None


def test_without_weights_a_finished_run_keeps_what_it_has(tmp_path: Path) -> None:
    Study(["standard"], **TINY).run(tmp_path, quiet=True, workers=1, keep_weights=False)
    result = Study(["standard"], probes="positions", **TINY).run(tmp_path, quiet=True, workers=1)
    assert result.summary.left == 0
    (run,) = Store(tmp_path).runs()
    assert run.probe("positions") is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["position"], "unknown probe 'position'.*positions"),
        (["positions:3"], "takes no argument"),
        (3, "takes a name or a list"),
    ],
)
def test_a_probe_that_does_not_exist_is_one_line(given: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        probe_names(given)
