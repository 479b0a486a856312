"""Softmax over the prefix with one score per key: o_i = sum_{j <= i} e^{s_j} v_j / sum_{j <= i} e^{s_j}."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.kernels.path import is_plain, no_autocast

State = tuple[Tensor, Tensor]
"""The maximum score so far (batch, heads), and the sums of values and of weights relative to it (batch, heads, dim + 1)."""
# The score of masked keys, such as padding: finite, so that a fully masked prefix does not give 0/0.
EMPTY = -1e30


def prefix_softmax(scores: Tensor, v: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    """Return the output (batch, heads, time, dim) for v with scores (batch, heads, time), and the state after it.

    Sums are relative to the maximum score, so that any scores stay finite; they run in float32 or wider.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    with no_autocast(v):
        scores, values = scores.to(dtype), F.pad(v.to(dtype), (0, 1), value=1.0)
        if state is None:
            nothing = values.new_zeros(*values.shape[:2], v.shape[-1] + 1)
            state = scores.new_full(scores.shape[:2], EMPTY), nothing
        peak, total = (part.to(dtype) for part in state)
        form = prefix_softmax_plain if is_plain() else _two_levels
        sums, state = form(scores, values, peak, total)
        return (sums[..., :-1] / sums[..., -1:]).to(v.dtype), state


def prefix_softmax_plain(scores: Tensor, values: Tensor, peak: Tensor, total: Tensor) -> tuple[Tensor, State]:
    """Plain reference, token by token: when the maximum score rises, the sums shrink by e^(old - new)."""
    rows = []
    for place in range(scores.shape[-1]):
        score = scores[..., place]
        highest = torch.maximum(peak, score)
        total = total * (peak - highest).exp().unsqueeze(-1)
        total = total + (score - highest).exp().unsqueeze(-1) * values[..., place, :]
        peak = highest
        rows.append(total)
    return torch.stack(rows, -2), (peak, total)


def _two_levels(scores: Tensor, values: Tensor, peak: Tensor, total: Tensor) -> tuple[Tensor, State]:
    """Return the same from chunks of about sqrt(time): a small map within each, another over the chunks before it.

    Every exponent is a score minus the maximum so far, at most 0, and no row depends on later scores. The maxima cancel
    in the quotient, so no gradient flows through them.
    """
    time = scores.shape[-1]
    chunk = 2 ** (((time - 1).bit_length() + 1) // 2)
    rest = -time % chunk
    peaks = torch.maximum(scores.detach().cummax(-1).values, peak.detach().unsqueeze(-1))
    peaks = torch.cat((peaks, peaks[..., -1:].expand(*peaks.shape[:-1], rest)), -1).unflatten(-1, (-1, chunk))
    scores = F.pad(scores, (0, rest), value=EMPTY).unflatten(-1, (-1, chunk))
    values = F.pad(values, (0, 0, 0, rest)).unflatten(-2, (-1, chunk))
    inside = _shrink(scores, peaks) @ values
    # Before each chunk: the state, then the ends of the earlier chunks, each relative to its own maximum.
    ends = torch.cat((total.unsqueeze(-2), inside[..., :-1, -1, :]), -2)
    heights = torch.cat((peak.unsqueeze(-1), peaks[..., :-1, -1]), -1)
    before = _shrink(heights, heights.detach()) @ ends
    carried = (heights.unsqueeze(-1) - peaks).exp().unsqueeze(-1) * before.unsqueeze(-2)
    sums = (inside + carried).flatten(-3, -2)[..., :time, :]
    return sums, (peaks.flatten(-2)[..., time - 1], sums[..., -1, :])


def _shrink(scores: Tensor, peaks: Tensor) -> Tensor:
    """Return e^(s_j - m_i) for j <= i and 0 elsewhere, (..., rows, columns)."""
    size = scores.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
    return (scores.unsqueeze(-2) - peaks.unsqueeze(-1)).masked_fill(later, float("-inf")).exp()
