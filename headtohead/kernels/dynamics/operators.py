"""The coupled integrator as two PyTorch operators that support compilation, autograd and vmap.

Tensors have one extra axis: (population, batch, time, heads, dim) states, (population, sets, hidden, dim) weights, where a
set of weights is shared by all heads or belongs to one. `torch.vmap` folds its dimension into the first axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headtohead.kernels.path import triton_multiplies

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
    axes = 1 if w1.ndim == 3 else 2
    weights = [
        None if weight is None else weight.view(*[1] * axes, *weight.shape) for weight in (w1, b1, w2, b2)
    ]
    dt = dt.expand(q.shape[-2]).unsqueeze(0)
    q, k = torch.ops.headtohead.coupled(
        q.unsqueeze(0), k.unsqueeze(0), dt, *weights, SCHEMES.index(scheme), steps
    )
    return q.squeeze(0), k.squeeze(0)


@torch.library.custom_op("headtohead::coupled", mutates_args=())
def coupled(
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    scheme: int,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Return q and k after all steps."""
    from headtohead.kernels.dynamics import integrator_triton as dynamics_triton

    return dynamics_triton.forward(q, k, dt, w1, b1, w2, b2, scheme, steps)


@torch.library.custom_op("headtohead::coupled_backward", mutates_args=())
def coupled_backward(
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    grad_q: Tensor,
    grad_k: Tensor,
    scheme: int,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, dt, w1, b1, w2, b2; the states are recomputed from q and k."""
    from headtohead.kernels.dynamics import integrator_triton as dynamics_triton

    found = dynamics_triton.backward(q, k, dt, w1, b1, w2, b2, grad_q, grad_k, scheme, steps)
    return found[0], found[1], found[2], found[3], found[4], found[5], found[6]


@coupled.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape)


@coupled_backward.register_fake
def _(q: Tensor, k: Tensor, dt: Tensor, w1: Tensor, b1: Any, w2: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    hidden, dim = w1.shape[-2:]
    biases = (w1.new_empty(*w1.shape[:2], size) for size in (hidden, dim))
    grads = q.new_empty(q.shape), q.new_empty(q.shape), dt.new_empty(dt.shape)
    return *grads, w1.new_empty(w1.shape), next(biases), w1.new_empty(w2.shape), next(biases)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.scheme, ctx.steps = inputs[7:]


def _differentiate(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Any, ...]:
    inputs = ctx.saved_tensors
    grads = torch.ops.headtohead.coupled_backward(*inputs, grad_q, grad_k, ctx.scheme, ctx.steps)
    return *(None if given is None else grad for given, grad in zip(inputs, grads, strict=True)), None, None


coupled.register_autograd(_differentiate, setup_context=_keep)


def _fold_population(operator: Any, info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
    """Fold the population into the first axis, run once, and unfold."""
    size = info.batch_size
    folded = []
    for value, place in zip(given, in_dims, strict=True):
        if isinstance(value, Tensor):
            value = value.expand(size, *value.shape) if place is None else value.movedim(place, 0)
            value = value.flatten(0, 1)
        folded.append(value)
    results = operator(*folded)
    return tuple(result.unflatten(0, (size, -1)) for result in results), (0,) * len(results)


coupled.register_vmap(lambda *given: _fold_population(torch.ops.headtohead.coupled, *given))
coupled_backward.register_vmap(lambda *given: _fold_population(torch.ops.headtohead.coupled_backward, *given))
