"""The mean of all values so far: a_ij = 1/i, no queries and no keys; a control for mechanisms with weights.

`non_approximate` with a zero query is this.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.mechanisms.base import Cache, Entry, Flops, Frame, Mode, Shape
from headtohead.mechanisms.options import Options
from headtohead.mechanisms.projected import Projected, Stage


class PrefixMean(Projected):
    """Every token takes the mean of the values so far, its own included."""

    name: ClassVar[str] = "prefix_mean"
    Options: ClassVar[type] = Options

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options, kv_heads=shape.heads)
        self.v = self.linear(shape.width, shape.width)
        self.o = self.linear(shape.width, shape.width, output=True)

    def add_stage(self, stage: Stage) -> None:
        """Refuse: there are no queries and keys to change."""
        raise UserError(f"prefix_mean has no queries and keys; {stage.name} cannot stand in it")

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return what this layer writes for x (batch, time, width)."""
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
        mask = frame.mask(x.device).to(x.dtype).expand(len(x), self.heads, -1, -1)
        return mask / mask.sum(-1, keepdim=True)

    def cache_spec(self) -> tuple[Entry, ...]:
        """The sum of the values so far."""
        return (Entry("total", (self.shape.width,), "sequence", wide=True),)

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return the projections: the mean is pointwise."""
        linear = self.projection_flops(mode)
        return Flops(linear, linear)
