"""Populations under `torch.vmap`: fold the population dimension into the batch for operations without a vmap rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headtohead.kernels.path import is_stacking


def folded(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Return function(*tensors) for tensors (batch, ...); under `torch.vmap` the rows are folded into the batch.

    PyTorch's vmap rule for attention does not support cuDNN on a GPU and loops over rows on CPU; its norm has no rule.
    """
    if not is_stacking():
        return function(*tensors)
    result: Tensor = _Folded.apply(function, *tensors)
    return result


class _Folded(torch.autograd.Function):
    """Provides the `vmap` rule only: below it, autograd records the function itself."""

    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        raise RuntimeError("a folded operation was differentiated outside the population")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("a folded operation was differentiated outside the population")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], function: Callable[..., Tensor], *tensors: Tensor | None
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        given = [fold(tensor, place, size) for tensor, place in zip(tensors, in_dims[1:], strict=True)]
        return function(*given).unflatten(0, (size, -1)), 0


def fold(tensor: Tensor | None, place: int | None, size: int) -> Tensor | None:
    """Return a tensor with its vmapped dimension, or `size` copies if it has none, flattened into its first dimension."""
    if tensor is None:
        return None
    stacked = tensor.expand(size, *tensor.shape) if place is None else tensor.movedim(place, 0)
    return stacked.flatten(0, 1)
