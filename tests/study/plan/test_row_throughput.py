"""The rows of a pass are chosen by the throughput measured once on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headtohead import Study
from headtohead.study.plan import row_throughput
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import Plan
from headtohead.study.plan.planner import plan_study
from headtohead.study.plan.row_throughput import best_passes, measure_rows, rows_pay

CPU = torch.device("cpu")


@pytest.fixture
def plan(story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("H2H_CACHE", str(tmp_path))
    row_throughput._kept.cache_clear()
    return plan_study(Study(["standard"], corpus=f"file:{story}", tokens=5120, batch=256, seeds=2).spec)


def given(plan: Plan) -> tuple[Any, ...]:
    run = next(iter(plan.runs.values()))
    return run, plan.composed(run), plan.dataset(run), ExecutionSettings()


def test_rows_are_added_until_they_do_not_help(plan: Plan) -> None:
    now, calls = [0.0], [0]
    seconds = (1.0, 1.0, 2.5)  # of a step with 1, 2 and 4 rows

    def clock() -> float:
        calls[0] += 1
        if calls[0] % 2 == 0:  # the end of a step
            now[0] += seconds[(calls[0] - 1) // 28]
        return now[0]

    rates = measure_rows(*given(plan), clock=clock)
    assert rates == pytest.approx({1: 256.0, 2: 512.0, 4: 409.6})


def test_single_runs_are_measured_at_their_best(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    usual = row_throughput.trial

    def noted(run: Any, layers: Any, dataset: Any, execution: ExecutionSettings, rows: int) -> Any:
        made.append((rows, execution.record, execution.compile))
        return usual(run, layers, dataset, execution, rows)

    monkeypatch.setattr(row_throughput, "trial", noted)
    monkeypatch.setattr(row_throughput, "max_rows", lambda *given: 2)
    measure_rows(*given(plan))
    assert made[:3] == [(0, True, False), (2, True, False), (2, True, False)], "captured as CUDA graphs"


def test_a_measurement_is_made_once(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def measured(*given: Any) -> dict[int, float]:
        made.append(given)
        return {1: 100.0, 2: 160.0, 4: 200.0, 8: 204.0}

    monkeypatch.setattr(row_throughput, "measure_rows", measured)
    run = given(plan)[0]
    assert best_passes(run, 20, CPU) == 2, "as few as memory allows while nothing is known"
    assert rows_pay(*given(plan))
    assert rows_pay(*given(plan))
    assert len(made) == 1
    assert best_passes(run, 5, CPU) == 1, "2 + 3 rows would be slower than 5"
    assert best_passes(run, 20, CPU) == 2, "10 rows are about as fast as 8"


def test_smaller_passes_are_chosen_where_large_ones_are_slow(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        row_throughput, "measure_rows", lambda *given: {1: 100.0, 2: 160.0, 4: 200.0, 8: 120.0}
    )
    assert rows_pay(*given(plan))
    run = given(plan)[0]
    assert [best_passes(run, rows, CPU) for rows in (4, 5, 8, 12)] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("rates", "pays"),
    [({1: 100.0, 2: 60.0}, False), ({1: 100.0, 2: 103.0}, False), ({1: 100.0, 2: 120.0}, True)],
)
def test_rows_pay_where_they_are_faster(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, rates: dict[int, float], pays: bool
) -> None:
    monkeypatch.setattr(row_throughput, "measure_rows", lambda *given: rates)
    assert rows_pay(*given(plan)) is pays


def test_a_damaged_measurement_is_made_again(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_throughput, "measure_rows", lambda *given: {1: 1.0, 2: 2.0})
    assert rows_pay(*given(plan))
    (kept,) = (tmp_path / "rows").iterdir()
    kept.write_text("{")
    row_throughput._kept.cache_clear()
    assert best_passes(given(plan)[0], 16, CPU) == 1
    assert rows_pay(*given(plan))
    assert kept.read_text() != "{"
