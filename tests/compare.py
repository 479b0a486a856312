"""Tensor comparisons whose failure message names the tensor, its shape and its error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def assert_close(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float, *, by: str = "max"
) -> None:
    """Compare tensors by name; an error is relative to the largest value (`by="max"`) or to the norm (`by="norm"`)."""
    assert ours.keys() == theirs.keys()
    wrong = []
    for name, found in ours.items():
        wanted = theirs[name].detach().double()
        error = (found.detach().double() - wanted).abs()
        size = wanted.abs().max() if by == "max" else wanted.norm()
        relative = (error.max() if by == "max" else error.norm()) / size.clamp_min(1e-30)
        shape = "x".join(map(str, found.shape)) or "scalar"
        if not torch.isfinite(found).all():
            wrong.append(f"{name} ({shape}): not finite")
        elif not relative <= tolerance:
            index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            wrong.append(
                f"{name} ({shape}): relative error {relative:.2e}, {tolerance:.0e} allowed; worst at {index}"
            )
    assert not wrong, "\n".join(wrong)


def named(tensors: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return tensors by name."""
    return dict(zip(names, tensors, strict=True))


def with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the output, and the gradient with respect to each input of its sum weighted from -1 to 1."""
    output = function(*inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    gradients = torch.autograd.grad((output * weights).sum(), list(inputs))
    return named([output, *gradients], ["output", *(f"d{name}" for name in names)])


def input_names(function: Callable[..., Tensor], count: int) -> list[str]:
    """Return the names of a function's first arguments; unnamed ones are numbered."""
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    return [names[index] if index < len(names) else f"input{index}" for index in range(count)]


def agree(
    fast: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor], tolerance: float
) -> None:
    """Compare the outputs of two functions and their gradients with respect to every input."""
    names = input_names(fast, len(inputs))
    assert_close(
        with_gradients(fast, inputs, names), with_gradients(plain, inputs, names), tolerance, by="max"
    )
