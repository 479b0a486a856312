"""Likeness of the query, key and value projections of a layer: of their weights, of what they give, and of their ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headtohead.interpret.maps import watching
from headtohead.mechanisms.contract.base import Frame, Mechanism, Shape
from headtohead.model.decoder import Decoder

PROJECTIONS = ("q", "k", "v")
PAIRS = {"kv": ("k", "v"), "qk": ("q", "k"), "qv": ("q", "v")}
Likeness = dict[str, dict[str, float]]
"""Numbers by measure and by pair (kv, qk, qv) or projection (q, k, v)."""


@torch.no_grad()
def layer_projections(model: Decoder, tokens: Tensor) -> list[Likeness | None]:
    """Return the likeness in every layer for tokens (batch, time); None for a layer without separate q, k and v."""
    found: dict[int, Likeness] = {}

    def take(index: int, mechanism: Mechanism, x: Tensor, frame: Frame) -> None:
        children = dict(mechanism.named_children())
        layers = {name: layer for name in PROJECTIONS if isinstance(layer := children.get(name), nn.Linear)}
        weights = {name: layer.weight for name, layer in layers.items()}
        shape = mechanism.shape
        if len(weights) == 3 and all(_fits(weight, shape) for weight in weights.values()):
            found[index] = likeness(weights, x, shape.head_dim)

    frame = Frame()
    with watching(model, frame, take):
        model.hidden(tokens, frame=frame)
    return [found.get(index) for index in range(len(model.layers))]


def likeness(weights: Mapping[str, Tensor], x: Tensor, dim: int) -> Likeness:
    """Return the likeness of projections (outputs, width) of heads of `dim` outputs, applied to x (batch, time, width).

    `weights` is the cosine of a head's flattened matrices, `outputs` the mean cosine of what they give for a token, `angles`
    the mean cosine of the principal angles between the subspaces that they read (1: the same subspace), `rank` the
    exponential of the entropy of a projection's singular values, `rank_share` that divided by the width.
    """
    width = x.shape[-1]
    heads = max(len(weight) for weight in weights.values()) // dim
    by_head = {name: _by_head(weight.double(), dim, heads) for name, weight in weights.items()}
    given = {name: torch.einsum("btw,how->btho", x.double(), one) for name, one in by_head.items()}
    bases = {name: torch.linalg.qr(one.mT)[0] for name, one in by_head.items()}
    ranks = {name: effective_rank(weight.double()) for name, weight in weights.items()}
    return {
        "weights": {
            name: _cosine(by_head[a].flatten(1), by_head[b].flatten(1)) for name, (a, b) in PAIRS.items()
        },
        "outputs": {name: _cosine(given[a], given[b]) for name, (a, b) in PAIRS.items()},
        "angles": {
            name: float(torch.linalg.svdvals(bases[a].mT @ bases[b]).clamp(max=1).mean())
            for name, (a, b) in PAIRS.items()
        },
        "rank": ranks,
        "rank_share": {name: rank / width for name, rank in ranks.items()},
    }


def _fits(weight: Tensor, shape: Shape) -> bool:
    """Return whether a weight maps the width to whole heads that divide those of the shape."""
    outputs, width = weight.shape
    return width == shape.width and outputs % shape.head_dim == 0 and shape.width % outputs == 0


def effective_rank(matrix: Tensor) -> float:
    """Return exp of the entropy of the singular values, normalized to sum 1."""
    values = torch.linalg.svdvals(matrix)
    shares = values / values.sum().clamp_min(1e-300)
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()))


def _by_head(weight: Tensor, dim: int, heads: int) -> Tensor:
    """Return (heads, dim, width); grouped keys and values are repeated for their queries."""
    split = weight.unflatten(0, (-1, dim))
    return split.repeat_interleave(heads // split.shape[0], 0)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())
