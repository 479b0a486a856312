"""Rotary positions: neighboring coordinates (2i, 2i + 1) rotate by position * theta^(-2i / dim)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headtohead.kernels.path import eager_cpu, triton_serves
from headtohead.kernels.pointwise.rope_swiglu_triton import apply_rope


def rotary_table(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return (*positions.shape, dim / 2, 2): cosine and sine of each pair's angle.

    Angles are computed in float64: float32 products are off by 5e-4 at position 65,536.
    """
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angles = positions.to(torch.float64).unsqueeze(-1) * rates
    return torch.stack((angles.cos(), angles.sin()), -1).to(dtype)


def rotate(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """Return x (..., time, dim) rotated by `table` (..., time, dim / 2, 2), or rotated back with `inverse`."""
    if eager_cpu(x) and x.dtype == table.dtype:
        phases = torch.view_as_complex(table)
        return _Rotate.apply(x, phases.conj() if inverse else phases)
    shared = table.ndim == 3 and table.dtype == torch.float32 and len(table) == x.shape[-2]
    if shared and x.ndim == 4 and triton_serves(x):
        return apply_rope(x, table.contiguous(), inverse)
    return rotate_plain(x, table, inverse)


def rotate_plain(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """Plain reference; low-precision x is rotated in the table's precision."""
    cos, sin = table.unbind(-1)
    sin = -sin if inverse else sin
    first, second = x.unflatten(-1, (-1, 2)).to(table.dtype).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.flatten(-2).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """One complex product per direction instead of six passes and a concatenation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phases: Tensor) -> Tensor:
        ctx.phases = phases
        return _rotate_pairs(x, phases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _rotate_pairs(grad, ctx.phases.conj()), None


def _rotate_pairs(x: Tensor, phases: Tensor) -> Tensor:
    if x.stride(-1) != 1 or any(stride % 2 for stride in x.stride()[:-1]) or x.storage_offset() % 2:
        x = x.contiguous()
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * phases).flatten(-2)
