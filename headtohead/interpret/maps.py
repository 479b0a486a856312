"""Attention maps of every layer of a model on given tokens, with the largest score before the softmax; their indicators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headtohead.mechanisms.contract.base import Frame, Mechanism
from headtohead.model.decoder import Decoder

LOCAL = 4  # sub-diagonals 0 to 3
_SOFTMAX = {torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax}


@dataclass(frozen=True)
class LayerMap:
    """One layer's map."""

    mechanism: str
    weights: Tensor | None
    """(batch, heads, time, time), or None if the mechanism has no map."""
    signed: bool
    largest_score: float | None
    """The largest |score| before its softmax; None if its map has no softmax."""


class _Scores(TorchFunctionMode):
    """Records the largest |score| of every softmax over keys, ignoring masked keys."""

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
    """Return the map of every layer for tokens (batch, time)."""
    found: dict[int, LayerMap] = {}

    def take(index: int, mechanism: Mechanism, x: Tensor, frame: Frame) -> None:
        with _Scores() as scores:
            weights = mechanism.attention_map(x, frame)
        found[index] = LayerMap(mechanism.name, weights, bool(mechanism.signed), scores.largest)

    frame = Frame()
    with watching(model, frame, take):
        model.hidden(tokens, frame=frame)
    names = (block.mechanism.name for block in model.layers)
    return [found.get(index, LayerMap(name, None, False, None)) for index, name in enumerate(names)]


@contextmanager
def watching(
    model: Decoder, mine: Frame, take: Callable[[int, Mechanism, Tensor, Frame], None]
) -> Iterator[None]:
    """Call `take` with layer, mechanism, x and frame before each mechanism; a companion's pass has a different frame."""

    def hook(index: int) -> Callable[[Any, tuple[Any, ...]], None]:
        def before(mechanism: Any, given: tuple[Any, ...]) -> None:
            if given[1] is mine:
                take(index, mechanism, given[0], given[1])

        return before

    handles = [
        block.mechanism.register_forward_pre_hook(hook(index)) for index, block in enumerate(model.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def indicators(weights: Tensor, signed: bool = False) -> dict[str, float]:
    """Return the indicators of one layer's maps (batch, heads, time, time), mean over heads and sequences, in nats.

    Entropy, concentration, head diversity, sink and local focus are those of section 2.7 of Xue et al., arXiv 2510.11602.
    A signed map is replaced by its absolute values, renormalized by row; callers should mark the numbers.
    """
    weights = weights.double()
    if signed:
        weights = weights.abs()
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    time = weights.shape[-1]
    pairs = time * (time + 1) / 2
    found = {
        "entropy": -torch.special.xlogy(weights, weights).sum((-2, -1)).mean(),
        "concentration": weights.square().sum((-2, -1)).sqrt().mean(),
        "head_diversity": (weights.std(1, correction=0).tril().sum((-2, -1)) / pairs).mean(),
        "sink": weights[..., 0].mean(),
    }
    found |= {
        f"local_{offset}": weights.diagonal(-offset, -2, -1).mean() for offset in range(min(LOCAL, time))
    }
    return {name: float(value) for name, value in found.items()}
