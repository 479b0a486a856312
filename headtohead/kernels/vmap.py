"""Custom operators, and populations under `torch.vmap`: the population dimension is folded into the first axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headtohead.kernels.path import is_stacking


def operator(
    name: str,
    fake: Callable[..., Any],
    backward: Callable[..., tuple[Any, ...]] | None = None,
    *,
    shared: Collection[str] = (),
    dropped: Collection[str] = (),
    saved: Collection[int] = (),
    schema: str | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as `torch.ops.headtohead.NAME`, which a compiler does not break up.

    `fake` returns empty outputs. `backward` takes the list of inputs and the gradients of the outputs, and returns the
    gradients of the leading inputs; inputs named in `dropped` are not saved for it. The outputs with the indices `saved`
    follow the inputs in that list, and the gradient of an unused output is then None. Under `torch.vmap` the population is
    folded into the first axis of every tensor, except those named in `shared`, which are the same for all rows.
    """

    def register(function: Callable[..., Any]) -> Any:
        names = list(inspect.signature(function).parameters)
        made = torch.library.custom_op(f"headtohead::{name}", function, mutates_args=(), schema=schema)
        made.register_fake(fake)
        made.register_vmap(partial(_fold_population, made, {names.index(one): one for one in shared}))
        if backward is not None:
            skipped = {names.index(one) for one in dropped}
            made.register_autograd(
                partial(_differentiate, backward), setup_context=partial(_keep, skipped, saved)
            )
        return made

    return register


def _keep(skipped: set[int], saved: Collection[int], ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors = [value if isinstance(value, Tensor) else None for value in inputs]
    kept = [None if index in skipped else value for index, value in enumerate(tensors)]
    ctx.save_for_backward(*kept, *(output[index] for index in saved))
    ctx.set_materialize_grads(not saved)
    ctx.given = [value is not None for value in tensors]
    ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]


def _differentiate(backward: Callable[..., Sequence[Any]], ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    count = len(ctx.given)
    inputs, outputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
    pairs = zip(inputs, ctx.others, strict=True)
    found = backward([*(other if tensor is None else tensor for tensor, other in pairs), *outputs], *grads)
    padded = (*found, *[None] * (count - len(found)))
    return tuple(grad if given else None for grad, given in zip(padded, ctx.given, strict=True))


def _fold_population(
    operator: Any, shared: dict[int, str], info: Any, in_dims: tuple[Any, ...], *given: Any
) -> tuple[Any, Any]:
    """Fold the population into the first axis, run once, and unfold."""
    for index, name in shared.items():
        if in_dims[index] is not None:
            raise ValueError(f"the rows of a population share one {name}, but it was mapped")
    size = info.batch_size

    def fold(value: Any, place: int | None) -> Any:
        """Return a tensor with its mapped dimension, or `size` copies if it has none, flattened into its first axis."""
        if not isinstance(value, Tensor):
            return value
        stacked = value.expand(size, *value.shape) if place is None else value.movedim(place, 0)
        return stacked.flatten(0, 1)

    pairs = enumerate(zip(given, in_dims, strict=True))
    found = operator(*(value if index in shared else fold(value, place) for index, (value, place) in pairs))
    if isinstance(found, Tensor):
        return found.unflatten(0, (size, -1)), 0
    return tuple(part.unflatten(0, (size, -1)) for part in found), (0,) * len(found)


def folded(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Return function(*tensors) for tensors (batch, ...); under `torch.vmap` the rows are folded into the batch.

    PyTorch's vmap rule for attention does not support cuDNN on a GPU and loops over rows on CPU; its norm has no rule.
    """
    if not is_stacking():
        return function(*tensors)
    return _Folded.apply(function, *tensors)


class _Folded(torch.autograd.Function):
    """Provides the `vmap` rule only: below it, autograd records the function itself."""

    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        raise RuntimeError("a folded operation was differentiated outside the population")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], function: Callable[..., Tensor], *tensors: Tensor | None
    ) -> tuple[Tensor, int]:
        return _fold_population(function, {}, info, in_dims[1:], *tensors)
