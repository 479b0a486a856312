"""Seconds per step: arms take turns, results are frozen in the lock and never measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headtohead.common.errors import DamagedFile, UserError
from headtohead.kernels.path import is_plain
from headtohead.study.config.spec import build_study
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import Plan
from headtohead.study.plan.planner import plan_study
from headtohead.study.plan.step_timing import FrozenStepTimes
from headtohead.study.store.doctor import examine, repair
from headtohead.study.store.frozen import NAME, read_lock
from headtohead.training.trainer import Trainer


class Clock:
    """A clock that only steps advance: by the cost of the first layer's mechanism times `slowdown`."""

    def __init__(self) -> None:
        self.costs = {"Standard": 1.0, "Sharing": 0.5, "Diagonal": 4.0}
        self.now = 0.0
        self.slowdown = 1.0
        self.steps: list[str] = []
        self.plain: set[bool] = set()

    def __call__(self) -> float:
        return self.now

    def step(self, trainer: Trainer) -> None:
        name = type(trainer.model.layers[0].mechanism).__name__
        self.steps.append(name)
        self.plain.add(is_plain())
        self.now += self.costs[name] * self.slowdown * (3 if is_plain() and name == "Sharing" else 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(Trainer, "one_step", lambda self: made.step(self))
    return made


def plan(story: Path, folder: Path, clock: Clock, threads: int = 1, **values: Any) -> Plan:
    given = {
        "arms": ["standard", "sharing:tie=kv"],
        "corpus": f"file:{story}",
        "tokens": 25_600,
        "batch": 256,
        "seeds": 2,
        "length": "time",
    }
    step_times = FrozenStepTimes(folder, ExecutionSettings(threads=threads), clock=clock)
    return plan_study(build_study(given | values), step_times=step_times)


def tokens(found: Plan) -> dict[str, int]:
    return {f"{run.length} {run.arm}": run.training.tokens for run in found.compared()}


def test_equal_time_solves_the_tokens_and_the_baseline_keeps_its_own(
    story: Path, tmp_path: Path, clock: Clock
) -> None:
    found = plan(story, tmp_path, clock, arms=["standard", "sharing:tie=kv", "diagonal"])
    assert tokens(found) == {"time standard": 25_600, "time sharing:tie=kv": 51_200, "time diagonal": 6_400}
    assert {row.match for row in found.solved} == {1.0}
    assert "500 ms per step, the baseline 1000" in found.solved[0].note
    same = plan(story, tmp_path, clock, length=["tokens", "time"])
    assert len({run.id for run in same.compared() if run.arm == "standard"}) == 2  # one per seed


def test_arms_take_turns_and_the_first_steps_do_not_count(story: Path, tmp_path: Path, clock: Clock) -> None:
    # A machine that gets slower with every step: timing one arm after the other would be wrong.
    step = clock.step

    def slowing(trainer: Trainer) -> None:
        clock.slowdown = 100.0 if len(clock.steps) < 4 else 1.0 + len(clock.steps) // 2
        step(trainer)

    clock.step = slowing  # type: ignore[method-assign]
    assert tokens(plan(story, tmp_path, clock))["time sharing:tie=kv"] == 51_200
    assert clock.steps[:6] == ["Standard", "Sharing"] * 3
    assert len(clock.steps) == 2 * (2 + 8)


def test_what_was_measured_is_frozen(story: Path, tmp_path: Path, clock: Clock) -> None:
    first = plan(story, tmp_path, clock)
    taken = len(clock.steps)
    clock.costs["Sharing"] = 0.25
    again = plan(story, tmp_path, clock, seeds=3, threads=2)
    assert {run.id for run in first.compared()} < {run.id for run in again.compared()}
    assert len(clock.steps) == taken
    (tmp_path / NAME).unlink()
    assert tokens(plan(story, tmp_path, clock))["time sharing:tie=kv"] == 102_400


def test_an_arm_added_later_is_timed_together_with_a_known_one(
    story: Path, tmp_path: Path, clock: Clock
) -> None:
    first = plan(story, tmp_path, clock)
    clock.slowdown = 7.0
    arms = ["standard", "sharing:tie=kv", "diagonal"]
    later = plan(story, tmp_path, clock, arms=arms)
    assert tokens(later) == tokens(first) | {"time diagonal": 6_400}
    assert "Sharing" not in clock.steps[20:]
    (tmp_path / "other").mkdir()
    plan(story, tmp_path / "other", clock)
    with pytest.raises(UserError, match=r"were measured on .* 1 thread, fused path; .* 2 threads"):
        plan(story, tmp_path / "other", clock, arms=arms, threads=2)


def test_the_plain_path_is_timed_on_its_own(story: Path, tmp_path: Path, clock: Clock) -> None:
    found = plan(story, tmp_path, clock, length=["time", "time_plain"])
    assert tokens(found)["time sharing:tie=kv"] == 51_200
    assert tokens(found)["time_plain sharing:tie=kv"] == 17_152  # 67 steps: nearest to 100 / 1.5
    assert clock.plain == {False, True}
    assert not is_plain()
    assert {row.where.split(", ")[-1] for row in read_lock(tmp_path).seconds.values()} == {
        "fused path",
        "plain path",
    }


def test_what_cannot_be_timed_is_rejected(
    story: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="measured when the study runs"):
        plan_study(
            build_study({"arms": ["standard", "diagonal"], "corpus": f"file:{story}", "length": "time"})
        )
    with pytest.raises(UserError, match=r"arm 'diagonal': length=time cannot be met: .* less than one step"):
        plan(story, tmp_path, clock, arms=["standard", "diagonal"], tokens=256)

    def fails(trainer: Trainer) -> None:
        raise RuntimeError("no such kernel")

    clock.step = fails  # type: ignore[method-assign]
    with pytest.raises(UserError, match="timing a step of arm 'standard' failed: RuntimeError: no such"):
        plan(story, tmp_path / "new", clock)
    clock.step = lambda trainer: None  # type: ignore[method-assign]
    with pytest.raises(UserError, match="measured 0 seconds"):
        plan(story, tmp_path / "new", clock)


def test_a_damaged_lock_is_repaired_with_its_seconds(story: Path, tmp_path: Path, clock: Clock) -> None:
    found = plan(story, tmp_path, clock)
    seconds = msgspec.to_builtins(read_lock(tmp_path).seconds)
    study = {"outline": found.manifest.as_dict(), "added_seeds": [], "seconds": seconds}
    (tmp_path / "study.json").write_text(json.dumps(study))
    broken = {"plans": {}, "seconds": {key: row | {"seconds": 0} for key, row in seconds.items()}}
    (tmp_path / NAME).write_text(json.dumps(broken))
    with pytest.raises(DamagedFile, match="damaged file"):
        plan(story, tmp_path, clock)
    repair(examine(tmp_path))
    clock.slowdown = 3.0
    assert {run.id for run in plan(story, tmp_path, clock).compared()} == {run.id for run in found.compared()}


def test_a_timed_step_is_a_step(story: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    found = plan_study(
        build_study(
            {
                "arms": ["standard", "diagonal"],
                "corpus": f"file:{story}",
                "tokens": 2560,
                "batch": 256,
                "length": "time",
            }
        ),
        step_times=FrozenStepTimes(tmp_path, ExecutionSettings()),
    )
    assert torch.get_num_threads() == before
    rows = read_lock(tmp_path).seconds
    assert {row.arm for row in rows.values()} == {"standard", "diagonal"}
    spent = {
        run.arm: run.training.tokens * row.seconds
        for run in found.compared()
        for row in rows.values()
        if row.arm == run.arm
    }
    whole_step = 256 * max(row.seconds for row in rows.values())
    assert spent["diagonal"] == pytest.approx(spent["standard"], abs=whole_step / 2 + 1e-9)
