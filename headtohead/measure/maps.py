"""The attention maps of every layer of a model on given tokens, with the largest score before the softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headtohead.mechanisms.base import Frame
from headtohead.model.decoder import Block, Decoder

_SOFTMAX = {torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax}


@dataclass(frozen=True)
class LayerMap:
    """One layer's map."""

    mechanism: str
    weights: Tensor | None
    """(batch, heads, time, time), or None: the mechanism gives no map."""
    signed: bool
    largest_score: float | None
    """The largest |score| that went into its softmax; None where its map has none."""


class _Scores(TorchFunctionMode):
    """Notes the largest |score| of every softmax over keys; what a query must not see does not count."""

    largest: float | None = None

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _SOFTMAX and args and args[0].ndim >= 3 and args[0].shape[-1] == args[0].shape[-2]:
            scores = args[0].detach()
            seen = torch.isfinite(scores) & torch.ones_like(scores, dtype=torch.bool).tril()
            peak = float(scores.abs().masked_fill(~seen, 0.0).max())
            self.largest = max(peak, self.largest or 0.0)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def layer_maps(model: Decoder, tokens: Tensor) -> list[LayerMap]:
    """Return the map of every layer for tokens (batch, time), as the model stands."""
    frame = Frame()
    found: dict[int, LayerMap] = {}
    with _looking(model, frame, found):
        model.hidden(tokens, frame=frame)
    return [found.get(index, _without(block)) for index, block in enumerate(model.layers)]


def _without(block: Block) -> LayerMap:
    return LayerMap(block.mechanism.name, None, False, None)


@contextmanager
def _looking(model: Decoder, mine: Frame, found: dict[int, LayerMap]) -> Iterator[None]:
    """Ask every mechanism for its map of what it is about to mix; a companion's own pass has another frame."""

    def hook(index: int) -> Callable[[Any, tuple[Any, ...]], None]:
        def look(mechanism: Any, given: tuple[Any, ...]) -> None:
            x, frame = given[0], given[1]
            if frame is mine:
                with _Scores() as scores:
                    weights = mechanism.attention_map(x, frame)
                found[index] = LayerMap(mechanism.name, weights, bool(mechanism.signed), scores.largest)

        return look

    handles = [
        block.mechanism.register_forward_pre_hook(hook(index)) for index, block in enumerate(model.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
