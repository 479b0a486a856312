"""Softmax with one score per key that does not depend on the query: the query only sets the end of the prefix.

    s_j = SiLU(q_j) . k_j / sqrt(d)        a_ij = e^(s_j) / sum_(m <= i) e^(s_m)

Non-approximate of Xue, Moosavi, Aletras, "Deconstructing Attention", arXiv 2510.11602. It is a scan over (maximum score so
far, sum of weights, sum of values), finite at any score, and the decoding cache holds only these. q_j and k_j would rotate
by the same angle, so rotary positions have no effect and are omitted. With a zero query it equals `prefix_mean`.

Arms: even(non_approximate)

Claims: Used in every layer it is the worst, with 9,026 word perplexity on WikiText against 38.1; with every second layer
standard it has 39.4 (500M, 15B tokens). With normalized q and k at 1.7B, 67.3 in every layer against 27.6. Summaries of the
paper also credit it with the lowest training loss. These perplexities are on held-out text and cannot show that, which is
why `deconstructed.15` compares training losses.

Watch: A hybrid must beat `even(prefix_mean)`; otherwise its scores have no effect. Used in every layer its scores grow
without bound (`qk_norm=true` limits them); the published fix by norms came with another size and other data. One run per
cell.
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
from headtohead.mechanisms.contract.base import Flops, Frame, Mode
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.families.deconstructed import Deconstructed, DeconstructedOptions


@dataclass(frozen=True)
class NonApproximateOptions(DeconstructedOptions):
    """Options of scores without a query."""

    silu: str = option("q", "what SiLU is applied to before the score", choices=("q", "none"))


class NonApproximate(Deconstructed):
    """Softmax over the prefix with one score per key."""

    name: ClassVar[str] = "non_approximate"
    Options: ClassVar[type] = NonApproximateOptions

    def position(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v unchanged: rotating q_j and k_j by the same angle does not change their product."""
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
        """Return (batch, heads, time), in float32 or wider."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        q = F.silu(q.to(dtype)) if self.options.silu == "q" else q.to(dtype)
        scores = (q * per_query_head(k, q).to(dtype)).sum(-1) * self.dim**-0.5
        if frame.padding is not None:
            scores = scores.masked_fill(~frame.padding[:, None, frame.start :], EMPTY)
        return scores

    def cache_spec(self) -> tuple[Entry, ...]:
        """Sums of values and of weights, and the maximum score so far; independent of the number of tokens."""
        return (
            Entry("total", (self.heads, self.dim + 1), "sequence", least=torch.float32),
            Entry("peak", (self.heads,), "sequence", least=torch.float32),
        )

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return the projections: scores and sums are pointwise."""
        linear = self.linear_flops(mode)
        return Flops(linear, linear)
