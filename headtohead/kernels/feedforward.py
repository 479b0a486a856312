"""The gated feed-forward part: down(silu(gate x) * (up x))."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headtohead.kernels.path import eager_cpu

# Rows per chunk on CPU: the three hidden tensors of a chunk then stay in a core's second-level cache.
_CHUNK_ELEMENTS = 2**17


def swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Return (..., width) from x (..., width), gate and up (hidden, width), down (width, hidden)."""
    if biases is None and eager_cpu(x):
        result: Tensor = _Swiglu.apply(x, gate, up, down)
        return result
    return swiglu_plain(x, gate, up, down, biases)


def swiglu_plain(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """The definition."""
    gate_bias, up_bias, down_bias = biases or (None, None, None)
    return F.linear(F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias), down, down_bias)


class _Swiglu(torch.autograd.Function):
    """Goes through the rows in chunks that fit the cache; keeps two hidden tensors for backward, not four."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        gated = rows.new_empty(len(rows), len(gate))
        lifted = torch.empty_like(gated)
        out = torch.empty_like(rows)
        size = max(64, _CHUNK_ELEMENTS // len(gate))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            torch.mm(rows[part], gate.t(), out=gated[part])
            torch.mm(rows[part], up.t(), out=lifted[part])
            torch.mm(F.silu(gated[part]).mul_(lifted[part]), down.t(), out=out[part])
        ctx.save_for_backward(rows, gated, lifted, gate, up, down)
        return out.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, gated, lifted, gate, up, down = ctx.saved_tensors
        shape = grad.shape
        grad = grad.reshape(-1, shape[-1])
        grad_rows = torch.empty_like(rows)
        grad_gate, grad_up, grad_down = (torch.zeros_like(weight) for weight in (gate, up, down))
        size = max(64, _CHUNK_ELEMENTS // len(gate))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            active = F.silu(gated[part])
            grad_hidden = torch.mm(grad[part], down)
            grad_lifted = grad_hidden * active
            grad_down.addmm_(grad[part].t(), active.mul_(lifted[part]))
            grad_gated = torch.ops.aten.silu_backward(grad_hidden.mul_(lifted[part]), gated[part])
            grad_gate.addmm_(grad_gated.t(), rows[part])
            grad_up.addmm_(grad_lifted.t(), rows[part])
            torch.mm(grad_gated, gate, out=grad_rows[part])
            grad_rows[part].addmm_(grad_lifted, up)
        return grad_rows.view(shape), grad_gate, grad_up, grad_down
