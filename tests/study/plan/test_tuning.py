"""Learning rates are tuned on one grid, extended for all arms, chosen on valid and frozen in the lock."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headtohead import Study, forecast, open_study
from headtohead.api.runner import RunSettings, StudyRunner
from headtohead.common.errors import UserError
from headtohead.common.schema import write_document
from headtohead.study.config.spec import StudySpec, Tune, build_study
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.population import TUNING
from headtohead.study.plan.tuning import frozen_tuning, grid_spec
from headtohead.study.store.run_store import Store

SMALL = {"arms": ["standard", "diagonal"], "batch": 256, "seeds": 2}


def study(story: Path, rates: list[float], **values: Any) -> Study:
    tune = {"lr": rates, "tokens": 2560}
    return Study(**(SMALL | {"corpus": f"file:{story}", "tokens": 5120, "tune": tune} | values))


@pytest.mark.page
def test_each_arm_is_trained_at_its_own_best_rate_and_nothing_is_tuned_twice(
    story: Path, tmp_path: Path
) -> None:
    result = study(story, [1e-4, 1e-2, 1.0]).run(tmp_path, workers=1, quiet=True)
    rows = result.manifest.tuning
    assert {row.label for row in rows} == {"standard", "diagonal"}
    chosen = {row.label: row for row in rows if row.chosen}
    for label, row in chosen.items():
        tried = {other.lr: other.score for other in rows if other.label == label}
        known = {lr: score for lr, score in tried.items() if score is not None}
        assert known[row.lr] == min(known.values())
        assert len({other.lr for other in rows}) == len(tried), "one grid for all arms"
    grid = sorted({row.lr for row in rows})
    assert all(grid[0] < row.lr < grid[-1] for row in chosen.values()), (
        "extended until every optimum is interior"
    )
    specs = [run.spec() for run in Store(tmp_path).runs() if run.spec().training.tokens == 5120]
    assert {(spec.label, spec.training.lr) for spec in specs} == {
        (label, row.lr) for label, row in chosen.items()
    }
    assert len(specs) == 4
    again = study(story, [1e-4, 1e-2, 1.0]).run(tmp_path, workers=1, quiet=True)
    assert again.summary.done == 0
    assert again.manifest.tuning == rows
    assert open_study(tmp_path).manifest.tuning == rows
    if find_spec("altair"):
        assert "Learning-rate tuning" in (tmp_path / "report.html").read_text()


def test_rates_of_a_lock_that_does_not_state_the_seeds_of_its_trials_have_those_of_the_study(
    tmp_path: Path,
) -> None:
    tune = Tune((1e-3, 2e-3, 4e-3), seeds=3)
    row = {"corpus": "x", "size": "nano", "shape": "as_is", "label": "standard", "lr": 1e-3, "score": 2.0}
    rows = [row | {"chosen": True, "edge": False}]
    write_document(tmp_path / "study.lock.json", {"plans": {}, "tuning": {"key": rows}})
    found = frozen_tuning(tmp_path, "key", tune)
    assert found is not None
    assert [rate.seeds for rate in found.rows] == [3]
    assert frozen_tuning(tmp_path, "another", tune) is None


def test_without_tokens_every_trial_has_the_length_of_the_run_that_is_judged(story: Path) -> None:
    longer = {"arm": "diagonal", "name": "longer", "tokens": 7680}
    spec = build_study(
        {
            **SMALL,
            "corpus": f"file:{story}",
            "arms": ["standard", longer],
            "tokens": 5120,
            "tune": {"lr": [1e-3, 2e-3, 4e-3]},
        }
    )
    grid = grid_spec(spec, (1e-3,))
    assert {arm.label: spec.train_settings(arm).tokens for arm in spec.arms} == {
        "standard": 5120,
        "longer": 7680,
    }
    assert [grid.train_settings(arm).tokens for arm in grid.arms] == [5120, 7680]
    sizes = build_study({"size": ["nano", "1m"], "arms": ["standard"], "tune": {"lr": [1e-3, 2e-3, 4e-3]}})
    judged, tried = _lengths(sizes), _lengths(grid_spec(sizes, (1e-3,)))
    assert judged["nano"] < judged["1m"]
    assert tried == judged, "not the length of the first size for all"


def _lengths(spec: StudySpec) -> dict[str, int]:
    arm = spec.arms[0]
    return {name: spec.train_settings(arm, spec.size(name, arm)).tokens for name in spec.sizes}


@pytest.mark.slow
def test_the_grid_is_extended_for_all_arms_until_no_optimum_is_at_its_edge(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = study(story, [1e-4, 2e-4, 4e-4], seeds=1).run(tmp_path, workers=1)
    grid = sorted({row.lr for row in result.manifest.tuning})
    assert grid[0] == 1e-4
    assert grid[3] == 8e-4
    assert "the grid is extended for all arms" in capsys.readouterr().out
    for label in ("standard", "diagonal"):
        assert [row.lr for row in result.manifest.tuning if row.label == label] == grid


def test_what_was_chosen_is_frozen(story: Path, tmp_path: Path) -> None:
    study(story, [1e-4, 1e-2, 1.0], seeds=1).run(tmp_path, workers=1, quiet=True)
    path = tmp_path / "study.lock.json"
    lock = json.loads(path.read_text())
    (key,) = lock["tuning"]
    for row in lock["tuning"][key]:
        row["chosen"] = row["lr"] == 1e-4
    write_document(path, lock)
    again = study(story, [1e-4, 1e-2, 1.0], seeds=1).run(tmp_path, workers=1, quiet=True)
    assert {row.lr for row in again.manifest.tuning if row.chosen} == {1e-4}
    assert again.summary.done == 2


def test_a_study_stopped_while_tuning_continues(story: Path, tmp_path: Path) -> None:
    first = study(story, [1e-4, 1e-2, 1.0], seeds=1).run(tmp_path, workers=1, quiet=True, seconds=0.0)
    assert first.summary.stopped
    assert first.verdicts == []
    assert not (tmp_path / "study.json").exists()
    last = study(story, [1e-4, 1e-2, 1.0], seeds=1).run(tmp_path, workers=1, quiet=True)
    assert last.summary.left == 0
    assert last.verdicts[0].n == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tune": 3}, "tune takes a table"),
        ({"tune": {"lr": [1e-3]}}, "three rates or more"),
        ({"tune": {"lr": [1e-3, 2e-3, -1.0]}}, "rates above 0"),
        ({"tune": {"lr": ["a", "b", "c"]}}, "takes numbers"),
        ({"tune": {"lr": [1e-3, 2e-3, 3e-3], "tokenz": 5}}, "did you mean 'tokens'"),
        ({"tune": {"lr": [1e-3, 2e-3, 3e-3]}, "lr": 1e-3}, "both given"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_study({"arms": ["standard", "diagonal"]} | values)


def test_an_arm_with_a_rate_of_its_own_cannot_be_tuned(story: Path, tmp_path: Path) -> None:
    arms = ["standard", {"arm": "diagonal", "lr": 1e-3}]
    with pytest.raises(UserError, match="a learning rate of its own"):
        study(story, [1e-4, 1e-3, 1e-2], arms=arms).run(tmp_path, workers=1, quiet=True)


def test_a_damaged_trial_is_run_again_and_not_counted_as_a_failed_rate(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = [1e-4, 1e-2, 1.0]
    first = study(story, rates, seeds=1).run(tmp_path, workers=1, quiet=True)
    best = {(row.label, row.lr) for row in first.manifest.tuning if row.chosen}
    (tmp_path / "study.lock.json").unlink()
    for run in Store(tmp_path).runs():
        spec = run.spec()
        if spec.training.tokens == 2560 and any(spec.training.lr == lr for _, lr in best):
            (run.path / "result.json").write_text("{")
    again = study(story, rates, seeds=1).run(tmp_path, workers=1)
    assert "and the run is repeated" in capsys.readouterr().out
    assert again.manifest.tuning == first.manifest.tuning


def test_a_forecast_counts_the_tuning(story: Path) -> None:
    found = forecast(study(story, [1e-4, 1e-3, 1e-2]), quiet=True)
    assert found.runs == 2 * 3 + 2 * 2
    assert found.tokens == 6 * 2560 + 4 * 5120


def test_trials_of_an_older_version_continue_apart(story: Path, tmp_path: Path) -> None:
    chosen = study(story, [1e-3, 1e-2, 1e-1], seeds=2)
    chosen.run(tmp_path, workers=1, quiet=True, time_limit=0.0)
    assert 0 < len(Store(tmp_path).runs()) < 6, "stopped while it was tuned"
    execution = ExecutionSettings(device="cuda")
    runner = StudyRunner(chosen.spec, {}, Store(tmp_path), execution, RunSettings(quiet=True))
    assert runner.policy(TUNING).wanted is False
    assert runner.policy("").wanted is None
    fresh = StudyRunner(chosen.spec, {}, Store(tmp_path / "new"), execution, RunSettings(quiet=True))
    assert fresh.policy(TUNING).wanted is None
