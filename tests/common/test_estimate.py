"""The time left is estimated from the tokens of the plan and the throughput seen, and time spent is divided by phase."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headtohead.common.estimate import Estimate, Work


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def train(estimate: Estimate, clock: Clock, runs: list[str], seconds: float, first: float = 0.0) -> None:
    """Train runs at the same time, with ten reports each."""
    for run in runs:
        estimate.enter(run, "start")
        estimate.trained(run, first)
    for part in range(1, 11):
        clock.now += seconds / 10
        for run in runs:
            estimate.trained(run, first + (1 - first) * part / 10)
    for run in runs:
        estimate.end(run)


def test_nothing_is_estimated_before_a_throughput_is_known() -> None:
    clock = Clock()
    estimate = Estimate(clock)
    estimate.begin([Work("a", "standard", 100.0)])
    assert estimate.seconds_left() is None
    estimate.enter("a", "start")
    clock.now += 60
    estimate.enter("a", "compile")
    assert estimate.seconds_left() is None


def test_every_kind_has_its_own_throughput_and_an_unseen_one_that_of_its_flops() -> None:
    clock = Clock()
    estimate = Estimate(clock)
    estimate.begin(
        [
            *(Work(name, "small", 100.0, flops=1.0) for name in ("a", "b")),
            Work("c", "large", 100.0, flops=5.0),
        ]
    )
    train(estimate, clock, ["a"], 10.0)
    assert estimate.seconds_left() == pytest.approx(10 + 50)
    train(estimate, clock, ["c"], 80.0)
    assert estimate.seconds_left() == pytest.approx(10)


def test_rows_of_a_pass_and_workers_run_at_once() -> None:
    clock = Clock()
    estimate = Estimate(clock)
    estimate.begin([Work(f"{arm}{row}", "k", 100.0) for arm in "abc" for row in range(4)])
    train(estimate, clock, [f"a{row}" for row in range(4)], 10.0)
    assert estimate.seconds_left() == pytest.approx(20)


def test_devices_that_have_not_started_count() -> None:
    clock = Clock()
    estimate = Estimate(clock)
    estimate.begin([Work(name, "k", 100.0) for name in "abcde"], at_once=2)
    train(estimate, clock, ["a"], 10.0)
    assert estimate.seconds_left() == pytest.approx(20)
    estimate.begin([Work(name, "k", 100.0) for name in "bcde"], at_once=4)
    assert estimate.seconds_left() == pytest.approx(10)


def test_compiling_and_scoring_count() -> None:
    clock = Clock()
    estimate = Estimate(clock)
    estimate.begin([Work("a", "k", 100.0), Work("b", "k", 100.0)])
    estimate.enter("a", "start")
    clock.now += 1
    estimate.enter("a", "compile")
    clock.now += 30
    estimate.trained("a", 0.0)
    clock.now += 10
    estimate.trained("a", 1.0)
    estimate.enter("a", "score")
    assert estimate.seconds_left() == pytest.approx(10 + 31, abs=1)
    clock.now += 5
    estimate.enter("a", "probe")
    clock.now += 4
    estimate.end("a")
    assert estimate.seconds_left() == pytest.approx(10 + 40)
    assert estimate.spent == pytest.approx(
        {"start": 1, "compile": 30, "train": 10, "score": 5, "probe": 4, "idle": 0}
    )


def test_steps_of_an_earlier_start_do_not_count_as_speed() -> None:
    clock = Clock()
    estimate = Estimate(clock)
    estimate.begin([Work("a", "k", 100.0), Work("b", "k", 100.0)])
    train(estimate, clock, ["a"], 10.0, first=0.9)
    assert estimate.seconds_left() == pytest.approx(100)


def test_the_time_between_executions_is_not_counted() -> None:
    clock = Clock()
    estimate = Estimate(clock)
    clock.now += 50  # preparing
    estimate.begin([Work("a", "k", 100.0)])
    clock.now += 3  # starting workers
    train(estimate, clock, ["a"], 10.0)
    assert estimate.spent["idle"] == pytest.approx(3)
    assert estimate.spent["train"] == pytest.approx(10)


def test_work_of_a_later_execution_is_included() -> None:
    clock = Clock()
    estimate = Estimate(clock)
    estimate.begin([Work("trial", "k", 100.0)], later=[Work("", "k", 300.0)])
    train(estimate, clock, ["trial"], 10.0)
    assert estimate.seconds_left() == pytest.approx(30)
    estimate.begin([Work("a", "k", 300.0)])
    assert estimate.seconds_left() == pytest.approx(30), "the throughput of the first execution is kept"


def test_from_a_quarter_on_a_recorded_study_was_estimated_within_a_quarter() -> None:
    """Recorded with benchmarks/record_events.py: 4 arms tuned over 4 rates, then 3 seeds, two workers, CPU."""
    path = Path(__file__).parent / "data" / "events.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))
    clock = Clock()
    clock.now = began = events[0][0]
    last = events[-1][0]
    estimate, compared = Estimate(clock), 0
    for when, kind, *given in events:
        clock.now = when
        if kind == "begin":
            given = [[Work(*row) for row in part] for part in given]
        getattr(estimate, kind)(*given)
        left, true = estimate.seconds_left(), last - when
        if 0.25 * (last - began) <= when - began and true > 0.02 * (last - began):
            compared += 1
            assert left == pytest.approx(true, rel=0.25), f"{when - began:.0f} s after the start"
    assert compared > 1000
