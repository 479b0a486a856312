"""Softmax attention without the direction of the token's own value: what a layer adds about a token must come from others,
since the residual stream already carries the token itself.

    y_i = sum_(j <= i) softmax_j(q_i . k_j / sqrt(d)) v_j        z_i = y_i - (y_i . v_i) v_i / |v_i|²        o_i = W_o [ z_i ]_heads

Zhai, "Exclusive Self Attention", arXiv 2603.09078. In each head z_i is orthogonal to v_i; with grouped keys every query head
uses the value of its group.

Arms: exclusive:kv_heads=2

Claims: In standard attention y_i and v_i are strikingly similar. At 0.7B, 1.4B and 2.7B (100B tokens of FineWeb, context
2048) the exclusive form has a lower loss and better downstream results, +1.4 points on average at 2.7B, and gains more at
longer contexts, up to 16K.

Watch: Parameters, FLOPs and cache are standard's. The first token attends only to itself, so its output is zero. The
attention map is the one before the projection: its diagonal has no effect on the output. Where values of several tokens are
parallel, all of them vanish.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.kernels.attention.softmax import per_query_head
from headtohead.mechanisms.contract.base import Frame
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.families.variant import Variant, VariantOptions


@dataclass(frozen=True)
class ExclusiveOptions(VariantOptions):
    """Options of exclusive attention: those of standard attention."""

    cases: ClassVar[str] = "kv_heads=2 window=3 kv_heads=1,window=5,qk_norm=true"


class Exclusive(Variant):
    """Softmax attention whose result is orthogonal to the token's own value."""

    name: ClassVar[str] = "exclusive"
    Options: ClassVar[type] = ExclusiveOptions

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values (batch, heads, time, dim) without their part along the token's value."""
        return without_direction(super().mix(q, k, v, frame, cache), per_query_head(v, q))

    @property
    def graph_safe(self) -> bool:
        """True with every option: the projection is pointwise in time."""
        return type(self) is Exclusive and self.graph_safe_stages()


def without_direction(y: Tensor, v: Tensor) -> Tensor:
    """Return y minus its projection on v, both (..., dim); y itself where v is zero."""
    # y is often nearly parallel to v: the difference needs more digits than bf16 has.
    wide = torch.promote_types(y.dtype, torch.float32)
    y, v, narrow = y.to(wide), v.to(wide), y.dtype
    unit = F.normalize(v, dim=-1)
    # v has no other part, so subtracting it first changes nothing but rounding: where y = v the result is exactly 0.
    rest = y - v
    return (rest - (rest * unit).sum(-1, keepdim=True) * unit).to(narrow)
