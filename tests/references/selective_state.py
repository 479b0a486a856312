"""The state space layer of Mamba-2 token by token, with states of (values, keys) as the paper writes them.

S <- exp(-dt A) S + dt v k^T; o = S q + D v; y = norm(o * silu(gate)) over the whole width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.references.gated_delta import convolved


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""
    values, groups = x.shape[1] // heads, options.groups or heads
    keys = len(p["q.weight"]) // groups

    def affine(name: str, vector: Tensor) -> Tensor:
        result = p[f"{name}.weight"] @ vector
        return result + p[f"{name}.bias"] if f"{name}.bias" in p else result

    q, k, v = (convolved([affine(name, token) for token in x], p, name) for name in "qkv")
    states = [torch.zeros(values, keys, dtype=x.dtype) for _ in range(heads)]
    rows = []
    for t, token in enumerate(x):
        steps = torch.log1p(torch.exp(affine("step", token)))
        parts = []
        for h in range(heads):
            group = h * groups // heads
            shared, carried = slice(group * keys, (group + 1) * keys), slice(h * values, (h + 1) * values)
            kept = torch.exp(-steps[h] * torch.exp(p["rate"][h]))
            states[h] = kept * states[h] + steps[h] * torch.outer(v[t][carried], k[t][shared])
            read = states[h] @ q[t][shared]
            parts.append(read + p["skip"][h] * v[t][carried] if options.skip else read)
        joined = torch.cat(parts)
        if options.output_gate:
            gate = affine("gate", token)
            joined = joined * gate / (1 + torch.exp(-gate))
        if options.output_norm:
            joined = joined / torch.sqrt((joined**2).mean() + 1e-6) * p["gain"]
        rows.append(affine("o", joined))
    return torch.stack(rows)
