"""Latent attention token by token, in the explicit form.

c_j = W_D x_j; k_j = [W_UK c_j ; R_j W_KR x_j]; v_j = W_UV c_j; q_i = [W_Q y_i ; R_i W_QR y_i], y = x or W_DQ x.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.references.attention import turn


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""
    time, width = x.shape
    d = width // heads
    rotary = len(p["k_rope.weight"]) if positions == "rope" else 0

    def affine(name: str, vector: Tensor) -> Tensor:
        result = p[f"{name}.weight"] @ vector
        return result + p[f"{name}.bias"] if f"{name}.bias" in p else result

    def normed(vector: Tensor, gain: str) -> Tensor:
        if not options.latent_norm:
            return vector
        return vector / torch.sqrt((vector**2).mean() + 1e-6) * p[gain]

    latents = [normed(affine("down", x[j]), "gain") for j in range(time)]
    sources = [
        normed(affine("q_down", x[i]), "q_gain") if options.query_latent else x[i] for i in range(time)
    ]
    rows = []
    for i in range(time):
        parts = []
        for h in range(heads):
            mine, turning = slice(h * d, (h + 1) * d), slice(h * rotary, (h + 1) * rotary)
            query = affine("q", sources[i])[mine]
            scores, values = [], []
            for j in range(i + 1):
                score = query @ affine("k", latents[j])[mine]
                if rotary:
                    turned = turn(affine("q_rope", sources[i])[turning], i)
                    score = score + turned @ turn(affine("k_rope", x[j]), j)
                scores.append(score / math.sqrt(d + rotary))
                values.append(affine("v", latents[j])[mine])
            weights = torch.softmax(torch.stack(scores), 0)
            parts.append(weights @ torch.stack(values))
        rows.append(affine("o", torch.cat(parts)))
    return torch.stack(rows)
