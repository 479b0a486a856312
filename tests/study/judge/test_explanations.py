"""The probe `explain`: taken with the run or later, validated, equal to `h2h explain`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

import headtohead as h2h
from headtohead import Study
from headtohead.cli.main import main
from headtohead.cli.shared.results import show_verdicts
from headtohead.common.errors import DamagedFile, UserError
from headtohead.study.probes import number_at, read_found
from headtohead.study.probes.explain import Explained, ReadOut
from headtohead.study.store.run_store import RunDirectory, Store

RECALL, GRAMMAR = "recall:train=60,pairs=3,queries=2", "grammar:train=60"
TINY: dict[str, Any] = {"tokens": 1500, "batch": 300, "seeds": 2, "lr": 5e-3}
NAME = "explain:5"
PATHS = [
    "accuracy",
    "right",
    "examples",
    "marked_share",
    "uniform",
    *(f"explanations.{name}.mass" for name in ("rollout", "layer_mean", "gradient")),
    "explanations.rollout.over_uniform",
    *(
        f"explanations.rollout.{kind}.{at}"
        for kind in ("confidence", "confidence_correct", "confidence_all")
        for at in (10, 33, 50)
    ),
    *(
        f"{place}.{name}"
        for place in (
            "explanations.layer_mean",
            "explanations.gradient",
            "explanations.rollout.above_chance",
            "chance",
        )
        for name in ("comprehensiveness", "sufficiency", "aopc_comprehensiveness", "aopc_sufficiency")
    ),
    "published.squad",
    "mean.entropy",
    "mean.sink",
    "layers.1.entropy",
    "layers.1.sink",
    "layers.1.indicators.head_diversity",
]


def race(folder: Path, *tasks: str, **changes: Any) -> h2h.StudyResult:
    arms = changes.pop("arms", ["standard", "no_attention"])
    return Study(arms, tasks=list(tasks), **(TINY | changes)).run(folder, quiet=True, workers=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two tasks, run first without the probe and then with it."""
    folder = tmp_path_factory.mktemp("explain")
    race(folder, RECALL, GRAMMAR)
    before = run_files(folder)
    race(folder, RECALL, GRAMMAR, probes=[NAME])
    # No run is repeated: its times would differ.
    assert run_files(folder) == before
    return folder


def run_files(folder: Path) -> dict[str, list[bytes]]:
    files = ("result.json", "cost.json", "metrics.jsonl")
    return {run.id: [(run.path / name).read_bytes() for name in files] for run in Store(folder).runs()}


def run_of(folder: Path, task: str, label: str, seed: int = 1) -> RunDirectory:
    for run in Store(folder).runs():
        spec = run.spec()
        if (spec.corpus.label, spec.label, spec.seed) == (task, label, seed):
            return run
    raise AssertionError(task, label)


@pytest.mark.slow
@pytest.mark.parametrize("task", [RECALL, GRAMMAR])
def test_the_probe_equals_explain(task: str, finished: Path) -> None:
    run = run_of(finished, task, "standard")
    found = to_builtins(run.probe(NAME))
    assert (found["task"], found["examples"]) == (task, 5)
    assert found == h2h.explain(run.path, limit=5, device="cpu", quiet=True)
    assert found == h2h.explain(run.path, task, limit=5, device="cpu", quiet=True)


def test_every_number_has_a_path(finished: Path) -> None:
    found = run_of(finished, GRAMMAR, "standard").probe(NAME)
    assert {path: number_at(found, path) for path in PATHS if number_at(found, path) is None} == {}


def test_a_run_without_maps_keeps_the_control(finished: Path) -> None:
    found = run_of(finished, GRAMMAR, "no_attention").probe(NAME)
    assert isinstance(found, Explained)
    assert set(found.explanations) == {"gradient"}
    assert number_at(found, "explanations.rollout.mass") is None
    assert found.mean == ReadOut(None, None)


def test_a_result_that_lacks_a_number_is_invalid(finished: Path) -> None:
    found = to_builtins(run_of(finished, GRAMMAR, "standard").probe(NAME))
    for change in (
        {"accuracy": "high"},
        {"explanations": {"rollout": {"mass": 0.5}}},
        {"layers": {"1": {"entropy": 0.1}}},
        {"chance": {}},
    ):
        with pytest.raises(ValueError, match=r"Expected|missing"):
            read_found(NAME, found | change)


