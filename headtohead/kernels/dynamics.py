"""Dynamics of query-key pairs, pointwise in batch, token and head: forces in head space, and the ways to integrate them.

States are (batch, time, heads, dim), the order in which projections leave them in memory. Weights are (out, in), one
for all heads, or (heads, out, in), one for each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Force = Callable[[Tensor], Tensor]


def head_mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    """Return W2 silu(W1 x + b1) + b2, (batch, time, heads, out)."""
    return _states(_linear(F.silu(_linear(_rows(x, w1), w1, b1)), w2, b2), x)


def potential_force(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor) -> Tensor:
    """Return -grad V of V(x) = w2 . silu(W1 x + b1), in closed form: -W1^T (w2 * silu'(W1 x + b1))."""
    hidden = _linear(_rows(x, w1), w1, b1)
    share = torch.sigmoid(hidden)
    slope = share * (1 + hidden * (1 - share))
    return _states(_linear(slope * -w2.unsqueeze(-2), w1.transpose(-2, -1), None), x)


def head_linear(x: Tensor, w: Tensor) -> Tensor:
    """Return W x, (batch, time, heads, out)."""
    return _states(_linear(_rows(x, w), w, None), x)


def drift(q: Tensor, k: Tensor, dt: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return (q + n dt k, k): without a force every integrator is this, n steps at once."""
    return torch.addcmul(q, steps * dt, k), k


def euler(
    q: Tensor, k: Tensor, dt: Tensor, steps: int, force: Force, of_keys: bool = False
) -> tuple[Tensor, Tensor]:
    """Return n steps of (q + dt k, k + dt f(q)), both sides from the old pair; `of_keys` gives f the key instead."""
    for _ in range(steps):
        push = force(k if of_keys else q)
        q, k = torch.addcmul(q, dt, k), torch.addcmul(k, dt, push)
    return q, k


def symplectic_euler(q: Tensor, k: Tensor, dt: Tensor, steps: int, force: Force) -> tuple[Tensor, Tensor]:
    """Return n steps of k <- k + dt f(q), then q <- q + dt k with the new k."""
    for _ in range(steps):
        k = torch.addcmul(k, dt, force(q))
        q = torch.addcmul(q, dt, k)
    return q, k


def leapfrog(q: Tensor, k: Tensor, dt: Tensor, steps: int, force: Force) -> tuple[Tensor, Tensor]:
    """Return n steps of kick (dt/2), drift (dt), kick (dt/2).

    The force that closes a step opens the next, so n steps take n + 1 evaluations and the two half kicks between
    steps are one whole kick.
    """
    half = 0.5 * dt
    k = torch.addcmul(k, half, force(q))
    for left in reversed(range(steps)):
        q = torch.addcmul(q, dt, k)
        k = torch.addcmul(k, dt if left else half, force(q))
    return q, k


def uncoupled(
    q: Tensor, k: Tensor, dt: Tensor, steps: int, q_force: Force, k_force: Force
) -> tuple[Tensor, Tensor]:
    """Return n steps of q <- q + dt g_q(q) and k <- k + dt g_k(k): neither sees the other."""
    for _ in range(steps):
        q, k = torch.addcmul(q, dt, q_force(q)), torch.addcmul(k, dt, k_force(k))
    return q, k


def affine(q: Tensor, k: Tensor, steps: int, q_map: Force, k_map: Force) -> tuple[Tensor, Tensor]:
    """Return n steps of q <- q exp(s1(k)) + t1(k), then k <- k exp(s2(q)) + t2(q) with the new q; s = tanh(.).

    The maps give [s, t] side by side, (batch, time, heads, 2 dim).
    """
    for _ in range(steps):
        q = _scaled(q, q_map(k))
        k = _scaled(k, k_map(q))
    return q, k


def _scaled(x: Tensor, scale_and_shift: Tensor) -> Tensor:
    scale, shift = scale_and_shift.chunk(2, -1)
    return x * torch.exp(torch.tanh(scale)) + shift  # x first: the result keeps its order in memory


def _rows(x: Tensor, w: Tensor) -> Tensor:
    """Return x as (rows, dim), or (heads, rows, dim) where each head has its weights: one product serves the batch."""
    return x.flatten(0, 2) if w.ndim == 2 else x.flatten(0, 1).transpose(0, 1)


def _states(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows as (batch, time, heads, out)."""
    return (
        rows.view(*like.shape[:-1], -1)
        if rows.ndim == 2
        else rows.transpose(0, 1).unflatten(0, like.shape[:2])
    )


def _linear(rows: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    if w.ndim == 2:
        return F.linear(rows, w, b)
    w = w.transpose(1, 2)
    return torch.bmm(rows, w) if b is None else torch.baddbmm(b.unsqueeze(1), rows, w)
