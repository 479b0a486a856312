"""Inspect one text with one model: maps of every head, predictions at each token, Kuramoto phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headtohead.interpret.maps import LayerMap, layer_maps
from headtohead.model.classifier import Classifier, Pointer
from headtohead.model.decoder import Decoder
from headtohead.model.spaces import Space, Torus

LIKELIEST = 5
COORDINATES = 3
"""Number of coordinates whose phases are shown."""


@dataclass(frozen=True)
class Guess:
    """One answer and its probability."""

    words: str
    probability: float


@dataclass(frozen=True)
class Phases:
    """Angles of all tokens on a few coordinates of the torus, at one stage of the model."""

    stage: str
    order: float
    """Mean over all coordinates of r, the length of the tokens' mean direction; 1 if all phases are equal."""
    angles: Tensor
    """(coordinates, time)"""


@dataclass(frozen=True)
class Inspection:
    """The results of a model on one text of (time,) tokens."""

    layers: list[LayerMap]
    """Each with weights (1, heads, time, time), or None."""
    causal: bool
    place: int
    """The position from which the prediction is read."""
    kind: str
    """What is predicted: class, token or span."""
    guesses: list[list[Guess]]
    """The likeliest answers: a list for every token if tokens are predicted, else one list."""
    phases: list[Phases]


@torch.no_grad()
def inspect_text(
    model: Decoder,
    tokens: Sequence[int],
    words: Callable[[int], str],
    classes: Sequence[str] = (),
    place: int | None = None,
) -> Inspection:
    """Return a model's results on tokens; `words` maps a token to text, `place` is the position to read (default: last)."""
    device = model.readout.device
    given = torch.tensor([list(tokens)], device=device)
    place = len(tokens) - 1 if place is None else place
    kind = "class" if isinstance(model, Classifier) else "span" if isinstance(model, Pointer) else "token"
    if isinstance(model, Pointer):
        guesses, place = _span(model, given, words)
    elif isinstance(model, Classifier):
        chances = model.scores(given, torch.tensor([place], device=device))[0].softmax(-1)
        names = list(classes) or [f"class {number}" for number in range(len(chances))]
        guesses = [_likeliest(chances, names.__getitem__)]
    else:
        rows = model.logits(given)[0].float().softmax(-1)
        guesses = [_likeliest(row, words) for row in rows]
    causal = bool(getattr(model, "causal", True))
    return Inspection(layer_maps(model, given), causal, place, kind, guesses, _phases(model, given))


def _likeliest(chances: Tensor, words: Callable[[int], str]) -> list[Guess]:
    values, indices = chances.topk(min(LIKELIEST, len(chances)))
    return [Guess(*pair) for pair in zip(map(words, indices.tolist()), values.tolist(), strict=True)]


def _span(model: Pointer, given: Tensor, words: Callable[[int], str]) -> tuple[list[list[Guess]], int]:
    first, last = model.spans(given)[0].tolist()
    starts, stops = model.ends(given)[0].softmax(-1)
    text = "".join(words(token) for token in given[0, first : last + 1].tolist())
    return [[Guess(text, float(starts[first] * stops[last]))]], last


def _phases(model: Decoder, given: Tensor) -> list[Phases]:
    """Return the phases before each torus layer, after its coupling and at the end, on the coordinates that align most."""
    states: list[tuple[str, Tensor]] = []

    def capture(stage: str) -> Any:
        def before(_: Any, arguments: tuple[Any, ...]) -> None:
            states.append((stage, arguments[0][0].double().cpu()))

        return before

    def is_angles(space: Space) -> bool:
        return isinstance(space, Torus) and space.group.numbers == 1

    hooks: list[tuple[nn.Module | None, str]] = []
    for number, block in enumerate(model.layers, 1):
        if is_angles(block.space):
            hooks.append((block.mixer_norm, f"before layer {number}"))
            if block.ffn is not None:
                hooks.append((block.ffn_norm, f"layer {number}, after coupling"))
    if is_angles(model.spaces[-1]):
        hooks.append((model.norm, "at the end"))
    with ExitStack() as stack:
        for module, stage in hooks:
            if module is not None:
                stack.callback(module.register_forward_pre_hook(capture(stage)).remove)
        if hooks:
            model.hidden(given)
    if len(states) < 2:
        return []
    orders = [torch.hypot(angles.cos().mean(0), angles.sin().mean(0)) for _, angles in states]
    gained = torch.zeros_like(orders[0])
    for (stage, _), before, after in zip(states, orders, orders[1:], strict=False):
        # The next stage is after the coupling, or after the layer if it has no feed-forward part.
        if stage.startswith("before"):
            gained += after - before
    chosen = gained.argsort(descending=True)[:COORDINATES]
    return [
        Phases(stage, float(order.mean()), angles[:, chosen].T)
        for (stage, angles), order in zip(states, orders, strict=True)
    ]
