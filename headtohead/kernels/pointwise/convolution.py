"""Short causal convolutions over time, each channel on its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.kernels.path import triton_serves
from headtohead.kernels.pointwise.convolution_triton import MAX_TAPS, convolve_rows


def short_convolution(
    h: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: bool = False, silu: bool = False
) -> Tensor:
    """Return act(sum_i weight_i * h_(t-i) [+ bias] [+ h]) for h (batch, time, channels) and weight (taps, channels).

    Everything before the first token is zero; act is SiLU or nothing.
    """
    taps = weight.shape[0]
    if taps > MAX_TAPS or not triton_serves(h):
        return short_convolution_plain(h, weight, bias, residual=residual, silu=silu)
    rows = weight if bias is None else torch.cat((weight, bias.unsqueeze(0)))
    return convolve_rows(_narrowed(h).unsqueeze(0), rows.unsqueeze(0), taps, residual, silu).squeeze(0)


def short_convolution_plain(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: bool = False,
    silu: bool = False,
    earlier: Tensor | None = None,
) -> Tensor:
    """Plain reference in float32 or wider; `earlier` (batch, taps - 1, channels) has the inputs before h, None: zeros."""
    h = _narrowed(h)
    wide = torch.promote_types(h.dtype, torch.float32)
    before, time = weight.shape[0] - 1, h.shape[1]
    longer = (F.pad(h, (0, 0, before, 0)) if earlier is None else torch.cat((_narrowed(earlier), h), 1)).to(
        wide
    )
    weight = weight.to(wide)
    mixed = weight[before] * longer[:, :time]
    for i in range(before - 1, -1, -1):
        mixed = mixed + weight[i] * longer[:, before - i : before - i + time]
    if bias is not None:
        mixed = mixed + bias.to(wide)
    if residual:
        mixed = h.to(wide) + mixed
    return (F.silu(mixed) if silu else mixed).to(h.dtype)


def _narrowed(h: Tensor) -> Tensor:
    """Return h in the dtype of autocast, as PyTorch's own convolutions read it."""
    device = h.device.type
    return h.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else h
