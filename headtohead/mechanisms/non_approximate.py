"""One score per key and no query in it: the query only says where the prefix ends.

    s_j = SiLU(q_j) . k_j / sqrt(d)        a_ij = e^(s_j) / sum_(m <= i) e^(s_m)

Non-approximate of Xue, Moosavi, Aletras, "Deconstructing Attention", arXiv 2510.11602. It is a scan over (largest score
so far, sum of weights, sum of values), finite at any score, and decoding keeps these alone. q_j and k_j would turn
alike, so rotary positions change nothing and are left out. With a zero query it is `prefix_mean`.

Arms: even(non_approximate)

Claims: The worst alone, 9,026 word perplexity on WikiText against 38.1, and fine in company, 39.4 with every second
layer standard (500M, 15B tokens); with normed q and k at 1.7B 67.3 alone against 27.6.

Watch: A hybrid must beat `even(prefix_mean)`, or its scores do nothing. Scores grow without bound when it stands alone
(`qk_norm=true` holds them); the published rescue by norms came with another size and other data. One run per cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.kernels import prefix_softmax
from headtohead.kernels.attention.prefix import EMPTY
from headtohead.kernels.attention.softmax import per_query_head
from headtohead.mechanisms.contract.base import Cache, Entry, Flops, Frame, Mode
from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.families.deconstructed import Deconstructed, DeconstructedOptions


@dataclass(frozen=True)
class NonApproximateOptions(DeconstructedOptions):
    """Options of scores without a query."""

    silu: str = option("q", "what goes through SiLU before the score", choices=("q", "none"))


class NonApproximate(Deconstructed):
    """Softmax over the prefix with one score per key."""

    name: ClassVar[str] = "non_approximate"
    Options: ClassVar[type] = NonApproximateOptions

    def position(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Return them as they are: the same turn of q_j and k_j leaves their product."""
        return q, k, v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values (batch, heads, time, dim)."""
        scores, v = self._scores(q, k, frame), per_query_head(v, q)
        if not frame.causal:
            return (torch.softmax(scores, -1).to(v.dtype).unsqueeze(-2) @ v).expand_as(v)
        state = None
        if cache is not None and frame.start > 0:
            state = cache.tensors["peak"], cache.tensors["total"]
        mixed, state = prefix_softmax(scores, v, state)
        if cache is not None:
            for name, part in zip(("peak", "total"), state, strict=True):
                cache.tensors[name].copy_(part)
        return mixed

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the map (batch, heads, time, time)."""
        q, k, _ = self.project(x, None)
        scores = self._scores(*self.evolve(q, k, frame), frame).unsqueeze(-2)
        return torch.softmax(scores.masked_fill(~frame.mask(x.device), float("-inf")), -1)

    def _scores(self, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        """Return (batch, heads, time), in float32 at least."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        q = F.silu(q.to(dtype)) if self.options.silu == "q" else q.to(dtype)
        scores = (q * per_query_head(k, q).to(dtype)).sum(-1) * self.dim**-0.5
        if frame.padding is not None:
            scores = scores.masked_fill(~frame.padding[:, None, frame.start :], EMPTY)
        return scores

    def cache_spec(self) -> tuple[Entry, ...]:
        """Sums of values and of weights, and the largest score so far; the same however many tokens came before."""
        return (
            Entry("total", (self.heads, self.dim + 1), "sequence", least=torch.float32),
            Entry("peak", (self.heads,), "sequence", least=torch.float32),
        )

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return the projections: scores and sums are pointwise."""
        linear = self.projection_flops(mode) + sum(stage.flops() for _, stage in self._stages())
        return Flops(linear, linear)
