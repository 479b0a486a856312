"""Run ids do not change by accident: a study resumed after an upgrade finds its finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headtohead.study.config.spec import build_study, read_study
from headtohead.study.plan.planner import plan_study
from headtohead.study.store import run_spec
from tests.golden.ids import IDS, ROOT, identities, studies

GOLDEN: dict[str, Any] = json.loads(IDS.read_text(encoding="utf-8"))
SLOW = {
    "contenders",
    "contenders-tasks",
    "contenders-tasks-nano",
    "coupled, small, study",
    "coupled, small, glue",
    "coupled, paper, study",
    "coupled, paper, glue",
    "deconstructed, small, study",
    "deconstructed, small, quarter",
    "deconstructed, small, sizes",
    "deconstructed, paper, study",
    "faster_qk, paper, counter",
    "kuramoto-gap",
    "kuramoto-tuning",
    "kuramoto, small, study",
    "kuramoto, small, sizes",
    "kuramoto, paper, study",
    "kuramoto, paper, sizes",
    "sharing, small, study",
    "sharing, small, tasks",
    "sharing, tiny, tasks",
    "sharing, paper, study",
}
"""Studies that take more than a second each to plan."""


def test_every_study_has_its_ids_recorded() -> None:
    assert sorted(studies()) == sorted(GOLDEN)
    assert set(GOLDEN) > SLOW


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in GOLDEN]
)
def test_planning_gives_the_recorded_run_ids_and_lock_keys(name: str) -> None:
    assert identities(studies()[name]) == GOLDEN[name], (
        "run ids have changed: finished runs would be repeated. If that is intended, "
        "run python -m tests.golden.ids and mention it in the release notes"
    )


@pytest.mark.parametrize("change", [{"seed": 99}, {"numerics": -1}, {"new_field": None}])
def test_a_change_of_the_identity_is_detected(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_spec.RunSpec.identity.func
    changed = property(lambda run: before(run) | change)
    monkeypatch.setattr(run_spec.RunSpec, "identity", changed)
    assert identities(studies()["quick"])["runs"] != GOLDEN["quick"]["runs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "result", "labels"),
    [
        (
            "headtohead/studies/kuramoto-1m.toml",
            "kuramoto-1m",
            {"standard", "literal Kuramoto", "gated Kuramoto"},
        ),
        # `sharing` has gained options since then, which are part of its identity.
        ("results/sharing-1m/study.toml", "sharing-1m", {"standard", "diagonal", "GQA-2", "MQA"}),
    ],
)
def test_the_runs_in_results_have_the_ids_that_planning_gives_on_the_real_corpus(
    study: str, result: str, labels: set[str], shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("store.run_spec", "plan.planner"):
        monkeypatch.setattr(f"headtohead.study.{module}.NUMERICS", 1)  # these runs are older than numerics 2
    plan = plan_study(build_study(read_study(ROOT / study)), data_dir=shared_data)
    found = {(run.label, run.seed): run.id for run in plan.compared() if run.label in labels}
    manifest = json.loads((ROOT / "results" / result / "study.json").read_text())["outline"]
    kept = {(row["label"], row["seed"]): row["run"] for row in manifest["entries"] if row["label"] in labels}
    assert found == kept
    assert len(found) == len(labels) * len(manifest["seeds"])
