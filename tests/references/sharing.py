"""The forms of projection sharing with every option, token by token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.references.attention import turn


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""
    time, width = x.shape
    d, kv_heads = width // heads, options.kv_heads or heads
    tied = options.tie in ("kv", "qkv")
    rope = options.rope
    if rope == "auto":
        rope = "roundtrip" if tied else "score"
    if positions != "rope":
        rope = "none"
    q, k, v = projected(x, p, options, heads, kv_heads)
    rows = []
    for i in range(time):
        parts = []
        for h in range(heads):
            g = h * kv_heads // heads
            mine, shared = slice(h * d, (h + 1) * d), slice(g * d, (g + 1) * d)
            seen = list(range(i + 1))
            if options.mask_self and i:
                seen.remove(i)
            scores, values = [], []
            for j in seen:
                value = v[j, shared]
                extra = None
                if rope == "decoupled" and options.rotary_key == "shared":
                    r = len(p["k_rope.weight"])
                    turning = affine(x[i], p, "q_rope")[h * r : (h + 1) * r]
                    extra = turn(turning, i) @ turn(affine(x[j], p, "k_rope"), j)
                    score = (q[i, mine] @ key(k[j, shared], p, options, rope) + extra) / math.sqrt(d + r)
                elif rope == "decoupled":
                    c = d - 2 * (d // 4)
                    score = q[i, mine][:c] @ key(k[j, shared][:c], p, options, rope)
                    score = score + turn(q[i, mine][c:], i) @ turn(k[j, shared][c:], j)
                    score, value = score / math.sqrt(d), value[:c]
                elif rope == "none":
                    score = q[i, mine] @ key(k[j, shared], p, options, rope) / math.sqrt(d)
                else:
                    score = turn(q[i, mine], i) @ turn(key(k[j, shared], p, options, rope), j) / math.sqrt(d)
                    if rope in ("roundtrip", "rotated"):
                        value = turn(value, j)
                if options.pos2d:
                    score = term_2d(score, i, j, p["pos2d.weights"], p["pos2d.offset"])
                if options.score_bias == "t5":
                    score = score + p["t5"][bucket(i - j), h]
                if options.score_bias == "alibi":
                    score = score - 2 ** (-8 * (h + 1) / heads) * (i - j)
                scores.append(score)
                values.append(value)
            mixed = torch.softmax(torch.stack(scores).flatten(), 0) @ torch.stack(values)
            parts.append(turn(mixed, -i) if rope == "roundtrip" else mixed)
        rows.append(affine(torch.cat(parts), p, "o"))
    return torch.stack(rows)


def projected(
    x: Tensor, p: dict[str, Tensor], options: Any, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (time, heads * d), k and v (time, kv_heads * d) from the remaining projections."""
    k = affine(x, p, "k")
    q = k if options.tie in ("qk", "qkv") else affine(x, p, "q")
    if "r.weight" in p:
        q = q @ p["r.weight"].T
    if options.value_mix == "off":
        return q, k, k if options.tie in ("kv", "qkv") else affine(x, p, "v")
    d, group = k.shape[1] // kv_heads, heads // kv_heads
    parts = []
    for g in range(kv_heads):
        learnt = options.value_mix == "learnt"
        a, b = (p["mix_weights"][0, g], p["mix_weights"][1, g]) if learnt else options.value_mix
        mean_q = sum(q[:, h * d : (h + 1) * d] for h in range(g * group, (g + 1) * group)) / group
        size = (a**2 + b**2) ** 0.5 if options.value_mix_norm == "unit" else 1.0
        parts.append((a * mean_q + b * k[:, g * d : (g + 1) * d]) / size)
    return q, k, torch.cat(parts, 1)


def key(k: Tensor, p: dict[str, Tensor], options: Any, rope: str) -> Tensor:
    """Return the key used in the score, before rotation."""
    if options.kv_norm == "off":
        return k
    k = k / torch.sqrt((k**2).mean() + 1e-6)
    if options.kv_norm == "scale_free":
        return k
    gain = p["k_gain"]
    if rope in ("roundtrip", "rotated"):
        gain = torch.stack((gain, gain), 1).flatten()
    return k * gain


def term_2d(score: Tensor, i: int, j: int, weights: Tensor, offset: Tensor) -> Tensor:
    """Return sum_c w_c (S + P_c(i, j)) + b: the 1x1 map over all channels, with nothing omitted."""
    channels = planes(i, j, len(weights))
    return sum(w * (score + plane) for w, plane in zip(weights, channels, strict=True)) + offset


def planes(i: int, j: int, m: int) -> list[float]:
    """Return the m channels of P at (i, j): sines and cosines of i, then of j, cut to m."""
    c = 2 * math.ceil(m / 4)
    both = []
    for index in (i, j):
        for t in range(c // 2):
            angle = index * 10_000 ** (-2 * t / c)
            both += [math.sin(angle), math.cos(angle)]
    return both[:m]


def bucket(distance: int) -> int:
    """Return T5's causal bucket: 16 near distances with one bucket each, 16 buckets by the logarithm up to 128."""
    if distance < 16:
        return distance
    return min(31, 16 + int(math.log(distance / 16) / math.log(128 / 16) * 16))


def affine(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    """Return W x (+ b) of each row."""
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y
