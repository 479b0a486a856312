"""The gated linear recurrence token by token, coordinate by coordinate.

S_t[c, e] = a_t[c] S_(t-1)[c, e] + k_t[c] v_t[e]; o_t[e] = sum_c q_t[c] S_t[c, e] / sqrt(d_k)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""
    width = x.shape[1]
    values = width // heads
    keys = len(p["q.weight"]) // heads

    def affine(name: str, vector: Tensor) -> Tensor:
        result = p[f"{name}.weight"] @ vector
        return result + p[f"{name}.bias"] if f"{name}.bias" in p else result

    states = [torch.zeros(keys, values, dtype=x.dtype) for _ in range(heads)]
    rows = []
    for token in x:
        q, k, v = (affine(name, token) for name in "qkv")
        logits = p["decay_up.weight"] @ (p["decay_down.weight"] @ token) + p["decay_up.bias"]
        decay = (1 / (1 + torch.exp(-logits))) ** (1 / options.temperature)
        parts = []
        for h in range(heads):
            mine, carried = slice(h * keys, (h + 1) * keys), slice(h * values, (h + 1) * values)
            states[h] = decay[mine].unsqueeze(1) * states[h] + torch.outer(k[mine], v[carried])
            read = q[mine] @ states[h] / math.sqrt(keys)
            parts.append(read / torch.sqrt((read**2).mean() + 1e-6) * p["gain"])
        joined = torch.cat(parts)
        if options.output_gate:
            gate = affine("gate", token)
            joined = joined * gate / (1 + torch.exp(-gate))
        rows.append(affine("o", joined))
    return torch.stack(rows)
