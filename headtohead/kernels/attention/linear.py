"""Attention without softmax: y_i = q_i (sum_{j <= i} k_j^T v_j), with a state of fixed size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.kernels.path import is_plain, no_autocast

CHUNK = 64


def linear_attend(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Return y (batch, heads, time, wide) and the state (batch, kv_heads, features, wide) after the last token.

    q is (batch, heads, time, features), k (batch, kv_heads, time, features), v (batch, kv_heads, time, wide);
    `state` is the state before the first token. Sums run in float32 or wider.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    with no_autocast(v):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if state is None:
            state = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
        state, grouped = state.to(dtype), q.unflatten(1, (k.shape[1], -1))
        if not causal:
            state = state + k.transpose(-2, -1) @ v
            return (grouped @ state.unsqueeze(2)).flatten(1, 2), state
        form = linear_attend_plain if is_plain() else _chunked
        y, state = form(grouped, k, v, state)
        return y.flatten(1, 2), state


def linear_attend_plain(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Plain reference, token by token; q is (batch, kv_heads, queries per key, time, features)."""
    rows = []
    for place in range(v.shape[-2]):
        now = slice(place, place + 1)
        state = state + k[..., now, :].transpose(-2, -1) @ v[..., now, :]
        rows.append(q[..., now, :] @ state.unsqueeze(2))
    return torch.cat(rows, -2), state


def _chunked(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same chunk by chunk: a small map within each, and the state of all chunks before it."""
    time = v.shape[-2]
    chunk = min(CHUNK, time)
    q, k, v = (in_chunks(tensor, chunk) for tensor in (q, k, v))
    sums = torch.cat((state.unsqueeze(2), k.transpose(-2, -1) @ v), 2).cumsum(2)
    inside = (q @ k.transpose(-2, -1).unsqueeze(2)).tril() @ v.unsqueeze(2)
    y = inside + q @ sums[:, :, :-1].unsqueeze(2)
    return y.flatten(-3, -2)[..., :time, :], sums[:, :, -1]


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Return (..., chunks, chunk, dim) from (..., time, dim), padded with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % chunk)).unflatten(-2, (-1, chunk))
