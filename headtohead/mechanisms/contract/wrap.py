"""Wrap an existing attention module as a mechanism."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import (
    Draw,
    Frame,
    Mechanism,
    Shape,
    Supports,
    default_initialise,
)


def wrap(
    module: nn.Module | Callable[[Shape], nn.Module], *, name: str = "", own_start: bool = False
) -> type[Mechanism]:
    """Return a mechanism class for a module that maps (batch, time, width) to the same shape.

    Pass a module, which is copied for each layer, or a function from Shape to a module. The module must be causal and
    apply positions itself. `own_start` keeps the initial values of its constructor, seeded by run and layer.
    """
    source = module
    if isinstance(source, nn.Module) and not own_start:
        # Weights that every run draws again do not identify it.
        source = copy.deepcopy(source)
        default_initialise(source, lambda name, shape, std=None: torch.zeros(tuple(shape)))

    class Wrapped(Mechanism):
        supports = Supports(bidirectional=False, padding=False)

        def __init__(self, shape: Shape, options: Any) -> None:
            super().__init__(shape, options)
            self.inner = copy.deepcopy(source) if isinstance(source, nn.Module) else source(shape)

        def forward(self, x: Tensor, frame: Frame) -> Tensor:
            output = self.inner(x)
            output = output[0] if isinstance(output, tuple) else output
            if output.shape != x.shape:
                raise UserError(
                    f"wrapped module {self.name} returned {tuple(output.shape)} for x {tuple(x.shape)}; "
                    "it must keep (batch, time, width)"
                )
            tensor: Tensor = output
            return tensor

        def initialise(self, draw: Draw) -> None:
            if not own_start:
                super().initialise(draw)

    kind = type(source).__name__ if isinstance(source, nn.Module) else getattr(source, "__name__", "wrapped")
    Wrapped.name = name or ("wrapped" if kind == "<lambda>" else kind)
    Wrapped.__name__ = Wrapped.__qualname__ = Wrapped.name
    Wrapped.__doc__ = f"{Wrapped.name}, an existing module."
    return Wrapped
