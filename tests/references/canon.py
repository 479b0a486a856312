"""Canon layers of one sequence: h_t + sum_i w_i h_(t-i), token by token, before or after the projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.references.heads import affine, attended, in_heads, joined, positioned


def convolved(h: Tensor, weight: Tensor) -> Tensor:
    """Return C(h) (time, channels) for weights (kernel, channels)."""
    rows = []
    for t in range(len(h)):
        row = h[t]
        for i, w in enumerate(weight):
            if t - i >= 0:
                row = row + w * h[t - i]
        rows.append(row)
    return torch.stack(rows)


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""
    dim, rope = x.shape[1] // heads, positions == "rope"
    if options.at in ("A", "AB"):
        x = convolved(x, p["canon_x"])
    q, k, v = (affine(x, p, name) for name in "qkv")
    if options.at in ("B", "AB"):
        q, k, v = (convolved(h, p[f"canon_{name}"]) for name, h in zip("qkv", (q, k, v), strict=True))
    queries, keys, values = (in_heads(h, dim, heads) for h in (q, k, v))
    queries, keys = positioned(queries, p, "q_gain", rope), positioned(keys, p, "k_gain", rope)
    return affine(joined(attended(queries, keys, values, options.window)), p, "o")
