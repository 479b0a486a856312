"""Attention with a sink of one sequence: e^s / (e^b + sum e^s)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.references.heads import affine, attended, joined, projected


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""

    def weigh(head: int, i: int, seen: list[int], scores: Tensor) -> Tensor:
        b = p["sink"][head] if options.bias == "learned" else torch.zeros((), dtype=x.dtype)
        return torch.exp(scores) / (torch.exp(b) + torch.exp(scores).sum())

    q, k, v = projected(x, p, options, heads, positions)
    return affine(joined(attended(q, k, v, options.window, weigh)), p, "o")
