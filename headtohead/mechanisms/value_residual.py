"""Softmax attention over values mixed with those of the first layer: what a token says at the bottom stays available in every
layer, next to the residual stream.

    v'_l = lambda_1 v_1 + lambda_2 v_l        o_i = W_o [ sum_(j <= i) softmax_j(q_i . k_j / sqrt(d)) v'_l,j ]_heads

v_l is the value projection of layer l, v_1 that of the first layer; the first layer itself is standard. Zhou et al., "Value
Residual Learning" (ResFormer), arXiv 2410.17897. `mix=learned` trains both numbers of each layer, from 1/2 on; `mix=fixed`
keeps them at 1/2.

Arms: value_residual:mix=fixed value_residual:kv_heads=2

Claims: The loss of a transformer with 16.1 % fewer parameters or 20.3 % less training data (version 5; version 4 has 13.3 %
and 15.4 %), at about the same memory and cost.

Watch: FLOPs and cache are standard's: the cache holds the mixed values. In a hybrid, "first" is the first layer that is
`value_residual`, with as many value heads: in `(standard value_residual)*3` it is layer 2, which then mixes its values with
themselves. A model with one such layer has no residual. The paper's SVFormer, in which all layers use v_1 alone, is not
included: its layers would share one cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headtohead.mechanisms.contract.base import Circuit, Frame, Shape
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.families.variant import Variant, VariantOptions


@dataclass(frozen=True)
class ValueResidualOptions(VariantOptions):
    """Options of value residuals."""

    cases: ClassVar[str] = "mix=fixed kv_heads=2,window=3 mix=fixed,kv_heads=1,qk_norm=true"

    mix: str = option(
        "learned", "shares of the two values: learned in each layer, or 1/2", choices=("learned", "fixed")
    )


class ValueResidual(Variant):
    """Softmax attention over the mean of the layer's own values and those of the first layer."""

    name: ClassVar[str] = "value_residual"
    Options: ClassVar[type] = ValueResidualOptions
    tags: ClassVar = {**Variant.tags, "shares": Circuit("own", follows="ov")}

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        if options.mix == "learned" and shape.layer > 0:
            self.shares = nn.Parameter(torch.full((2,), 0.5))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values (batch, heads, time, dim)."""
        return super().mix(q, k, self._residual(v, frame), frame, cache)

    def _residual(self, v: Tensor, frame: Frame) -> Tensor:
        """Return lambda_1 v_1 + lambda_2 v for the new tokens (batch, kv_heads, time, dim)."""
        first = frame.first(f"{self.name}/{self.kv_heads}", v)
        if self.shape.layer == 0:
            return v
        if self.options.mix == "fixed":
            return 0.5 * (first + v)
        shares = self.shares.to(v.dtype)
        return shares[0] * first + shares[1] * v

    @property
    def graph_safe(self) -> bool:
        """True with every option: the mix is pointwise in time."""
        return type(self) is ValueResidual and self.graph_safe_stages()