def test_a_damaged_file_is_named_and_the_probe_taken_again(tmp_path: Path) -> None:
    race(tmp_path, GRAMMAR, arms=["standard"], probes=[NAME], seeds=1)
    (run,) = Store(tmp_path).runs()
    path, result = run.probe_path(NAME), (run.path / "result.json").read_bytes()
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"marked": 5', b'"marked": 4').replace(b'"marked":5', b'"marked":4'))
    with pytest.raises(DamagedFile, match="explain"):
        run.probe(NAME)
    race(tmp_path, GRAMMAR, arms=["standard"], probes=[NAME], seeds=1)
    assert path.read_bytes() == good
    assert (run.path / "result.json").read_bytes() == result


def test_verdicts_do_not_depend_on_the_probe(finished: Path) -> None:
    result = race(finished, RECALL, GRAMMAR, probes=[NAME])
    bare = race(finished, RECALL, GRAMMAR)
    assert [row.as_dict() for row in result.verdicts] == [row.as_dict() for row in bare.verdicts]


def test_the_task_of_a_run_is_the_default(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(finished, GRAMMAR, "standard")
    with pytest.raises(SystemExit, match="0"):
        main(["explain", str(run.path), "--limit", "5", "--json", "--device", "cpu"])
    assert json.loads(capsys.readouterr().out) == to_builtins(run.probe(NAME))
    both = [run_of(finished, GRAMMAR, "standard", seed).path for seed in (1, 2)]
    assert h2h.explain(both, limit=5, quiet=True)["accuracy"]["n"] == 2
    other = run_of(finished, RECALL, "standard").path
    with pytest.raises(UserError, match="one task at a time"):
        h2h.explain([run.path, other], limit=5, quiet=True)
    page = h2h.look([run.path, both[1]], example=2, out=tmp_path / "a.html", quiet=True)
    assert page.read_text().count('"relevant"') == 2
    assert h2h.look(other, task=RECALL, out=tmp_path / "b.html", quiet=True).is_file()
    with pytest.raises(UserError, match="cannot read text"):
        h2h.look(run.path, "some text", out=tmp_path / "c.html", quiet=True)
    with pytest.raises(UserError, match="has no training task"):
        h2h.explain(h2h.load_model(run.path), quiet=True)


def test_seeds_are_averaged_and_shown(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    race(finished, RECALL, GRAMMAR, probes=[NAME])
    result = h2h.open_study(finished)
    rows = {(row.contest.corpus_label, row.label): row for row in result.explained()}
    assert len(rows) == 4
    path = "explanations.rollout.mass"
    each = [number_at(run_of(finished, GRAMMAR, "standard", seed).probe(NAME), path) for seed in (1, 2)]
    row = rows[GRAMMAR, "standard"]
    assert row.seeds == (1, 2)
    assert row.mean(path) == pytest.approx(sum(value or 0.0 for value in each) / 2)
    assert row.mean("accuracy") is not None
    assert rows[GRAMMAR, "no_attention"].mean(path) is None
    assert row.mean("explanations.nothing.mass") is None
    show_verdicts(result)
    shown = capsys.readouterr().out
    assert "attention of the read-out row on relevant tokens" in shown
    # An arm without rollout shows the explanation it has, with its name.
    some = dataclasses.replace(
        row, found=row.found | {"explanations": {"layer_mean": row.found["explanations"]["rollout"]}}
    )
    monkeypatch.setattr(h2h.StudyResult, "explained", lambda self: [some])
    show_verdicts(result)
    assert "layer mean" in capsys.readouterr().out
    assert "rollout" in shown
    assert f"{row.mean(path):.3f}" in shown


def test_only_the_seeds_of_one_arm_are_averaged(finished: Path) -> None:
    one, other = run_of(finished, RECALL, "standard"), run_of(finished, RECALL, "no_attention")
    with pytest.raises(UserError, match="are of standard, no_attention; explain the seeds of one arm"):
        h2h.explain([one.path, other.path], limit=2, device="cpu", quiet=True)
    with pytest.raises(UserError, match=f"run {one.id} is given twice"):
        h2h.explain([one.path, one.path], limit=2, device="cpu", quiet=True)
    with pytest.raises(UserError, match="seed=-1"):
        h2h.explain(one.path, limit=2, seed=-1, device="cpu", quiet=True)
