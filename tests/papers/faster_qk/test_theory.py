"""The reduced equations and the factors, compared with the reference table and the closed form."""

from __future__ import annotations

import dataclasses
import math

import pytest

from headtohead import UserError
from headtohead.papers.faster_qk import published
from headtohead.papers.faster_qk.findings import factor_findings
from headtohead.papers.faster_qk.theory import LOSSES, RATIOS, Reduced, examine_factorised

# alpha (mu_QK, mu_OV) at losses 1 and 1e-4, and tau at 1e-4
TABLE = {
    0.01: ((0.0955, 0.0545, 25.16), (0.1488, 0.5588, 81.67), 2.55e6),
    0.1: ((0.1220, 0.3293, 19.69), (0.2875, 1.3949, 42.28), 4.90e6),
    1.0: ((0.2153, 1.0093, 11.16), (0.5911, 2.6711, 20.56), 1.26e7),
    10.0: ((0.4443, 2.0790, 5.408), (0.9221, 4.7735, 13.18), 9.32e6),
    100.0: ((0.8180, 3.8053, 2.938), (0.9927, 7.2102, 12.24), 9.51e6),
}


def test_the_initial_state_is_the_published_one() -> None:
    model = Reduced()
    assert math.isclose(model.alpha(0.0), 0.0909, abs_tol=5e-5)
    assert math.isclose(model.loss(0.0, 0.0), 2.9957, abs_tol=5e-5)


@pytest.mark.parametrize("r", RATIOS)
def test_closed_form_and_path_match_the_table(r: float) -> None:
    model = Reduced()
    reached, path = model.integrate(r)
    for loss, point, alpha in zip(LOSSES, reached, published.REDUCED[r], strict=True):
        exact = model.solve(r, loss)
        assert math.isclose(exact.alpha, alpha, abs_tol=5.1e-5)
        assert math.isclose(point.alpha, exact.alpha, abs_tol=1e-9)
        assert math.isclose(model.loss(exact.mu_qk, exact.mu_ov), loss, rel_tol=1e-9)
        assert abs(model.invariant(r, point.mu_ov, point.mu_qk) - 1) < 1e-6
    for loss, row in zip((1.0, 1e-4), TABLE[r][:2]):
        point = model.solve(r, loss)
        for value, expected in zip((point.alpha, point.mu_qk, point.mu_ov), row):
            assert math.isclose(value, expected, rel_tol=1e-3)
    assert reached[-1].tau is not None
    assert math.isclose(reached[-1].tau, TABLE[r][2], rel_tol=3e-3)
    alphas = [point.alpha for point in path]
    assert alphas == sorted(alphas)


@pytest.mark.parametrize("r", [0.01, 100.0])
def test_the_published_method_agrees(r: float) -> None:
    model = Reduced()
    points, worst = model.runge_kutta(r, LOSSES[:3])
    assert [point.loss for point in points] == list(LOSSES[:3])
    assert all(abs(point.alpha - model.solve(r, point.loss).alpha) < 1e-4 for point in points)
    assert worst < 1e-6


def test_the_slope_matches_the_equations() -> None:
    model, ov, qk, r = Reduced(), 3.0, 0.7, 4.0
    alpha = 5 * math.exp(qk) / (5 * math.exp(qk) + 50)
    width = math.exp(alpha * ov) + 19
    expected = (alpha / (50 * width), r * 19 * alpha * (1 - alpha) * ov / (20 * 50**2 * width))
    assert model.slope(r, ov, qk) == pytest.approx(expected, rel=1e-12)


def test_factors_follow_their_law() -> None:
    found = examine_factorised()
    assert all(finding.holds for finding in factor_findings(found))
    assert found.law < 1e-10
    assert found.conserved < 1e-4
    # first-order error: half the step size, half the distance
    assert 1.9 < found.flow / found.flow_halved < 2.1
    broken = dataclasses.replace(found, law=1e-3, conserved=0.1)
    assert sum(not finding.holds for finding in factor_findings(broken)) == 2


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(UserError, match=r"a loss between 0 and 2\.9957"):
        Reduced().solve(1.0, 5.0)
    with pytest.raises(UserError, match="more than one class"):
        Reduced(classes=1)
