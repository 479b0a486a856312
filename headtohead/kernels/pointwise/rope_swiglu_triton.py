"""Rotary positions and the SwiGLU gate on a GPU, each with one read and one write per direction.

The compiler's backward reads every input once per concatenated part: on an H200, 0.35 ms where the memory traffic takes
0.05 ms. As custom operators they stay whole in a compiled graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headtohead.kernels.vmap import operator

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this machine: the plain references run
    triton = None

_ROWS, _GATE_ROWS, _GATE_COLUMNS = 64, 4, 512


if triton is not None:

    @triton.jit
    def _rope_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations
        x, table, out, rows, time,
        batch_stride, head_stride, time_stride,
        sign,
        heads: tl.constexpr, dim: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        token, head = row // heads, row % heads
        batch, place = token // time, token % time
        column = tl.arange(0, wide)[None, :]
        real = (row < rows)[:, None] & (column < dim)
        start = batch * batch_stride + place * time_stride + head * head_stride
        states = tl.load(x + start[:, None] + column, mask=real, other=0.0).to(tl.float32)
        turns = tl.load(table + place[:, None] * dim + column, mask=real, other=0.0)
        first, second = tl.split(tl.reshape(states, (block, wide // 2, 2)))
        cos, sin = tl.split(tl.reshape(turns, (block, wide // 2, 2)))
        sin = sin * sign
        turned = tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), (block, wide))
        tl.store(out + row[:, None] * dim + column, turned.to(out.dtype.element_ty), mask=real)

    @triton.jit
    def _gate(  # type: ignore[no-untyped-def]
        joined, grad, out, rows,
        hidden: tl.constexpr, back: tl.constexpr, block: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)[:, None]
        column = tl.program_id(1) * wide + tl.arange(0, wide)[None, :]
        real = (row < rows) & (column < hidden)
        place = row * (2 * hidden) + column
        gated = tl.load(joined + place, mask=real, other=0.0).to(tl.float32)
        lifted = tl.load(joined + place + hidden, mask=real, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-gated))
        if back:
            slope = tl.load(grad + row * hidden + column, mask=real, other=0.0).to(tl.float32)
            active = gated * share
            narrow = out.dtype.element_ty
            tl.store(out + place, (slope * lifted * (share + active * (1 - share))).to(narrow), mask=real)
            tl.store(out + place + hidden, (slope * active).to(narrow), mask=real)
        else:
            active = gated * share * lifted
            tl.store(out + row * hidden + column, active.to(out.dtype.element_ty), mask=real)


def _rotated_shape(x: Tensor, table: Tensor, inverse: bool) -> Tensor:
    batch, heads, time, dim = x.shape
    return x.new_empty(batch, time, heads, dim).transpose(1, 2)


@operator(
    "apply_rope",
    _rotated_shape,
    lambda given, grad: (torch.ops.headtohead.apply_rope(grad, given[1], not given[2]),),
    shared=["table"],
    dropped=["x"],
)
def apply_rope(x: Tensor, table: Tensor, inverse: bool) -> Tensor:
    """Return x (batch, heads, time, dim) rotated by `table` (time, dim / 2, 2), or back; tokens are contiguous in memory."""
    batch, heads, time, dim = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(batch, time, heads, dim)
    rows, sign = batch * time * heads, -1.0 if inverse else 1.0
    shape = {"heads": heads, "dim": dim, "wide": triton.next_power_of_2(dim), "block": _ROWS}
    _rope_kernel[(triton.cdiv(rows, _ROWS),)](x, table, out, rows, time, *x.stride()[:3], sign, **shape)
    return out.transpose(1, 2)


@operator("gate_backward", lambda joined, grad: joined.new_empty(joined.shape))
def gate_backward(joined: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of [a, b] (rows, 2 hidden) from that of silu(a) * b (rows, hidden)."""
    out = joined.new_empty(joined.shape)
    _launch(joined.contiguous(), grad.contiguous(), out, back=True)
    return out


@operator(
    "gate",
    lambda joined: joined.new_empty(joined.shape[0], joined.shape[1] // 2),
    lambda given, grad: (torch.ops.headtohead.gate_backward(*given, grad),),
)
def gate(joined: Tensor) -> Tensor:
    """Return silu(a) * b (rows, hidden) from [a, b] concatenated (rows, 2 hidden)."""
    joined = joined.contiguous()
    out = joined.new_empty(joined.shape[0], joined.shape[1] // 2)
    _launch(joined, joined, out, back=False)
    return out


def _launch(joined: Tensor, grad: Tensor, out: Tensor, back: bool) -> None:
    rows, hidden = joined.shape[0], joined.shape[1] // 2
    grid = (triton.cdiv(rows, _GATE_ROWS), triton.cdiv(hidden, _GATE_COLUMNS))
    _gate[grid](joined, grad, out, rows, hidden=hidden, back=back, block=_GATE_ROWS, wide=_GATE_COLUMNS)
