"""Probe `maps`: attention maps of selected heads on one held-out window."""

from __future__ import annotations

import re
from typing import Annotated

import torch
from msgspec import Meta, Struct
from torch import Tensor
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.common.typed import LARGEST, Count
from headtohead.interpret.maps import LayerMap, layer_maps
from headtohead.study.probes.base import Found, Probe, Subject, Unavailable

TOKENS = 192
CELLS = 48
_SCALE = 1000
"""Weights are stored as integer thousandths."""
Whole = Annotated[int, Meta(gt=-LARGEST, lt=LARGEST)]
_CHOICE = re.compile(r"(\d{1,4})\.(\d{1,4})")


class HeadMap(Struct, frozen=True):
    """The map of one head."""

    layer: Count
    head: Count
    why: str
    """Why it is shown."""
    mechanism: str
    signed: bool
    rows: list[list[Whole]]
    """Weights of a row's cells; masked cells of a causal layer are left out, so that row r has r + 1 cells."""


class Maps(Struct, frozen=True):
    """The result."""

    tokens: list[str]
    """The texts of the groups of tokens."""
    group: Count
    scale: Count
    maps: list[HeadMap]
    absent: list[str] = []
    """Requested heads that do not exist."""


def _measure(subject: Subject, argument: str) -> Found:
    (window,) = subject.windows(1, min(TOKENS, subject.model.size.context))
    layers = layer_maps(subject.model, window.unsqueeze(0))
    group = -(-len(window) // CELLS)
    maps: list[HeadMap] = []
    for index, layer in enumerate(layers, 1):
        if layer.weights is None:
            continue
        weights = layer.weights[0].double()
        for why, head in _heads(index, layer, weights, argument).items():
            rows = (_SCALE * _pooled(weights[head], group)).round().int().tolist()
            cells = [row[: place + 1] for place, row in enumerate(rows)]
            maps.append(HeadMap(index, head + 1, why, layer.mechanism, layer.signed, cells))
        subject.progress(index / len(layers))
    if not maps:
        heads = {
            index: len(layer.weights[0]) for index, layer in enumerate(layers, 1) if layer.weights is not None
        }
        if heads:
            known = ", ".join(f"{index}.1 to {index}.{count}" for index, count in heads.items())
            return Unavailable(f"no map for {argument}; this model has {known}")
        return Unavailable(f"{layers[0].mechanism} gives no attention map")
    shown = {f"{one.layer}.{one.head}" for one in maps}
    absent = [part for part in argument.split(",") if part and part not in shown]
    pieces = [window[start : start + group].tolist() for start in range(0, len(window), group)]
    return Maps([subject.tokenizer.decode(piece) for piece in pieces], group, _SCALE, maps, absent)


def _heads(index: int, layer: LayerMap, weights: Tensor, argument: str) -> dict[str, int]:
    """Return the heads of a layer to show by reason: the requested ones, or the most local, first-token and spread ones."""
    if argument:
        pairs = [tuple(map(int, part.split("."))) for part in argument.split(",")]
        asked = [head for number, head in pairs if number == index and head <= len(weights)]
        return {f"head {head}": head - 1 for head in asked}
    if layer.signed:
        weights = weights.abs() / weights.abs().sum(-1, keepdim=True).clamp_min(1e-300)
    local = sum(weights.diagonal(-back, -2, -1).sum(-1) for back in range(min(4, weights.shape[-1])))
    spread = -torch.special.xlogy(weights, weights).sum((-2, -1))
    assert isinstance(local, Tensor)
    return {
        "most local": int(local.argmax()),
        "most on the first token": int(weights[..., 0].sum(-1).argmax()),
        "most spread": int(spread.argmax()),
    }


def _pooled(weights: Tensor, group: int) -> Tensor:
    """Return the map over groups of tokens: the weight on a group of keys, averaged over a group of queries."""
    time = weights.shape[-1]
    count = -(-time // group)
    room = count * group - time
    cells = F.pad(weights, (0, room, 0, room)).view(count, group, count, group).sum((1, 3))
    queries = torch.full((count, 1), float(group), dtype=weights.dtype, device=weights.device)
    queries[-1] = group - room
    return cells / queries


def _check(argument: str) -> str:
    parts = argument.split(",") if argument else []
    for part in parts:
        match = _CHOICE.fullmatch(part.strip())
        if not match or not int(match[1]) or not int(match[2]):
            raise UserError(
                f"probe maps takes LAYER.HEAD,... counted from 1, such as maps:1.2,4.1, got '{part}'"
            )
    pairs = [part.split(".") for part in parts]
    return ",".join(dict.fromkeys(f"{int(layer)}.{int(head)}" for layer, head in pairs))


PROBE = Probe(
    "attention maps of selected heads on one held-out window: the most local, the most on the first token and the most "
    "spread head of each layer, or the given ones",
    _measure,
    Maps,
    _check,
    "LAYER.HEAD,...",
)
