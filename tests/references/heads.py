"""Queries, keys and values of one sequence, head by head and token by token, with normalization and rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.references.attention import turn

Rows = list[list[Tensor]]
"""Vectors by query head, then by token."""


def affine(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    """Return W x + b of every token (time, out)."""
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def in_heads(x: Tensor, dim: int, heads: int) -> Rows:
    """Return the vectors of each query head; heads of a group read the same part of x (time, groups * dim)."""
    groups = x.shape[1] // dim
    parts = [x[:, g * dim : (g + 1) * dim] for g in range(groups)]
    return [list(parts[h * groups // heads]) for h in range(heads)]


def positioned(rows: Rows, p: dict[str, Tensor], gain: str, rope: bool) -> Rows:
    """Return queries or keys normalized, if p has this gain, and then rotated by their positions."""
    if gain in p:
        rows = [[x / torch.sqrt((x @ x) / len(x) + 1e-6) * p[gain] for x in head] for head in rows]
    return [[turn(x, t) if rope else x for t, x in enumerate(head)] for head in rows]


def attended(
    q: Rows,
    k: Rows,
    v: Rows,
    window: int = 0,
    weigh: Callable[[int, int, list[int], Tensor], Tensor] | None = None,
) -> Rows:
    """Return sum_j a_ij v_j of every head and token; `weigh(head, i, seen, scores)` replaces the softmax of the scores."""
    mixed: Rows = []
    for h, queries in enumerate(q):
        mixed.append([])
        for i, query in enumerate(queries):
            seen = [j for j in range(i + 1) if not window or i - j < window]
            scores = torch.stack([query @ k[h][j] / math.sqrt(len(query)) for j in seen])
            weights = torch.softmax(scores, 0) if weigh is None else weigh(h, i, seen, scores)
            mixed[h].append(
                sum((a * v[h][j] for a, j in zip(weights, seen, strict=True)), torch.zeros_like(v[h][0]))
            )
    return mixed


def joined(mixed: Rows) -> Tensor:
    """Return (time, width): the heads of each token side by side."""
    return torch.stack([torch.cat(row) for row in zip(*mixed, strict=True)])


def projected(
    x: Tensor, p: dict[str, Tensor], options: Any, heads: int, positions: str
) -> tuple[Rows, Rows, Rows]:
    """Return q, k and v of standard attention."""
    dim, rope = x.shape[1] // heads, positions == "rope"
    q, k, v = (in_heads(affine(x, p, name), dim, heads) for name in "qkv")
    return positioned(q, p, "q_gain", rope), positioned(k, p, "k_gain", rope), v
