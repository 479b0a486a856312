"""The toy model reduced to two numbers: the magnitude of each circuit along its fixed direction.

    alpha      = m e^{mu_QK} / (m e^{mu_QK} + n)          loss = log(1 + (M-1) e^{-alpha mu_OV})
    dmu_OV/dt  = eta_OV alpha / (b D)                      D = e^{alpha mu_OV} + M - 1
    dmu_QK/dt  = eta_QK (M-1) alpha (1-alpha) mu_OV / (M b^2 D)

Dividing one equation by the other gives the invariant of a path, and with it the solution at any loss:

    mu_QK + (m/n)(e^{mu_QK} - 1) = r (M-1)/(2 M b) mu_OV^2      alpha mu_OV = log((M-1) / (e^loss - 1))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headtohead.common.errors import UserError

RATIOS = (0.01, 0.1, 1.0, 10.0, 100.0)
LOSSES = (1.0, 0.1, 0.01, 0.001, 1e-4)
STEP = 10.0
"""The published Runge-Kutta step, in tau = t min(eta_OV, eta_QK)."""
_MAX_TAU = 5e7
_MAX_EXPONENT = 60.0


@dataclass(frozen=True)
class Point:
    """A state of the reduced model."""

    r: float
    loss: float
    alpha: float
    mu_qk: float
    mu_ov: float
    tau: float | None = None


@dataclass(frozen=True)
class Reduced:
    """m informative and n common tokens in a sequence; M classes with b distinct tokens each; eta_OV = 1."""

    m: float = 5.0
    n: float = 50.0
    b: float = 50.0
    classes: float = 20.0

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.b) <= 0 or self.classes <= 1:
            raise UserError(
                "the reduced model takes m, n and b above 0 and more than one class, got "
                f"m {self.m:g}, n {self.n:g}, b {self.b:g}, classes {self.classes:g}"
            )

    def alpha(self, mu_qk: float) -> float:
        """Return the mass on informative tokens."""
        return 1 / (1 + self.n / self.m * math.exp(-mu_qk))

    def loss(self, mu_qk: float, mu_ov: float) -> float:
        """Return the loss."""
        return math.log1p((self.classes - 1) * math.exp(-self.alpha(mu_qk) * mu_ov))

    def slope(self, r: float, mu_ov: float, mu_qk: float) -> tuple[float, float]:
        """Return dmu_OV/dtau and dmu_QK/dtau."""
        alpha = 1 / (1 + self.n / self.m * math.exp(-mu_qk))
        slow = min(1.0, r)
        width = self.b * (math.exp(min(_MAX_EXPONENT, alpha * mu_ov)) + self.classes - 1) * slow
        ov = alpha / width
        return ov, r * (self.classes - 1) / (self.classes * self.b) * (1 - alpha) * mu_ov * ov

    def invariant(self, r: float, mu_ov: float, mu_qk: float) -> float:
        """Return the ratio of the two sides of the closed form, which is 1 along every path."""
        left = mu_qk + self.m / self.n * math.expm1(mu_qk)
        return left / (r * (self.classes - 1) / (2 * self.classes * self.b) * mu_ov**2)

    def solve(self, r: float, loss: float) -> Point:
        """Return the state at a loss by the closed form, without integration."""
        most = math.log(self.classes)
        if not 0 < loss < most or not 0 < r < math.inf:
            raise UserError(
                f"solve takes a loss between 0 and {most:.4f} and a ratio above 0, got {loss!r}, {r!r}"
            )
        from scipy.optimize import brentq

        wanted = math.log((self.classes - 1) / math.expm1(loss))

        def gap(mu_qk: float) -> float:
            mu_ov = wanted / self.alpha(mu_qk)
            side = r * (self.classes - 1) / (2 * self.classes * self.b) * mu_ov**2
            return mu_qk + self.m / self.n * math.expm1(mu_qk) - side

        high = 1.0
        while gap(high) < 0:
            high *= 2
        mu_qk = float(brentq(gap, 0.0, high, xtol=1e-14, rtol=1e-14))
        alpha = self.alpha(mu_qk)
        return Point(r, loss, alpha, mu_qk, wanted / alpha)

    def integrate(self, r: float, losses: Sequence[float] = LOSSES) -> tuple[list[Point], list[Point]]:
        """Return the states at decreasing losses, and 201 states along the path, by an adaptive method.

        The time variable is log(1 + tau), because a path spends nine tenths of tau on the last tenth of the loss.
        """

        from scipy.integrate import solve_ivp

        def right(x: float, y: np.ndarray) -> list[float]:
            ov, qk = self.slope(r, float(y[0]), float(y[1]))
            return [ov * math.exp(x), qk * math.exp(x)]

        def reaches(bound: float) -> Callable[[float, np.ndarray], float]:
            def event(x: float, y: np.ndarray) -> float:
                return math.log(self.loss(float(y[1]), float(y[0])) / bound)

            return event

        events = [reaches(bound) for bound in losses]
        events[-1].terminal = True  # type: ignore[attr-defined]
        span = (0.0, math.log1p(_MAX_TAU))
        found = solve_ivp(
            right, span, [0.0, 0.0], method="LSODA", rtol=1e-11, atol=1e-13, events=events, dense_output=True
        )
        reached = [
            self._point(r, float(x[0]), y[0]) for x, y in zip(found.t_events, found.y_events) if len(x)
        ]
        grid = np.linspace(0.0, found.t[-1], 201)
        return reached, [self._point(r, float(x), found.sol(x)) for x in grid]

    def _point(self, r: float, x: float, y: np.ndarray) -> Point:
        ov, qk = float(y[0]), float(y[1])
        return Point(r, self.loss(qk, ov), self.alpha(qk), qk, ov, math.expm1(x))

    def runge_kutta(
        self,
        r: float,
        losses: Sequence[float] = LOSSES,
        progress: Callable[[float], None] = lambda loss: None,
    ) -> tuple[list[Point], float]:
        """Return the states at decreasing losses by the published method, and the largest distance of the invariant from 1.

        Classic Runge-Kutta at the published step; states are interpolated in log loss to each threshold.
        """
        ov = qk = tau = worst = 0.0
        points: list[Point] = []
        bounds = list(losses)
        before = (self.loss(0.0, 0.0), ov, qk)
        half, count, slope = STEP / 2, 0, self.slope
        while bounds and tau < _MAX_TAU:
            a, e = slope(r, ov, qk)
            b, f = slope(r, ov + half * a, qk + half * e)
            c, g = slope(r, ov + half * b, qk + half * f)
            d, h = slope(r, ov + STEP * c, qk + STEP * g)
            ov += STEP / 6 * (a + 2 * (b + c) + d)
            qk += STEP / 6 * (e + 2 * (f + g) + h)
            tau += STEP
            loss = self.loss(qk, ov)
            while bounds and loss <= bounds[0]:
                bound = bounds.pop(0)
                share = math.log(before[0] / bound) / math.log(before[0] / loss)
                at_ov, at_qk = (old + share * (new - old) for old, new in zip(before[1:], (ov, qk)))
                points.append(Point(r, bound, self.alpha(at_qk), at_qk, at_ov, tau - STEP * (1 - share)))
            before = (loss, ov, qk)
            count += 1
            if count % 64 == 0 or not bounds:
                worst = max(worst, abs(self.invariant(r, ov, qk) - 1))
                if count % 65536 == 0:
                    progress(loss)
        return points, worst
