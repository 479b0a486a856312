"""The root-mean-square norm of a population on a GPU, with one gain per row: one read and one write per direction.

PyTorch's kernel takes one gain; with one per row it runs the norm, then a product, and four passes in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headtohead.kernels.vmap import operator

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this machine: the plain reference runs
    triton = None

# Elements per block, and programs per population row in backward: each stores one sum for the gain.
_NUMBERS, _PROGRAMS = 4096, 64


if triton is not None:

    @triton.jit
    def _forward(  # type: ignore[no-untyped-def]  # Triton reads the annotations
        x, gain, out, rows, eps, width: tl.constexpr, wide: tl.constexpr, block: tl.constexpr
    ):
        stack = tl.program_id(1).to(tl.int64)
        row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        column = tl.arange(0, wide)[None, :]
        real = (row < rows)[:, None] & (column < width)
        place = (stack * rows + row)[:, None] * width + column
        states = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
        gains = tl.load(gain + stack * width + column, mask=column < width, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(states * states, 1) / width + eps)
        normed = states * inverse[:, None] * gains
        tl.store(out + place, normed.to(out.dtype.element_ty), mask=real)

    @triton.jit
    def _backward(  # type: ignore[no-untyped-def]
        x, gain, grad, grad_x, sums, rows, eps,
        trips: tl.constexpr, programs: tl.constexpr, width: tl.constexpr, wide: tl.constexpr,
        block: tl.constexpr,
    ):  # fmt: skip
        first, stack = tl.program_id(0), tl.program_id(1).to(tl.int64)
        column = tl.arange(0, wide)[None, :]
        gains = tl.load(gain + stack * width + column, mask=column < width, other=0.0).to(tl.float32)
        total = tl.zeros((block, wide), dtype=tl.float32)
        for trip in range(trips):
            row = (trip * programs + first).to(tl.int64) * block + tl.arange(0, block)
            real = (row < rows)[:, None] & (column < width)
            place = (stack * rows + row)[:, None] * width + column
            states = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
            slope = tl.load(grad + place, mask=real, other=0.0).to(tl.float32)
            inverse = 1.0 / tl.sqrt(tl.sum(states * states, 1) / width + eps)
            unit = states * inverse[:, None]
            total += slope * unit
            slope = slope * gains
            along = tl.sum(slope * unit, 1) / width
            found = (slope - unit * along[:, None]) * inverse[:, None]
            tl.store(grad_x + place, found.to(grad_x.dtype.element_ty), mask=real)
        column = tl.arange(0, wide)
        tl.store(sums + (stack * programs + first) * width + column, tl.sum(total, 0), mask=column < width)


@operator("norm_rows_backward", lambda x, gain, eps, grad: (x.new_empty(x.shape), gain.new_empty(gain.shape)))
def norm_rows_backward(x: Tensor, gain: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and gain; the norms are recomputed."""
    x, gain, grad = x.contiguous(), gain.contiguous(), grad.contiguous()
    stack, rows, width = x.shape
    wide, block = _block(width)
    programs = max(1, min(_PROGRAMS, triton.cdiv(rows, block)))
    grad_x = torch.empty_like(x)
    sums = x.new_empty(stack, programs, width, dtype=torch.float32)
    trips = triton.cdiv(rows, programs * block)
    shape = {"width": width, "wide": wide, "block": block}
    _backward[(programs, stack)](
        x, gain, grad, grad_x, sums, rows, eps, trips=trips, programs=programs, **shape
    )
    return grad_x, sums.sum(1).to(gain.dtype)


@operator(
    "norm_rows",
    lambda x, gain, eps: x.new_empty(x.shape),
    lambda given, grad: torch.ops.headtohead.norm_rows_backward(*given, grad),
)
def norm_rows(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * gain for x (population, rows, width) and gain (population, width)."""
    x, gain = x.contiguous(), gain.contiguous()
    stack, rows, width = x.shape
    out = torch.empty_like(x)
    wide, block = _block(width)
    _forward[(triton.cdiv(rows, block), stack)](x, gain, out, rows, eps, width=width, wide=wide, block=block)
    return out


def _block(width: int) -> tuple[int, int]:
    wide = triton.next_power_of_2(width)
    return wide, max(1, _NUMBERS // wide)
