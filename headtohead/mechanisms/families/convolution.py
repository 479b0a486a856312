"""Short causal convolutions over time, each channel on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from headtohead.kernels import short_convolution, short_convolution_plain
from headtohead.mechanisms.contract.base import Frame
from headtohead.mechanisms.contract.cache import Cache, Entry


def convolve(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: bool = False,
    silu: bool = False,
    cache: Cache | None = None,
    entry: str = "",
) -> Tensor:
    """Return `short_convolution` of h (batch, time, channels); with a cache, its entry has the last inputs before h."""
    if cache is None:
        return short_convolution(h, weight, bias, residual=residual, silu=silu)
    earlier = _exchange_recent(entry, h, cache)
    return short_convolution_plain(h, weight, bias, residual=residual, silu=silu, earlier=earlier)


def recent_inputs(name: str, taps: int, channels: int) -> Entry:
    """Return the cache entry of a convolution, a ring of its last inputs."""
    return Entry(name, (taps, channels), "sequence")


def without_padding(h: Tensor, frame: Frame) -> Tensor:
    """Return h (batch, time, channels) with zeros at padding tokens."""
    return h if frame.padding is None else h * frame.padding[:, frame.start :, None]


def _exchange_recent(name: str, h: Tensor, cache: Cache) -> Tensor:
    """Return the taps - 1 inputs before h (batch, time, channels), and keep the last rows of h in place of older ones.

    The entry (batch, taps, channels) is a ring: position p is in row p modulo taps, so that a step that is run again at
    the same position changes nothing. Rows of positions before the first token were never written and are zero.
    """
    ring, time = cache.tensors[name], h.shape[1]
    taps = ring.shape[1]
    start = cache.length if cache.place is None else cache.place
    earlier = (torch.arange(1 - taps, 0, device=h.device) + start) % taps
    recent = ring.index_select(1, earlier).to(h.dtype)
    kept = min(time, taps)
    rows = (torch.arange(time - kept, time, device=h.device) + start) % taps
    ring.index_copy_(1, rows, h[:, time - kept :].to(ring.dtype))
    return recent
