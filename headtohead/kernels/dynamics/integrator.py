"""Dynamics of query-key pairs, pointwise in batch, token and head: forces in head space and their integrators.

States are (batch, time, heads, dim), the memory order that projections produce. Weights are (out, in), shared by all heads,
or (heads, out, in), one per head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headtohead.kernels.path import eager_cpu

# Elements of a chunk's hidden tensor on CPU: the few tensors a chunk needs then stay in a core's second-level cache.
_CHUNK_ELEMENTS = 2**17

Force = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor]


def head_mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    """Return W2 silu(W1 x + b1) + b2, (batch, time, heads, out)."""
    return _states(_linear(F.silu(_linear(_rows(x, w1), w1, b1)), w2, b2), x)


def potential_force(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor) -> Tensor:
    """Return -grad V of V(x) = w2 . silu(W1 x + b1), in closed form: -W1^T (w2 * silu'(W1 x + b1))."""
    if w1.ndim == 2 and eager_cpu(x):
        return _SharedPotential.apply(x, w1, b1, w2)
    return potential_force_plain(x, w1, b1, w2)


def potential_force_plain(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor) -> Tensor:
    """Plain PyTorch reference."""
    inner = _linear(_rows(x, w1), w1, b1)
    slope = _silu_slope(inner, torch.sigmoid(inner))
    return _states(_linear(slope * -w2.unsqueeze(-2), w1.transpose(-2, -1), None), x)


def head_linear(x: Tensor, w: Tensor) -> Tensor:
    """Return W x, (batch, time, heads, out)."""
    return _states(_linear(_rows(x, w), w, None), x)


def drift(q: Tensor, k: Tensor, dt: Tensor, steps: int) -> Pair:
    """Return (q + n dt k, k): without a force every integrator reduces to this, n steps at once."""
    return torch.addcmul(q, steps * dt, k), k


def euler(q: Tensor, k: Tensor, dt: Tensor, steps: int, force: Force, of_keys: bool = False) -> Pair:
    """Return n steps of (q + dt k, k + dt f(q)), both from the old pair; `of_keys` passes k to f instead of q."""
    for _ in range(steps):
        push = force(k if of_keys else q)
        q, k = torch.addcmul(q, dt, k), torch.addcmul(k, dt, push)
    return q, k


def symplectic_euler(q: Tensor, k: Tensor, dt: Tensor, steps: int, force: Force) -> Pair:
    """Return n steps of k <- k + dt f(q), then q <- q + dt k with the new k."""
    for _ in range(steps):
        k = torch.addcmul(k, dt, force(q))
        q = torch.addcmul(q, dt, k)
    return q, k


def leapfrog(q: Tensor, k: Tensor, dt: Tensor, steps: int, force: Force) -> Pair:
    """Return n steps of kick (dt/2), drift (dt), kick (dt/2).

    The force at the end of a step is also that at the start of the next, so n steps take n + 1 evaluations, and the two
    half kicks between steps are one full kick.
    """
    half = 0.5 * dt
    k = torch.addcmul(k, half, force(q))
    for left in reversed(range(steps)):
        q = torch.addcmul(q, dt, k)
        k = torch.addcmul(k, dt if left else half, force(q))
    return q, k


def uncoupled(q: Tensor, k: Tensor, dt: Tensor, steps: int, q_force: Force, k_force: Force) -> Pair:
    """Return n steps of q <- q + dt g_q(q) and k <- k + dt g_k(k): q and k are independent."""
    for _ in range(steps):
        q, k = torch.addcmul(q, dt, q_force(q)), torch.addcmul(k, dt, k_force(k))
    return q, k


def affine(q: Tensor, k: Tensor, steps: int, q_map: Force, k_map: Force) -> Pair:
    """Return n steps of q <- q exp(s1(k)) + t1(k), then k <- k exp(s2(q)) + t2(q) with the new q; s = tanh(.).

    The maps return [s, t] concatenated, (batch, time, heads, 2 dim).
    """
    for _ in range(steps):
        q = _scaled(q, q_map(k))
        k = _scaled(k, k_map(q))
    return q, k


def _scaled(x: Tensor, scale_and_shift: Tensor) -> Tensor:
    scale, shift = scale_and_shift.chunk(2, -1)
    return x * torch.exp(torch.tanh(scale)) + shift  # x first: the result keeps its memory order


def _rows(x: Tensor, w: Tensor) -> Tensor:
    """Return x as (rows, dim), or (heads, rows, dim) with weights per head: one product for the whole batch."""
    return x.flatten(0, 2) if w.ndim == 2 else x.flatten(0, 1).transpose(0, 1)


def _states(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows as (batch, time, heads, out)."""
    if rows.ndim == 2:
        return rows.view(*like.shape[:-1], -1)
    return rows.transpose(0, 1).unflatten(0, like.shape[:2])


def _linear(rows: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    if w.ndim == 2:
        return F.linear(rows, w, b)
    w = w.transpose(1, 2)
    return torch.bmm(rows, w) if b is None else torch.baddbmm(b.unsqueeze(1), rows, w)


class _SharedPotential(torch.autograd.Function):
    """Processes the rows in chunks that fit the cache and recomputes the hidden values in backward.

    Two to three passes over each hidden value become one: half the time of the plain reference at `nano`. An mlp force
    gains nothing from it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, pull = torch.empty_like(rows), w1 * -w2.unsqueeze(1)
        for row, part in _chunks(len(w1), rows, out):
            inner = F.linear(row, w1, b1)
            torch.mm(_silu_slope(inner, torch.sigmoid(inner)), pull, out=part)
        ctx.save_for_backward(rows, w1, b1, w2)
        return out.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, w1, b1, w2 = ctx.saved_tensors
        shape, grad = grad.shape, grad.reshape(-1, grad.shape[-1])
        grad_rows = torch.empty_like(rows)
        grad_w1, grad_w2, grad_b1 = torch.zeros_like(w1), torch.zeros_like(w2), torch.zeros_like(w2)
        for row, part, grad_row in _chunks(len(w1), rows, grad, grad_rows):
            inner = F.linear(row, w1, b1)
            share = torch.sigmoid(inner)
            slope = _silu_slope(inner, share)
            # silu''(h) = s (1 - s) (2 + h (1 - 2 s))
            curve = torch.addcmul(inner, inner, share, value=-2).add_(2).mul_(share - share.square())
            back = torch.mm(part, w1.t())
            grad_inner = curve.mul_(back).mul_(w2)
            grad_w2 -= back.mul_(slope).sum(0)
            grad_w1.addmm_(slope.mul_(w2).t(), part, alpha=-1).addmm_(grad_inner.t(), row, alpha=-1)
            grad_b1 -= grad_inner.sum(0)
            torch.mm(grad_inner, w1, out=grad_row).neg_()
        return grad_rows.view(shape), grad_w1, None if b1 is None else grad_b1, grad_w2


def _silu_slope(h: Tensor, s: Tensor) -> Tensor:
    """Return silu'(h) = s + h s (1 - s), s = sigmoid(h)."""
    return torch.addcmul(s, h, s - s.square())


def _chunks(hidden: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of every tensor, as many at a time as keep their hidden values in the cache."""
    return zip(*(tensor.split(max(64, _CHUNK_ELEMENTS // hidden)) for tensor in tensors), strict=True)
