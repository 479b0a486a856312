"""Several projections of one input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headtohead.kernels.path import eager_cpu

_kept: ContextVar[dict[tuple[int, ...], Tensor] | None] = ContextVar("kept", default=None)


@contextmanager
def weights_kept(store: dict[tuple[int, ...], Tensor]) -> Iterator[None]:
    """Concatenate weights that are multiplied together once and cache the result in `store`: for steps that do not train.

    Training concatenates them at every step, where the cast to bf16 copies them anyway; a decoding step of few rows would
    spend as much time on it as on the product.
    """
    token = _kept.set(store)
    try:
        yield
    finally:
        _kept.reset(token)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors concatenated along their first axis."""
    if torch.compiler.is_compiling() or (store := _kept.get()) is None:
        return torch.cat(list(tensors))
    # An intermediate result may be different each time.
    if not all(isinstance(tensor, nn.Parameter) for tensor in tensors):
        return torch.cat(list(tensors))
    key = tuple(id(tensor) for tensor in tensors)
    if key not in store:
        store[key] = torch.cat(list(tensors))
    return store[key]


def project(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Return x W^T (+ b) for each weight (out, width), (..., out) each; the weights stay separate tensors."""
    if len(weights) > 1 and biases is None and eager_cpu(x):
        return _Project.apply(x, *weights)
    return project_plain(x, weights, biases)


def project_joined(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> Tensor:
    """Return the outputs of `project` concatenated; where they are parts of one product, nothing is copied."""
    if biases is None and eager_cpu(x):
        return torch.cat(project(x, weights), -1)
    return _one_product(x, weights, biases)


def project_plain(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Plain reference, as one matrix product with the concatenated weights."""
    if len(weights) == 1:
        return (F.linear(x, weights[0], None if biases is None else biases[0]),)
    return _one_product(x, weights, biases).split([len(weight) for weight in weights], -1)


def _one_product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> Tensor:
    return F.linear(x, joined(weights), None if biases is None else joined(biases))


class _Project(torch.autograd.Function):
    """Sums the gradient of x inside the matrix products; the concatenated form copies the outputs' gradients first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, *weights)
        return tuple(torch.mm(rows, weight.t()).view(*x.shape[:-1], len(weight)) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        rows, *weights = ctx.saved_tensors
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_x = torch.mm(flat[0], weights[0])
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        return grad_x.view(*grads[0].shape[:-1], -1), *(torch.mm(grad.t(), rows) for grad in flat)
