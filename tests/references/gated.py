"""Gated attention of one sequence: softmax attention, each coordinate or head times a sigmoid of the token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.references.heads import affine, attended, joined, projected


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""
    y = joined(attended(*projected(x, p, options, heads, positions), options.window))
    gate = 1 / (1 + torch.exp(-affine(x, p, "gate")))
    if options.gate == "head":
        dim = x.shape[1] // heads
        gate = torch.stack([gate[:, column // dim] for column in range(x.shape[1])], 1)
    return affine(y * gate, p, "o")
