"""Differential Attention of one sequence from the published equations, map by map and row by row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.references.attention import turn


def first(
    q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], *, heads: int, layer: int, rope: bool
) -> Tensor:
    """Version 1 from q, k, v (time, width): (A_1 - lambda A_2) v_j, normalized over 2d, times 1 - lambda_init; then W_o."""
    d = q.shape[1] // heads
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    lam = torch.exp(p["lambda_q1"] @ p["lambda_k1"]) - torch.exp(p["lambda_q2"] @ p["lambda_k2"]) + start
    parts = []
    for j in range(heads // 2):
        one, two = (weights(_head(q, n, d), _head(k, n, d), rope) for n in (2 * j, 2 * j + 1))
        mixed = (one - lam * two) @ v[:, 2 * j * d : 2 * (j + 1) * d]
        size = (mixed.square().mean(1, keepdim=True) + 1e-5).sqrt()
        parts.append(mixed / size * p["gain"] * (1 - start))
    return _write(torch.cat(parts, 1), p)


def second(x: Tensor, p: dict[str, Tensor], *, heads: int, kv_heads: int, rope: bool) -> Tensor:
    """Version 2 of x (time, width): queries 2j and 2j + 1 read the same key and value; lambda from the token."""
    q, k, v = (_affine(x, p, name) for name in "qkv")
    d = x.shape[1] // heads
    parts = []
    for j in range(heads):
        shared = j * kv_heads // heads
        key, value = _head(k, shared, d), _head(v, shared, d)
        lam = torch.sigmoid(x @ p["lambda_map.weight"][j])
        one, two = (weights(_head(q, n, d), key, rope) for n in (2 * j, 2 * j + 1))
        parts.append(one @ value - lam[:, None] * (two @ value))
    return _write(torch.cat(parts, 1), p)


def projected(x: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (time, ...) of one sequence."""
    return _affine(x, p, "q"), _affine(x, p, "k"), _affine(x, p, "v")


def weights(q: Tensor, k: Tensor, rope: bool) -> Tensor:
    """Return the causal softmax map (time, time) of one head, each row from its own scores."""
    rows = []
    for i in range(len(q)):
        keys = [turn(k[j], j) if rope else k[j] for j in range(i + 1)]
        query = turn(q[i], i) if rope else q[i]
        scores = torch.stack([query @ key for key in keys]) / math.sqrt(q.shape[1])
        rows.append(torch.cat((torch.softmax(scores, 0), scores.new_zeros(len(q) - i - 1))))
    return torch.stack(rows)


def _head(x: Tensor, n: int, d: int) -> Tensor:
    return x[:, n * d : (n + 1) * d]


def _affine(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _write(mixed: Tensor, p: dict[str, Tensor]) -> Tensor:
    return _affine(mixed, p, "o")
