"""The coupled integrator as two PyTorch operators that support compilation, autograd and vmap.

Tensors have one extra axis: (population, batch, time, heads, dim) states, (population, sets, hidden, dim) weights, where a
set of weights is shared by all heads or belongs to one. `torch.vmap` folds its dimension into the first axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headtohead.kernels.path import triton_multiplies
from headtohead.kernels.vmap import operator

SCHEMES = ("euler", "leapfrog", "symplectic_euler")
# Elements of a weight matrix, padded to powers of two: above this, its gradient sums do not fit on the chip.
_MOST = 128 * 128
# Heads that share weights, and elements of a state: a block holds rows of every head, and indices are int32.
_MAX_HEADS, _MAX_STATES = 16, 2**30


def serves(q: Tensor, w1: Tensor, w2: Tensor) -> bool:
    """Return whether the fused integrator supports these states and weights, (hidden, dim) or (heads, hidden, dim)."""
    hidden, dim = (max(16, 1 << (size - 1).bit_length()) for size in w1.shape[-2:])
    matrices = 1 if w2.ndim < w1.ndim else 2
    small = matrices * hidden * dim <= _MOST and (w1.ndim == 3 or q.shape[-2] <= _MAX_HEADS)
    return triton_multiplies(q) and small and q.numel() < _MAX_STATES


def integrate(
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    steps: int,
    scheme: str,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return q and k (batch, time, heads, dim) after n steps with the force of an mlp, or of a potential if w2 is a vector.

    dt is (heads,) or (1,); the update runs in float32, f in the precision of q.
    """
    extra = (None,) if w1.ndim == 3 else (None, None)
    weights = [None if weight is None else weight[extra] for weight in (w1, b1, w2, b2)]
    states = (q.unsqueeze(0), k.unsqueeze(0), dt.expand(q.shape[-2]).unsqueeze(0))
    q, k = torch.ops.headtohead.coupled(*states, *weights, SCHEMES.index(scheme), steps)
    return q.squeeze(0), k.squeeze(0)


_INPUTS = "Tensor q, Tensor k, Tensor dt, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2"


def _gradient_shapes(q: Tensor, k: Tensor, dt: Tensor, w1: Tensor, b1: Any, w2: Tensor, *rest: Any) -> Any:
    hidden, dim = w1.shape[-2:]
    biases = [w1.new_empty(*w1.shape[:2], size) for size in (hidden, dim)]
    grads = q.new_empty(q.shape), q.new_empty(q.shape), dt.new_empty(dt.shape)
    return *grads, w1.new_empty(w1.shape), biases[0], w1.new_empty(w2.shape), biases[1]


@operator(
    "coupled_backward",
    _gradient_shapes,
    schema=f"({_INPUTS}, Tensor grad_q, Tensor grad_k, int scheme, int steps) -> ({', '.join(['Tensor'] * 7)})",
)
def coupled_backward(*given: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, dt, w1, b1, w2, b2; the states are recomputed from q and k."""
    from headtohead.kernels.dynamics import integrator_triton

    return integrator_triton.backward(integrator_triton.Inputs(*given[:7]), *given[7:])


@operator(
    "coupled",
    lambda q, *rest: (q.new_empty(q.shape), q.new_empty(q.shape)),
    lambda given, *grads: torch.ops.headtohead.coupled_backward(*given[:7], *grads, *given[7:]),
    schema=f"({_INPUTS}, int scheme, int steps) -> (Tensor, Tensor)",
)
def coupled(*given: Any) -> tuple[Tensor, Tensor]:
    """Return q and k after all steps."""
    from headtohead.kernels.dynamics import integrator_triton

    return integrator_triton.forward(integrator_triton.Inputs(*given[:7]), *given[7:])
