"""Check numerically that a factored matrix learns like a collapsed one with a growing learning rate.

W = A B under gradient flow: dW/dt = -eta (A A^T G + G B^T B), and A^T A - B B^T is conserved. From A = B = eps I,
A A^T = (W W^T)^{1/2} and B^T B = (W^T W)^{1/2}. Along a fixed direction, W = mu U and G = -g U with U a projector,
this is dmu/dt = 2 eta mu g: the collapsed flow with rate 2 eta mu(t).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


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

    def as_dict(self) -> dict[str, float]:
        """Return it JSON-ready."""
        return asdict(self)


def examine_factorised(size: int = 12, rank: int = 5, step: float = 0.005, seed: int = 0) -> Factorised:
    """Return how well gradient descent on A and B follows the theory, in float64."""
    draw = np.random.default_rng(seed)
    law, flow = _fixed_direction(size, rank, step, draw)
    _, halved = _fixed_direction(size, rank, step / 2, np.random.default_rng(seed))
    conserved, root = _every_direction(size, step, draw)
    return Factorised(law, flow, halved, conserved, root)


def _pull(mu: float) -> float:
    """Return g(mu) = 1 - mu, from a loss with its minimum at mu = 1."""
    return 1.0 - mu


def _fixed_direction(size: int, rank: int, step: float, draw: np.random.Generator) -> tuple[float, float]:
    """Return the largest distances of A B from the law of steps and from the flow, relative to mu."""
    basis = np.linalg.qr(draw.standard_normal((size, size)))[0][:, :rank]
    projector = basis @ basis.T
    start = 1e-3
    a, b = start * np.eye(size), start * np.eye(size)
    # eps I has a component outside U that no gradient changes; mu is the component along U.
    mu = start**2
    law = flow = 0.0
    for count in range(1, round(8 / step) + 1):
        seen = float(np.sum(a @ b * projector)) / rank
        g = -_pull(seen) * projector
        a, b = a - step * g @ b.T, b - step * a.T @ g
        mu *= (1 + step * _pull(mu)) ** 2
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
    return (
        float(norm(ours - b @ b.T) / norm(ours)),
        float(norm(a @ a.T - root) / norm(a @ a.T)),
    )
