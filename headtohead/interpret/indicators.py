"""Indicators of an attention map: entropy, concentration, head diversity, sink, local focus.

Section 2.7 of Xue et al., arXiv 2510.11602: per layer, mean over heads and sequences, natural logarithm.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOCAL = 4  # sub-diagonals 0 to 3


@torch.no_grad()
def indicators(weights: Tensor, signed: bool = False) -> dict[str, float]:
    """Return the indicators of one layer's maps (batch, heads, time, time).

    A signed map is replaced by its absolute values, renormalized by row; callers should mark the numbers.
    """
    weights = weights.double()
    if signed:
        weights = weights.abs()
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    time = weights.shape[-1]
    pairs = time * (time + 1) / 2
    found = {
        "entropy": -torch.special.xlogy(weights, weights).sum((-2, -1)).mean(),
        "concentration": weights.square().sum((-2, -1)).sqrt().mean(),
        "head_diversity": (weights.std(1, correction=0).tril().sum((-2, -1)) / pairs).mean(),
        "sink": weights[..., 0].mean(),
    }
    found |= {
        f"local_{offset}": weights.diagonal(-offset, -2, -1).mean() for offset in range(min(LOCAL, time))
    }
    return {name: float(value) for name, value in found.items()}
