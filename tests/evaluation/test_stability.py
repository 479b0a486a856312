from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headtohead.evaluation.logged_row import LoggedRow
from headtohead.evaluation.stability import final_loss, gradient_tail, spikes, tokens_to_target


def rows(nats: Any, **columns: Any) -> list[LoggedRow]:
    """Return logged rows of 100 tokens each."""
    return [
        LoggedRow(
            step,
            tokens=100 * step,
            nats=None if value is None else float(value),
            **{name: values[step - 1] for name, values in columns.items()},
        )
        for step, value in enumerate(nats, 1)
    ]


def noisy(count: int = 200, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return 2 + 5 / np.sqrt(np.arange(1, count + 1)) + generator.normal(0, 0.03, count)


def test_a_smooth_curve_has_no_spikes_and_each_jump_is_one() -> None:
    assert sum(spikes(rows(noisy(seed=seed))) for seed in range(100)) <= 2
    curve = noisy()
    curve[60:64] += 1.0
    curve[150] += 1.0
    assert spikes(rows(curve)) == 2
    curve[20] += 9.0
    assert spikes(rows(curve)) == 3, "the first judged row"
    curve[19] += 9.0
    assert spikes(rows(curve[:20])) == 0, "too few rows"


def test_a_jump_below_one_percent_is_not_a_spike() -> None:
    flat = np.full(60, 2.0)
    flat[40] = 2.019
    assert spikes(rows(flat)) == 0
    flat[40] = 2.021
    assert spikes(rows(flat)) == 1


def test_rows_without_numbers_are_skipped() -> None:
    curve = noisy()
    curve[100] += 1.0
    found = rows(curve)
    found[50] = LoggedRow(51)
    found.insert(30, LoggedRow(30, valid={"nats": 9.0}))
    assert spikes(found) == 1
    assert tokens_to_target([LoggedRow(1)], 2.0) is None
    assert final_loss([]) is None
    assert spikes([]) == 0
    assert gradient_tail(rows(curve)) is None


def test_the_gradient_tail_is_the_99th_percentile_over_the_median() -> None:
    norms = np.full(200, 0.5)
    assert gradient_tail(rows(noisy(), grad_norm=norms, grad_norm_max=norms)) == pytest.approx(1.0)
    largest = norms.copy()
    largest[[3, 50, 90, 120]] = 4.0
    assert gradient_tail(rows(noisy(), grad_norm=norms, grad_norm_max=largest)) == pytest.approx(8.0)
    assert gradient_tail(rows(noisy(), grad_norm=0 * norms, grad_norm_max=largest)) is None


def test_tokens_to_a_target_use_the_averaged_curve() -> None:
    line = np.linspace(4.0, 2.0, 101)  # 0.02 nats per row; the mean of five rows lags by two
    assert final_loss(rows(line)) == pytest.approx(2.04)
    found = tokens_to_target(rows(line), 3.05)
    # row 1, plus (4 - 3.05) / 0.02 rows, plus two for the lag
    assert found == pytest.approx(100 * (1 + 47.5 + 2))
    assert tokens_to_target(rows(line), 2.0399) is None
    assert tokens_to_target(rows(line), 9.0) == 500, "the first row of the averaged curve"
