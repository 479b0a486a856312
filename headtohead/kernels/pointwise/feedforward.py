"""The gated feed-forward block: down(silu(gate x) * (up x))."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headtohead.kernels.matmul.projection import joined
from headtohead.kernels.path import eager_cpu, triton_serves
from headtohead.kernels.pointwise.rope_swiglu_triton import gate as gated_product

# Rows per chunk on CPU: the three hidden tensors of a chunk then stay in a core's second-level cache.
_CHUNK_ELEMENTS = 2**18


def swiglu(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """Return (..., out) from x (..., width), gate and up (hidden, width), down (out, hidden)."""
    if biases is None and eager_cpu(x):
        return _Swiglu.apply(x, gate, up, down)
    if triton_serves(x):
        # One product per direction instead of two and a sum; the cast to bf16 copies the weights anyway.
        both = joined((gate, up)), None if biases is None else joined(biases[:2])
        hidden = gated_product(F.linear(x, *both).flatten(0, -2)).unflatten(0, x.shape[:-1])
        return F.linear(hidden, down, None if biases is None else biases[2])
    return swiglu_plain(x, gate, up, down, biases)


def swiglu_plain(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """Plain PyTorch reference."""
    gate_bias, up_bias, down_bias = biases or (None, None, None)
    return F.linear(F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias), down, down_bias)


class _Swiglu(torch.autograd.Function):
    """Processes the rows in chunks that fit the cache; saves two hidden tensors for backward instead of four."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        gated = rows.new_empty(len(rows), len(gate))
        lifted = torch.empty_like(gated)
        out = rows.new_empty(len(rows), len(down))
        for row, gated_part, lifted_part, out_part in _chunks(rows, gated, lifted, out):
            torch.mm(row, gate.t(), out=gated_part)
            torch.mm(row, up.t(), out=lifted_part)
            torch.mm(F.silu(gated_part).mul_(lifted_part), down.t(), out=out_part)
        ctx.save_for_backward(rows, gated, lifted, gate, up, down)
        return out.view(*x.shape[:-1], len(down))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, gated, lifted, gate, up, down = ctx.saved_tensors
        shape = (*grad.shape[:-1], rows.shape[1])
        grad = grad.reshape(-1, grad.shape[-1])
        grad_rows = torch.empty_like(rows)
        grad_gate, grad_up, grad_down = (torch.zeros_like(weight) for weight in (gate, up, down))
        for row, gated_part, lifted_part, part, grad_row in _chunks(rows, gated, lifted, grad, grad_rows):
            gate_share = torch.sigmoid(gated_part)
            active = gate_share * gated_part
            slope = (gate_share + active).addcmul_(active, gate_share, value=-1)  # s + a (1 - s)
            grad_hidden = torch.mm(part, down)
            grad_lifted = torch.mul(grad_hidden, active, out=gate_share)
            grad_down.addmm_(part.t(), active.mul_(lifted_part))
            grad_gated = slope.mul_(grad_hidden).mul_(lifted_part)
            grad_gate.addmm_(grad_gated.t(), row)
            grad_up.addmm_(grad_lifted.t(), row)
            torch.mm(grad_gated, gate, out=grad_row)
            grad_row.addmm_(grad_lifted, up)
        return grad_rows.view(shape), grad_gate, grad_up, grad_down


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of every tensor, as many at a time as fit the cache; the second tensor is hidden-wide."""
    size = max(64, _CHUNK_ELEMENTS // tensors[1].shape[1])
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)
