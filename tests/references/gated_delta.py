"""The gated delta rule token by token: decay the state, remove what it returns for the key, write the value.

S <- diag(a) S; S <- S - b k (k S) + b k v; o = q S / sqrt(d_k), with S of (keys, values) per head
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def convolved(rows: list[Tensor], p: dict[str, Tensor], name: str) -> list[Tensor]:
    """Return silu of each row's causal convolution, channel by channel, if the layer has one."""
    found = []
    for t, row in enumerate(rows):
        if f"{name}_conv.weight" in p:
            weight = p[f"{name}_conv.weight"]
            taps = weight.shape[1]
            terms = [weight[:, taps - 1 - back] * rows[t - back] for back in range(min(taps, t + 1))]
            row = torch.stack(terms).sum(0) + p.get(f"{name}_conv.bias", torch.zeros_like(row))
        found.append(row / (1 + torch.exp(-row)))
    return found


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""
    values, keys = x.shape[1] // heads, len(p["q.weight"]) // heads

    def affine(name: str, vector: Tensor) -> Tensor:
        result = p[f"{name}.weight"] @ vector
        return result + p[f"{name}.bias"] if f"{name}.bias" in p else result

    q, k, v = (convolved([affine(name, token) for token in x], p, name) for name in "qkv")
    states = [torch.zeros(keys, values, dtype=x.dtype) for _ in range(heads)]
    rows = []
    for t, token in enumerate(x):
        beta = options.beta_max / (1 + torch.exp(-affine("beta", token)))
        parts = []
        for h in range(heads):
            mine, carried = slice(h * keys, (h + 1) * keys), slice(h * values, (h + 1) * values)
            query, key = q[t][mine], k[t][mine]
            if options.qk_norm:
                query, key = (one / torch.sqrt((one**2).sum() + 1e-6) for one in (query, key))
            state = states[h]
            if options.decay == "head":
                step = torch.log1p(torch.exp(affine("decay", token)[h]))
                state = torch.exp(-torch.exp(p["rate"][h]) * step) * state
            elif options.decay == "channel":
                step = torch.log1p(torch.exp(affine("decay", p["decay_down.weight"] @ token)[mine]))
                state = torch.exp(-torch.exp(p["rate"][h]) * step).unsqueeze(1) * state
            removed = beta[h] * torch.outer(key, key @ state)
            states[h] = state - removed + beta[h] * torch.outer(key, v[t][carried])
            read = query @ states[h] / math.sqrt(keys)
            if options.output_norm:
                read = read / torch.sqrt((read**2).mean() + 1e-6) * p["gain"]
            parts.append(read)
        joined = torch.cat(parts)
        if options.output_gate != "none":
            gate = affine("gate", token)
            joined = joined * (gate if options.output_gate == "silu" else 1) / (1 + torch.exp(-gate))
        rows.append(affine("o", joined))
    return torch.stack(rows)
