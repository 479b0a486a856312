"""The mean of all values so far, without queries and keys: a control for mechanisms with weights.

    a_ij = 1/i        o_i = W_o (1/i) sum_(j <= i) W_v x_j

It equals `non_approximate` with a zero query.

Arms: even(prefix_mean)

Claims: None; the paper on substitutes for attention (arXiv 2510.11602) lacks this control.

Watch: Half of standard's attention parameters: use `shape = params`. If the hybrid of a substitute does not beat
`even(prefix_mean)`, its weights have no effect.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headtohead.mechanisms.contract.base import Flops, Frame, Mechanism, Mode, Shape
from headtohead.mechanisms.contract.cache import Cache, Entry


class PrefixMean(Mechanism):
    """Every token gets the mean of the values so far, its own included."""

    name: ClassVar[str] = "prefix_mean"

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        self.v = nn.Linear(shape.width, shape.width, bias=shape.bias != "none")
        self.o = nn.Linear(shape.width, shape.width, bias=shape.bias == "all")

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the output of this layer for x (batch, time, width)."""
        v = self.v(x)
        values = v.to(torch.promote_types(v.dtype, torch.float32))
        if frame.padding is None:
            count = torch.arange(frame.start + 1, frame.start + frame.time + 1, device=x.device)
        else:
            values = values * frame.padding[:, frame.start :, None]
            count = frame.padding.cumsum(-1)[:, frame.start :].clamp_min(1)
        sums = values.cumsum(1)
        if cache is not None:
            sums = sums + cache.tensors["total"].unsqueeze(1)
            cache.tensors["total"].copy_(sums[:, -1])
        if not frame.causal:
            sums, count = sums[:, -1:], count[..., -1:]
        mean = (sums / count.unsqueeze(-1)).to(v.dtype)
        output: Tensor = self.o(mean.expand_as(v))
        return output

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the map (batch, heads, time, time)."""
        mask = frame.mask(x.device).to(x.dtype).expand(len(x), self.shape.heads, -1, -1)
        return mask / mask.sum(-1, keepdim=True)

    def cache_spec(self) -> tuple[Entry, ...]:
        """The sum of the values so far."""
        return (Entry("total", (self.shape.width,), "sequence", least=torch.float32),)

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return the projections: the mean is pointwise."""
        linear = 2.0 * 2 * self.shape.width**2
        return Flops(linear, linear)
