"""Attention with a score function, pair by pair: o_i = sum_j w_ij v_j, each function written from its formula."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.references.attention import turn


def score(options: Any, s: Tensor, h: int, heads: int, i: int, j: int, p: dict[str, Tensor]) -> Tensor | None:
    """Return the score of query i and key j in head h = 0, 1, ..., or None where the pair is hidden."""
    name, gap = options.score, i - j
    if name == "plain":
        return s
    if name == "alibi":
        return s - gap / 2.0 ** (8 * (h + 1) / heads)
    if name == "softcap":
        ratio = torch.exp(2 * s / options.cap)
        return options.cap * (ratio - 1) / (ratio + 1)
    if name == "relative":
        return s + p["learned.table"][h][gap if gap < options.reach else options.reach - 1]
    if name == "sandwich":
        rates = [10_000.0 ** (2 * k / options.dim) for k in range(options.dim // 2)]
        product = sum(
            math.sin(i / rate) * math.sin(j / rate) + math.cos(i / rate) * math.cos(j / rate)
            for rate in rates
        )
        return s + product / ((h + 1) * 8 / heads)
    if name == "sigmoid":
        return s - math.log(options.n or i + 1)
    if name == "sliding":
        return s if gap <= options.window - 1 else None
    if name == "dilated":
        steps = range(0, i + 1, options.dilation)
        return s if gap in (steps[: options.window] if options.window else steps) else None
    assert name == "prefix"
    seen = {*range(options.prefix), *range(i - options.window + 1, i + 1)}
    return s if j in seen else None


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return the layer's output (time, width) for one sequence."""
    q, k, v = (_affine(x, p, name) for name in "qkv")
    d = q.shape[1] // heads
    groups = heads // (k.shape[1] // d)
    rows = []
    for i in range(len(x)):
        parts = []
        for h in range(heads):
            own = slice(h * d, (h + 1) * d)
            shared = slice(h // groups * d, (h // groups + 1) * d)
            scores, values = [], []
            for j in range(i + 1):
                query, key = q[i, own], k[j, shared]
                if positions == "rope":
                    query, key = turn(query, i), turn(key, j)
                found = score(options, query @ key / math.sqrt(d), h, heads, i, j, p)
                if found is not None:
                    scores.append(found)
                    values.append(v[j, shared])
            weights = torch.exp(torch.stack(scores))
            total = 1 + weights if options.score == "sigmoid" else weights.sum()
            parts.append((weights / total) @ torch.stack(values))
        rows.append(torch.cat(parts))
    return _affine(torch.stack(rows), p, "o")


def _affine(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y
