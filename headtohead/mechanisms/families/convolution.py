"""Short causal convolutions over time, each channel on its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.mechanisms.contract.base import Frame
from headtohead.mechanisms.contract.cache import Cache, Entry


def convolve(h: Tensor, weight: Tensor, cache: Cache | None = None, entry: str = "") -> Tensor:
    """Return sum_i weight_i * h_(t-i) (batch, time, channels) from h of that shape and weight (taps, channels).

    Everything before the first token is zero; with a cache, its entry has the last inputs before h.
    """
    before, time = weight.shape[0] - 1, h.shape[1]
    longer = F.pad(h, (0, 0, before, 0)) if cache is None else _after_recent(entry, h, cache)
    weight = weight.to(h.dtype)
    mixed = weight[before] * longer[:, :time]
    for i in range(before - 1, -1, -1):
        mixed = mixed + weight[i] * longer[:, before - i : before - i + time]
    return mixed


def recent_inputs(name: str, taps: int, channels: int) -> Entry:
    """Return the cache entry of a convolution, a ring of its last inputs."""
    return Entry(name, (taps, channels), "sequence")


def without_padding(h: Tensor, frame: Frame) -> Tensor:
    """Return h (batch, time, channels) with zeros at padding tokens."""
    return h if frame.padding is None else h * frame.padding[:, frame.start :, None]


def _after_recent(name: str, h: Tensor, cache: Cache) -> Tensor:
    """Return the taps - 1 inputs before h (batch, time, channels), then h, whose last rows replace older ones.

    The entry (batch, taps, channels) is a ring: position p is in row p modulo taps, so that a step that is run again at
    the same position changes nothing. Rows of positions before the first token were never written and are zero.
    """
    ring, time = cache.tensors[name], h.shape[1]
    taps = ring.shape[1]
    start = cache.length if cache.place is None else cache.place
    earlier = (torch.arange(1 - taps, 0, device=h.device) + start) % taps
    longer = torch.cat((ring.index_select(1, earlier).to(h.dtype), h), 1)
    kept = min(time, taps)
    rows = (torch.arange(time - kept, time, device=h.device) + start) % taps
    ring.index_copy_(1, rows, h[:, time - kept :].to(ring.dtype))
    return longer
