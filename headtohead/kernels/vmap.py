"""Seeds stacked by `torch.vmap`: operations that have no rule of their own there see them as a larger batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headtohead.kernels.path import is_stacking


def folded(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Return function(*tensors) of tensors (batch, ...); what is stacked is folded into their batch.

    The library's own rule for attention refuses cuDNN on a GPU and goes seed by seed on CPU; its norm has none.
    """
    if not is_stacking():
        return function(*tensors)
    result: Tensor = _Folded.apply(function, *tensors)
    return result


class _Folded(torch.autograd.Function):
    """Only its rule for `vmap` is of use: below it autograd records the function as it stands."""

    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        raise RuntimeError("a folded operation was differentiated outside the stack")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("a folded operation was differentiated outside the stack")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], function: Callable[..., Tensor], *tensors: Tensor | None
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        given = [fold(tensor, place, size) for tensor, place in zip(tensors, in_dims[1:], strict=True)]
        return function(*given).unflatten(0, (size, -1)), 0


def fold(tensor: Tensor | None, place: int | None, size: int) -> Tensor | None:
    """Return a tensor with its stacked dimension, or copies of it where it has none, in front of its first one."""
    if tensor is None:
        return None
    stacked = tensor.expand(size, *tensor.shape) if place is None else tensor.movedim(place, 0)
    return stacked.flatten(0, 1)
