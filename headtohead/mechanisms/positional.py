"""Positions in the score: T5's relative buckets, ALiBi's slopes, and the 2D term of (X)+.

T5: Raffel et al., arXiv 1910.10683. ALiBi: Press et al., arXiv 2108.12409. The 2D term: Kayyam, Madan Gopal, Lewis,
arXiv 2606.04032.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.mechanisms.contract.base import Draw, Frame

T5_BUCKETS = 32
T5_FAR = 128  # all distances from here on share the last bucket


def distances(frame: Frame, device: torch.device) -> Tensor:
    """Return i - j of every query and key, (time, keys), or (batch, time, keys) if padding shifts positions."""
    return frame.positions(device).unsqueeze(-1) - frame.positions(device, keys=True).unsqueeze(-2)


def t5_bias(table: Tensor, frame: Frame) -> Tensor:
    """Return the learned bias (heads, time, keys), with a leading batch if padded, from a table (buckets, heads)."""
    buckets = t5_buckets(distances(frame, table.device), frame.causal)
    return F.embedding(buckets, table).movedim(-1, -3)


def t5_buckets(distance: Tensor, causal: bool) -> Tensor:
    """Return the bucket of each distance i - j: small distances have their own, large ones share by the logarithm.

    Without a causal mask, half of the buckets are for later keys.
    """
    count = T5_BUCKETS if causal else T5_BUCKETS // 2
    ahead = torch.zeros_like(distance) if causal else (distance < 0) * count
    distance = distance.clamp_min(0) if causal else distance.abs()
    near = count // 2
    spread = torch.log(distance.clamp_min(near).double() / near) / math.log(T5_FAR / near)
    far = near + (spread * (count - near)).long()
    return ahead + torch.where(distance < near, distance, far.clamp_max(count - 1))


def alibi_bias(heads: int, frame: Frame, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return -2^(-8 h / heads) |i - j| for heads h = 1, 2, ..., (heads, time, keys), with a leading batch if padded."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device, dtype=dtype) / heads)
    return -slopes[:, None, None] * distances(frame, device).abs().unsqueeze(-3).to(dtype)


class Term2d(nn.Module):
    """The 2D term of (X)+: scores S become sum_c w_c (S + P_c) + b, P_c sines and cosines of both indices.

    Terms of the query alone cancel in the softmax, which leaves S times sum(w) plus a bias by the key's index.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.rows, _ = channels_2d(channels)
        self.weights = nn.Parameter(torch.zeros(channels))
        self.offset = nn.Parameter(torch.zeros(1))

    @torch.no_grad()
    def initialise(self, draw: Draw, identity: bool) -> None:
        """Initialize as a term without effect, or with Xavier uniform weights."""
        self.offset.zero_()
        if identity:
            # Sum 1 over the query's channels, which cancel, and 0 over the key's.
            self.weights.zero_()[: self.rows] = 1 / self.rows
        else:
            count = len(self.weights)
            normal = draw("pos2d.weights", (count,), 1.0)
            self.weights.copy_(torch.erf(normal / math.sqrt(2)) * math.sqrt(6 / (count + 1)))

    def forward(self, q: Tensor, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor, float]:
        """Return q, k and the scale of their scores; an extra coordinate, 1 in q, carries the bias in k."""
        positions = frame.positions(q.device, keys=True)
        channels = key_channels(positions, len(self.weights), self.weights.dtype)
        by_key = ((channels * self.weights[self.rows :]).sum(-1) + self.offset).to(k.dtype)
        column = by_key.unsqueeze(-1) if by_key.ndim == 1 else by_key[:, None, :, None]
        scaled = q * (self.weights.sum() * q.shape[-1] ** -0.5)
        q = torch.cat((scaled, torch.ones_like(q[..., :1])), -1)
        return q, torch.cat((k, column.expand(*k.shape[:-1], 1)), -1), 1.0


def channels_2d(count: int) -> tuple[int, int]:
    """Return how many of the 2D term's channels encode the query's index, and how many the key's."""
    rows = min(count, 2 * math.ceil(count / 4))
    return rows, count - rows


def key_channels(positions: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return (..., channels): the 2D term's sines and cosines of the key's index, cut to the channels `count` leaves."""
    rows, columns = channels_2d(count)
    rates = 10_000.0 ** (-torch.arange(0, rows, 2, dtype=torch.float64, device=positions.device) / rows)
    angles = positions.double().unsqueeze(-1) * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., :columns].to(dtype)
