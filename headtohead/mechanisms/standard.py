"""Softmax attention: each token compares its query with the keys of all tokens so far and returns the weighted mean of their
values. Multi-head, grouped-query and multi-query, optionally windowed or with normalized q and k.

    q, k, v = W_q x, W_k x, W_v x in heads        o_i = W_o [ sum_(j <= i) softmax_j(q_i . k_j / sqrt(d)) v_j ]_heads

Vaswani et al., arXiv 1706.03762; `kv_heads=1` is multi-query (Shazeer, arXiv 1911.02150), a value between 1 and the number
of heads grouped-query attention (Ainslie et al., arXiv 2305.13245). Rotary positions rotate q and k if the model has them.

Arms: standard:kv_heads=2 standard:kv_heads=1

Claims: It is the baseline. For its grouped forms at 300M, arXiv 2606.04032 reports: a quarter of the key heads, +0.8 %
perplexity for 75 % less cache; one key head, +1.6 % for 93.8 % less (one seed).

Watch: An untuned baseline proves nothing: at one million parameters the learning rate changes its loss by more than most
mechanisms do (docs/log.md). `kv_heads` saves parameters as well as cache; `shape = params` compensates for them. `window`
limits the visible keys and the cache, a ring buffer of that many tokens; `shape = cache` compares bytes per token kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headtohead.kernels import rms_norm
from headtohead.mechanisms.contract.base import Frame, Shape
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.contract.projected import Projected, joined_linear


@dataclass(frozen=True)
class StandardOptions(Options):
    """Options of standard attention."""

    cases: ClassVar[str] = "kv_heads=2 kv_heads=1 window=3 qk_norm=true kv_heads=1,window=5,qk_norm=true"

    kv_heads: int = option(0, "key/value heads shared by the query heads; 0: the model's setting", low=0)
    window: int = option(0, "number of keys a query attends to, itself included; 0: all", low=0)
    qk_norm: bool = option(
        False, "normalize queries and keys per head, with a learned gain, before positions"
    )


class Standard(Projected):
    """Softmax attention with separate query, key, value and output projections."""

    name: ClassVar[str] = "standard"

    Options: ClassVar[type] = StandardOptions
    tags: ClassVar = {"q_gain": "qk", "k_gain": "qk"}

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options, kv_heads=options.kv_heads, window=options.window)
        width, narrow = shape.width, self.kv_heads * self.dim
        self.q = self.linear(width, width)
        self.k = self.linear(width, narrow)
        self.v = self.linear(width, narrow)
        self.o = self.linear(width, width, output=True)
        if options.qk_norm:
            self.q_gain = nn.Parameter(torch.ones(self.dim))
            self.k_gain = nn.Parameter(torch.ones(self.dim))

    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v in heads."""
        return self.in_heads(*joined_linear(x, [self.q, self.k, self.v]))

    def evolve(self, q: Tensor, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        """Return q and k after the stages, normalized if `qk_norm`."""
        q, k = super().evolve(q, k, frame)
        if self.options.qk_norm:
            eps = self.shape.norm_eps
            q, k = rms_norm(q, self.q_gain, eps), rms_norm(k, self.k_gain, eps)
        return q, k

    @property
    def graph_safe(self) -> bool:
        """True with every option."""
        return type(self) is Standard and self.graph_safe_stages()

    @classmethod
    def label(cls, options: Any) -> str:
        """Return `standard`, or the usual name of a grouped form."""
        if options.kv_heads and not options.window and not options.qk_norm:
            return "MQA" if options.kv_heads == 1 else f"GQA-{options.kv_heads}"
        return super().label(options)
