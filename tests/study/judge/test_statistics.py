from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headtohead.study.judge.statistics import (
    compare_medians,
    compare_paired,
    decide,
    detectable_difference,
    document_interval,
    holm,
    two_groups,
)


def test_the_interval_and_p_are_scipys_paired_t_test() -> None:
    a, b = [2.1, 2.3, 2.2, 2.5, 2.4], [2.0, 2.25, 2.0, 2.3, 2.35]
    found = compare_paired(a, b)
    reference = stats.ttest_rel(a, b)
    interval = reference.confidence_interval(0.95)
    assert found.p == pytest.approx(reference.pvalue)
    assert (found.ci_low, found.ci_high) == pytest.approx((interval.low, interval.high))
    narrow = reference.confidence_interval(0.90)
    assert (found.equivalence_low, found.equivalence_high) == pytest.approx((narrow.low, narrow.high))
    assert found.correlation == pytest.approx(np.corrcoef(a, b)[0, 1])


def test_undefined_numbers_are_none() -> None:
    assert compare_paired([], []).difference is None
    one = compare_paired([1.0], [2.0])
    assert (one.difference, one.ci_low, one.p, one.detectable) == (-1.0, None, None, None)
    same = compare_paired([1.0, 2.0], [1.0, 2.0])
    assert (same.difference, same.ci_low, same.ci_high, same.p, same.detectable) == (0.0, *[None] * 4)
    apart = compare_paired([2.0, 3.0], [1.0, 2.0])
    assert (apart.difference, apart.p, apart.ci_low) == (1.0, None, None)


@pytest.mark.parametrize("n", [3, 5, 8])
def test_the_detectable_difference_has_the_power_it_claims(n: int) -> None:
    shift = detectable_difference(1.0, n)
    assert shift is not None
    generator = np.random.default_rng(0)
    draws = generator.normal(shift, 1.0, (20_000, n))
    p = stats.ttest_1samp(draws, 0, axis=1).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.012)


@pytest.mark.parametrize("n", [3, 5, 8])
def test_the_deciding_interval_covers_the_truth(n: int) -> None:
    generator = np.random.default_rng(n)
    inside = 0
    for _ in range(2000):
        base = generator.normal(2.0, 0.05, n)
        found = compare_paired((base + generator.normal(0.01, 0.02, n)).tolist(), base.tolist())
        assert found.ci_low is not None
        inside += found.ci_low <= 0.01 <= found.ci_high  # type: ignore[operator]
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


def test_holm_is_the_step_down_rule() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_holm_never_lowers_a_p_and_keeps_their_order(values: list[float]) -> None:
    adjusted = holm(values)
    assert all(a is not None and a >= p for a, p in zip(adjusted, values, strict=True))
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranked = [adjusted[i] for i in order]
    assert ranked == sorted(ranked)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("difference", "p", "low", "high", "verdict"),
    [
        (-0.02, 0.01, -0.03, -0.01, "better"),
        (0.02, 0.049, 0.01, 0.03, "worse"),
        (0.001, 0.5, -0.003, 0.004, "equivalent"),
        (0.001, 0.5, -0.006, 0.004, "undecided"),
        (0.02, 0.05, 0.001, 0.04, "undecided"),
        (None, None, None, None, "undecided"),
        (-0.02, None, None, None, "undecided"),
        (0.0, 1.0, 0.0, 0.0, "equivalent"),
    ],
)
def test_verdicts(
    difference: float | None, p: float | None, low: float | None, high: float | None, verdict: str
) -> None:
    assert decide(difference, p, low, high, 0.005) == verdict


def test_the_document_interval_is_the_ratio_of_sums_with_its_error() -> None:
    generator = np.random.default_rng(1)
    size = generator.integers(100, 900, 40)
    arm = [[[float(2.0 * s), int(s)] for s in size]]
    base = [[[float(1.9 * s), int(s)] for s in size]]
    low, high = document_interval(arm, base) or (0, 0)
    assert (low, high) == pytest.approx((0.1 / math.log(2),) * 2)
    noisy = [[[float(2.0 * s + generator.normal(0, 30)), int(s)] for s in size]]
    low, high = document_interval(noisy, base) or (0, 0)
    assert low < 0.1 / math.log(2) < high
    assert high - low < 0.1


def test_the_document_interval_covers_the_truth() -> None:
    generator = np.random.default_rng(3)
    inside = 0
    for _ in range(800):
        size = generator.integers(200, 800, 60)
        per_byte = generator.normal(0.02, 0.05, 60)
        arm = [[[float(x * s), int(s)] for x, s in zip(per_byte + 1, size, strict=True)]]
        base = [[[float(s), int(s)] for s in size]]
        low, high = document_interval(arm, base) or (0, 0)
        inside += low <= 0.02 / math.log(2) <= high
    assert inside / 800 == pytest.approx(0.95, abs=0.03)


def test_seeds_in_two_groups_are_detected() -> None:
    assert two_groups([2.044, 2.054, 2.068, 2.086, 2.268]) == (2.086, 2.268)
    assert two_groups([2.044, 2.054, 2.068, 2.086, 2.110]) is None
    assert two_groups([1.0, 1.0, 1.0, 9.0]) is None, "four are too few"
    assert two_groups([1.0] * 6) is None
    generator = np.random.default_rng(0)
    flagged = np.mean([two_groups(generator.normal(size=5).tolist()) is not None for _ in range(4000)])
    assert flagged == pytest.approx(0.046, abs=0.01)


def test_too_few_or_unequal_blocks_give_no_interval() -> None:
    assert document_interval([], []) is None
    assert document_interval([[[1.0, 2.0]]], [[[1.0, 2.0]]]) is None
    assert document_interval([[[1.0, 2.0]] * 4], [[[1.0, 2.0]] * 5]) is None


def test_medians_are_compared_by_swapping_arms_in_every_seed() -> None:
    theirs = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    difference, p = compare_medians([value - 10 for value in theirs], theirs)
    assert difference == -10.0
    # Of 64 swaps only two, none and all, give medians as far apart.
    assert p == 2 / 64
    assert compare_medians(theirs[:5], theirs[:5]) == (0.0, None)
    assert compare_medians(theirs, theirs) == (0.0, 1.0)


@pytest.mark.parametrize("spread", [1.0, 2.5])
def test_equal_medians_are_rarely_called_different(spread: float) -> None:
    """With eight paired seeds and one arm up to 2.5 times as wide, at most 5 % of studies find a difference."""
    draw = np.random.default_rng(5)
    common = draw.normal(size=(1000, 8))
    arm, base = (0.7 * common + 0.7 * width * draw.normal(size=(1000, 8)) for width in (spread, 1.0))
    found = [compare_medians(a, b)[1] for a, b in zip(arm, base, strict=True)]
    wrong = np.mean([p is not None and p < 0.05 for p in found])
    assert wrong < 0.05 + 2.6 * np.sqrt(0.05 * 0.95 / 1000)
