"""Exclusive attention of one sequence: y - (y . v) v / |v|^2 in every head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.references.heads import affine, attended, joined, projected


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""
    q, k, v = projected(x, p, options, heads, positions)
    mixed = attended(q, k, v, options.window)
    pairs = [zip(ys, own, strict=True) for ys, own in zip(mixed, v, strict=True)]
    return affine(joined([[y - (y @ u) / (u @ u) * u for y, u in head] for head in pairs]), p, "o")
