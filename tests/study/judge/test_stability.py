from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from headtohead.study.judge.stability import Stability, contest_stability, rate_rise, share_interval
from headtohead.study.store.manifest import Contest, Entry, Manifest, Rate
from headtohead.study.store.run_store import Store
from tests.results import run_result

CONTEST = Contest("c", "c@1", "nano", "as_is", "tokens")
SEEDS = (1, 2, 3)


def name(label: str, seed: int) -> str:
    return f"{ord(label):08x}{seed:08x}"


def curve(start: float, end: float, count: int = 100) -> list[float]:
    return np.linspace(start, end, count).tolist()


def judged(
    folder: Path, curves: dict[str, list[list[float]]], diverged: tuple[str, ...] = ()
) -> list[Stability]:
    """Return the rows of a study whose runs have these curves."""
    store = Store(folder)
    entries, results = [], {}
    for label, rows in curves.items():
        for seed, nats in zip(SEEDS, rows, strict=False):
            run = store.run(name(label, seed))
            run.path.mkdir(parents=True)
            for step, value in enumerate(nats, 1):
                log: dict[str, Any] = {"step": step, "tokens": 10 * step, "nats": value}
                run.log(log | {"grad_norm": 1.0, "grad_norm_max": 2.0})
            entries.append(Entry(run.id, label, seed, CONTEST))
            results[run.id] = run_result("diverged" if run.id in diverged else "done")
    arms = tuple((label, label) for label in curves)
    manifest = Manifest("s", arms, next(iter(curves)), None, 0.005, SEEDS, tuple(entries))
    return contest_stability(store, manifest, CONTEST, results)


def test_tokens_to_target_are_paired_and_have_an_interval(tmp_path: Path) -> None:
    base = [curve(4.0, 2.0 + shift) for shift in (0.0, 0.2, 0.4)]
    # Reaches the same loss in half the rows, then stays; the lengths differ a little between seeds.
    fast = [
        curve(4.0, 2.0 + shift, rows) + [2.0 + shift] * 50
        for shift, rows in ((0.0, 50), (0.2, 52), (0.4, 48))
    ]
    own, arm = judged(tmp_path, {"b": base, "f": fast})
    assert (own.tokens_ratio, own.reached, own.pairs) == (1.0, 3, 3)
    assert (arm.reached, arm.pairs) == (3, 3)
    assert arm.tokens_ratio == pytest.approx(0.51, abs=0.02)
    assert arm.tokens_ratio_low < arm.tokens_ratio < arm.tokens_ratio_high < 0.6  # type: ignore[operator]
    assert (arm.spikes, arm.gradient_tail) == (0.0, 2.0)


def test_an_arm_that_never_reaches_the_target_has_no_ratio(tmp_path: Path) -> None:
    rows = judged(tmp_path, {"b": [curve(4, 2)] * 3, "s": [curve(4, 1), curve(4, 1), curve(4, 3)]})
    assert (rows[1].reached, rows[1].pairs, rows[1].tokens_ratio) == (2, 3, None)


def test_diverged_runs_are_counted_with_their_interval(tmp_path: Path) -> None:
    lost = (name("s", 2),)
    rows = judged(tmp_path, {"b": [curve(4, 2)] * 3, "s": [curve(4, 1)] * 3}, lost)
    assert (rows[0].diverged, rows[1].diverged, rows[1].runs) == (0, 1, 3)
    exact = stats.binomtest(1, 3).proportion_ci(0.95, method="exact")
    assert (rows[1].diverged_low, rows[1].diverged_high) == pytest.approx((exact.low, exact.high))


@pytest.mark.parametrize(("count", "total"), [(0, 5), (5, 5), (2, 9)])
def test_shares_have_the_exact_interval(count: int, total: int) -> None:
    exact = stats.binomtest(count, total).proportion_ci(0.95, method="exact")
    assert share_interval(count, total) == pytest.approx((exact.low, exact.high))
    assert share_interval(0, 0) == (None, None)


def test_runs_without_metrics_give_none(tmp_path: Path) -> None:
    rows = judged(tmp_path, {"b": [[]] * 3, "s": [[]] * 3})
    assert (rows[1].spikes, rows[1].gradient_tail, rows[1].tokens_ratio, rows[1].pairs) == (
        None,
        None,
        None,
        0,
    )


def test_sensitivity_to_the_rate_is_the_worse_neighbor() -> None:
    def tuned(*scores: float | None) -> Manifest:
        best = min(score for score in scores if score is not None)
        rows = [
            Rate("c", "nano", "as_is", "a", 10.0**-index, score, score == best, False)
            for index, score in enumerate(scores)
        ]
        return Manifest("s", (("a", "a"),), "a", None, 0.005, (1,), (), tuning=tuple(rows))

    assert rate_rise(tuned(2.5, 2.0, 2.1, 9.0), CONTEST, "a") == pytest.approx(0.5)
    assert rate_rise(tuned(None, 2.0, 2.1), CONTEST, "a") == pytest.approx(0.1)
    assert rate_rise(tuned(2.0), CONTEST, "a") is None
    both = tuned(2.5, 2.0, 2.1).tuning
    other = tuple(replace(rate, context="64", score=(rate.score or 0.0) + 9.0) for rate in both)
    contexts = replace(tuned(1.0), tuning=(*both, *other))
    assert rate_rise(contexts, CONTEST, "a") == pytest.approx(0.5), "rates of another context are others"
    assert rate_rise(tuned(2.0, 2.1), CONTEST, "b") is None
