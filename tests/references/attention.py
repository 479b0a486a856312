"""Softmax attention token by token: o_i = sum_j softmax_j(q_i . k_j / sqrt(d)) v_j, then W_o."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def turn(vector: Tensor, position: int, theta: float = 10_000.0) -> Tensor:
    """Rotate each neighboring pair (2i, 2i + 1) by position * theta^(-2i/d), as a matrix product."""
    d = len(vector)
    matrix = torch.zeros(d, d, dtype=vector.dtype)
    for i in range(0, d, 2):
        angle = position * theta ** (-i / d)
        matrix[i, i] = matrix[i + 1, i + 1] = math.cos(angle)
        matrix[i, i + 1], matrix[i + 1, i] = -math.sin(angle), math.sin(angle)
    return matrix @ vector


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w_o: Tensor,
    *,
    heads: int,
    kv_heads: int,
    rope: str,
    window: int = 0,
    b_o: Tensor | None = None,
) -> Tensor:
    """Return one sequence's output (time, width) from q (time, heads * d), k and v (time, kv_heads * d).

    rope: none; score rotates q and k in the score; roundtrip also rotates v there and the output back.
    """
    time, d = len(q), q.shape[1] // heads
    rows = []
    for i in range(time):
        parts = []
        for head in range(heads):
            shared = head * kv_heads // heads
            query = q[i, head * d : (head + 1) * d]
            seen = [j for j in range(i + 1) if not window or i - j < window]
            scores, values = [], []
            for j in seen:
                key = k[j, shared * d : (shared + 1) * d]
                value = v[j, shared * d : (shared + 1) * d]
                if rope == "none":
                    score = query @ key
                else:
                    score = turn(query, i) @ turn(key, j)
                if rope == "roundtrip":
                    value = turn(value, j)
                scores.append(score / math.sqrt(d))
                values.append(value)
            weights = torch.softmax(torch.stack(scores), 0)
            mixed = sum(weight * value for weight, value in zip(weights, values, strict=True))
            parts.append(turn(mixed, -i) if rope == "roundtrip" else mixed)
        rows.append(torch.cat(parts))
    output = torch.stack(rows) @ w_o.T
    return output if b_o is None else output + b_o


def standard(
    x: Tensor,
    p: dict[str, Tensor],
    *,
    heads: int,
    kv_heads: int,
    rope: str,
    window: int = 0,
    eps: float = 0.0,
) -> Tensor:
    """Standard attention; with q_gain in p, queries and keys are normalized per head before positions."""
    q, k, v = (_affine(x, p, name) for name in "qkv")
    if "q_gain" in p:
        d = q.shape[1] // heads
        q, k = _normed(q, p["q_gain"], d, eps), _normed(k, p["k_gain"], d, eps)
    return attention(
        q, k, v, p["o.weight"], heads=heads, kv_heads=kv_heads, rope=rope, window=window, b_o=p.get("o.bias")
    )


def diagonal(x: Tensor, p: dict[str, Tensor], *, heads: int, rope: str) -> Tensor:
    """s = x W; q = s Dq, k = s Dk, v = s Dv."""
    s = _affine(x, p, "s")
    q, k, v = (s * p[f"{name}_diagonal"] for name in "qkv")
    return attention(q, k, v, p["o.weight"], heads=heads, kv_heads=heads, rope=rope, b_o=p.get("o.bias"))


def _affine(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _normed(x: Tensor, gain: Tensor, d: int, eps: float) -> Tensor:
    parts = [x[:, i : i + d] for i in range(0, x.shape[1], d)]
    return torch.cat([part / ((part**2).mean(1, keepdim=True) + eps) ** 0.5 * gain for part in parts], 1)
