"""Decoding with K=V as one operator: softmax(q kv^T * scale) kv of one query, with one cached tensor read once.

It also decodes at fixed shapes: the caches are passed whole and the query's position is a device tensor, so that one CUDA
graph of a step can be replayed at any position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headtohead.kernels.attention.softmax import attend, attend_plain, view_mask
from headtohead.kernels.path import triton_multiplies
from headtohead.kernels.pointwise.rotary import rotate_plain
from headtohead.kernels.vmap import operator

# What the operator rotates: nothing, the keys in the score only, or the output back by the query's position.
ROPE_MODES = ("nothing", "score", "roundtrip")
_WIDEST = 256


def decode_serves(q: Tensor, kv: Tensor) -> bool:
    """Return whether the one-tensor kernel takes q (batch, heads, 1, dim) and kv (batch, kv_heads, keys, dim)."""
    fits = q.shape[-2] == 1 and kv.shape[-2] > 0 and q.dtype == kv.dtype and q.shape[-1] <= _WIDEST
    return fits and triton_multiplies(q)


def decode(
    q: Tensor,
    kv: Tensor,
    table: Tensor | None,
    rope_mode: str,
    scale: float | None = None,
    place: Tensor | None = None,
) -> Tensor:
    """Return (batch, heads, 1, dim) from q (batch, heads, 1, dim) and kv (batch, kv_heads, keys, dim).

    q is at the position of the last key and already rotated. With `rope_mode=score`, `table` (keys, dim / 2, 2) rotates the
    keys in the score, and kv is cached unrotated. With `rope_mode=roundtrip`, its last row rotates the output back. With
    `place` (1,), the query is at that position, and later keys are masked.
    """
    if rope_mode != "nothing" and table is None:
        raise ValueError(f"rope_mode={rope_mode} needs a rotary table")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not decode_serves(q, kv):
        return decode_plain(q, kv, table, rope_mode, scale, place)
    given = (table, ROPE_MODES.index(rope_mode), scale)
    if place is None:
        return torch.ops.headtohead.kv_decode(q.squeeze(2), kv, *given).unsqueeze(2)
    return torch.ops.headtohead.placed_decode(q.squeeze(2), kv, None, *given, place).unsqueeze(2)


def decode_plain(
    q: Tensor, kv: Tensor, table: Tensor | None, rope_mode: str, scale: float, place: Tensor | None = None
) -> Tensor:
    """Plain PyTorch reference."""
    keys = rotate_plain(kv, table) if rope_mode == "score" and table is not None else kv
    seen = None if place is None else view_mask(1, kv.shape[-2], q.device, causal=True, rows=place)
    mixed = attend_plain(q, keys, kv, causal=False, mask=seen, scale=scale)
    if rope_mode != "roundtrip" or table is None:
        return mixed
    row = table[-1:] if place is None else table.index_select(0, place)
    return rotate_plain(mixed, row, inverse=True)


def attend_placed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: Tensor,
    *,
    window: int = 0,
    strict: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return (batch, heads, 1, dim) from q (batch, heads, 1, dim) at `place` (1,) among k, v (batch, kv_heads, keys, dim).

    Later keys are masked; `window` and `strict` are those of `attend`. No more keys than the window are a ring buffer:
    position p is in column p modulo keys, and a full ring is visible as a whole.
    """
    keys = k.shape[-2]
    if window and keys <= window:
        if strict:
            return attend(q, k, v, scale=scale, mask=_others_in_ring(place, keys))
        window, place = 0, place.clamp_max(keys - 1)
    if not window and not strict and k.shape == v.shape and v.dtype == k.dtype and decode_serves(q, k):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return torch.ops.headtohead.placed_decode(q.squeeze(2), k, v, None, 0, scale, place).unsqueeze(2)
    return attend(q, k, v, window=window, strict=strict, scale=scale, rows=place)


def _others_in_ring(place: Tensor, keys: int) -> Tensor:
    """Return the mask (1, keys) of a query at `place` (1,) that attends to itself only if no other key is visible."""
    column = torch.arange(keys, device=place.device)
    own = column == place % keys
    others = (column <= place) & ~own
    return (others | (own & ~others.any())).unsqueeze(0)


def _differentiate(given: list[Any], grad: Tensor) -> tuple[Tensor, Tensor]:
    """Recompute the attention map: it is only one row long, and no training runs through a decoding step."""
    q, kv, table, rope_mode, scale = given
    grouped = (kv.shape[0], kv.shape[1], -1, q.shape[-1])
    if rope_mode == 2:
        grad = rotate_plain(grad.unsqueeze(2), table[-1:]).squeeze(2)
    values = kv.float()
    keys = rotate_plain(values, table) if rope_mode == 1 else values
    query, grad = q.reshape(grouped).float(), grad.reshape(grouped).float()
    weights = torch.softmax(scale * query @ keys.mT, -1)
    grad_weights = grad @ values.mT
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True)) * scale
    grad_keys = grad_scores.mT @ query
    grad_keys = rotate_plain(grad_keys, table, inverse=True) if rope_mode == 1 else grad_keys
    grad_kv = grad_keys + weights.mT @ grad
    grad_q = (grad_scores @ keys).reshape(q.shape)
    return grad_q.to(q.dtype), grad_kv.to(kv.dtype)


@operator("kv_decode", lambda q, *rest: q.new_empty(q.shape), _differentiate, shared=["table"])
def kv_decode(q: Tensor, kv: Tensor, table: Tensor | None, rope_mode: int, scale: float) -> Tensor:
    """Return (batch, heads, dim) from q (batch, heads, dim) and kv (batch, kv_heads, keys, dim)."""
    from headtohead.kernels.attention import decode_triton

    return decode_triton.decode(q, kv, table, rope_mode, scale)


@operator("placed_decode", lambda q, *rest: q.new_empty(q.shape), shared=["table", "place"])
def placed_decode(
    q: Tensor, k: Tensor, v: Tensor | None, table: Tensor | None, rope_mode: int, scale: float, place: Tensor
) -> Tensor:
    """Return (batch, heads, dim) of q at `place` in k and v (batch, kv_heads, keys, dim), or in k=v; no gradient."""
    from headtohead.kernels.attention import decode_triton

    return decode_triton.decode(q, k, table, rope_mode, scale, values=v, place=place)
