"""The exact theory of the toy model: reduced to the magnitude of each circuit along its fixed direction.

    alpha      = m e^{mu_QK} / (m e^{mu_QK} + n)          loss = log(1 + (M-1) e^{-alpha mu_OV})
    dmu_OV/dt  = eta_OV alpha / (b D)                      D = e^{alpha mu_OV} + M - 1
    dmu_QK/dt  = eta_QK (M-1) alpha (1-alpha) mu_OV / (M b^2 D)

Dividing one equation by the other gives the invariant of a path, and with it the solution at any loss:

    mu_QK + (m/n)(e^{mu_QK} - 1) = r (M-1)/(2 M b) mu_OV^2      alpha mu_OV = log((M-1) / (e^loss - 1))

A factored matrix learns like a collapsed one with a growing learning rate. W = A B under gradient flow:
dW/dt = -eta (A A^T G + G B^T B), and A^T A - B B^T is conserved. From A = B = eps I, A A^T = (W W^T)^{1/2} and
B^T B = (W^T W)^{1/2}. Along a fixed direction, W = mu U and G = -g U with U a projector, this is
dmu/dt = 2 eta mu g: the collapsed flow with rate 2 eta mu(t).
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

    def _sides(self, r: float, mu_ov: float, mu_qk: float) -> tuple[float, float]:
        """Return the two sides of the invariant."""
        left = mu_qk + self.m / self.n * math.expm1(mu_qk)
        return left, r * (self.classes - 1) / (2 * self.classes * self.b) * mu_ov**2

    def invariant(self, r: float, mu_ov: float, mu_qk: float) -> float:
        """Return the ratio of the two sides of the closed form, which is 1 along every path."""
        left, right = self._sides(r, mu_ov, mu_qk)
        return left / right

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
            left, right = self._sides(r, wanted / self.alpha(mu_qk), mu_qk)
            return left - right

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
            return lambda x, y: math.log(self.loss(float(y[1]), float(y[0])) / bound)

        def point(x: float, y: np.ndarray, loss: float | None = None) -> Point:
            ov, qk = float(y[0]), float(y[1])
            return Point(r, loss or self.loss(qk, ov), self.alpha(qk), qk, ov, math.expm1(x))

        events = [reaches(bound) for bound in losses]
        events[-1].terminal = True  # type: ignore[attr-defined]
        span = (0.0, math.log1p(_MAX_TAU))
        found = solve_ivp(
            right, span, [0.0, 0.0], method="LSODA", rtol=1e-11, atol=1e-13, events=events, dense_output=True
        )
        reached = zip(losses, found.t_events, found.y_events)
        grid = np.linspace(0.0, found.t[-1], 201)
        return (
            [point(float(x[0]), y[0], loss) for loss, x, y in reached if len(x)],
            [point(float(x), found.sol(x)) for x in grid],
        )

    def runge_kutta(self, r: float, losses: Sequence[float] = LOSSES) -> tuple[list[Point], float]:
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
        return points, worst


@dataclass(frozen=True)
class Factorised:
    """Relative distances of gradient descent on two factors from the theory."""

    law: float
    """From mu <- mu (1 + s g)^2, the exact law of discrete steps, along a fixed direction."""
    flow: float
    """From dmu/dt = 2 eta mu g, at step size s."""
    flow_halved: float
    """The same at s / 2: half as much if the error is of first order."""
    conserved: float
    """||A^T A - B B^T|| / ||A^T A|| after descent on a quadratic loss in every direction."""
    root: float
    """||A A^T - (W W^T)^{1/2}|| / ||A A^T|| there."""


def examine_factorised(size: int = 12, rank: int = 5, step: float = 0.005, seed: int = 0) -> Factorised:
    """Return how well gradient descent on A and B follows the theory, in float64."""
    draw = np.random.default_rng(seed)
    law, flow = _fixed_direction(size, rank, step, draw)
    _, halved = _fixed_direction(size, rank, step / 2, np.random.default_rng(seed))
    return Factorised(law, flow, halved, *_every_direction(size, step, draw))


def _fixed_direction(size: int, rank: int, step: float, draw: np.random.Generator) -> tuple[float, float]:
    """Return the largest distances of A B from the law of steps and from the flow, relative to mu.

    The loss has its minimum at mu = 1: g(mu) = 1 - mu.
    """
    basis = np.linalg.qr(draw.standard_normal((size, size)))[0][:, :rank]
    projector = basis @ basis.T
    start = 1e-3
    a, b = start * np.eye(size), start * np.eye(size)
    # eps I has a component outside U that no gradient changes; mu is the component along U.
    mu = start**2
    law = flow = 0.0
    for count in range(1, round(8 / step) + 1):
        seen = float(np.sum(a @ b * projector)) / rank
        g = -(1.0 - seen) * projector
        a, b = a - step * g @ b.T, b - step * a.T @ g
        mu *= (1 + step * (1.0 - mu)) ** 2
        now = float(np.sum(a @ b * projector)) / rank
        law = max(law, abs(now - mu) / mu)
        grown = start**2 * np.exp(2 * step * count)
        exact = grown / (1 - start**2 + grown)  # the logistic curve solves dmu/dt = 2 mu (1 - mu)
        flow = max(flow, float(abs(now - exact) / exact))
    return law, flow


def _every_direction(size: int, step: float, draw: np.random.Generator) -> tuple[float, float]:
    """Return the drift of the conserved quantity and of the square root after descent on ||A B - T||^2 / 2."""
    target = draw.standard_normal((size, size)) / np.sqrt(size)
    a, b = 1e-3 * np.eye(size), 1e-3 * np.eye(size)
    for _ in range(round(6 / step)):
        g = a @ b - target
        a, b = a - step * g @ b.T, b - step * a.T @ g
    w = a @ b
    values, vectors = np.linalg.eigh(w @ w.T)
    root = (vectors * np.sqrt(np.clip(values, 0.0, None))) @ vectors.T
    ours, norm = a.T @ a, np.linalg.norm
    return float(norm(ours - b @ b.T) / norm(ours)), float(norm(a @ a.T - root) / norm(a @ a.T))
