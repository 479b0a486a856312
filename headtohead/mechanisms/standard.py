"""Standard attention: multi-head, grouped-query and multi-query, optionally windowed or with normed q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headtohead.kernels import rms_norm
from headtohead.mechanisms.base import Cache, Frame, Shape
from headtohead.mechanisms.options import Options, option
from headtohead.mechanisms.projected import Projected, joined_linear


@dataclass(frozen=True)
class StandardOptions(Options):
    """Options of standard attention."""

    kv_heads: int = option(
        0, "key/value heads shared by the query heads; 0: as many as the model says", low=0
    )
    window: int = option(0, "how many keys back a query sees, itself included; 0: all", low=0)
    qk_norm: bool = option(False, "norm queries and keys per head, with a learned gain, before positions")

    @classmethod
    def examples(cls) -> list[Options]:
        """Each option at work, and all together."""
        return [
            cls(),
            cls(kv_heads=2),
            cls(kv_heads=1),
            cls(window=3),
            cls(qk_norm=True),
            cls(kv_heads=1, window=5, qk_norm=True),
        ]


class Standard(Projected):
    """Softmax attention with separate query, key, value and output projections."""

    name: ClassVar[str] = "standard"

    Options: ClassVar[type] = StandardOptions

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
        q, k, v = joined_linear(x, [self.q, self.k, self.v])
        return (
            self.split_heads(q, self.heads),
            self.split_heads(k, self.kv_heads),
            self.split_heads(v, self.kv_heads),
        )

    def evolve(self, q: Tensor, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        """Return q and k after the stages, normed where asked."""
        q, k = super().evolve(q, k, frame)
        if self.options.qk_norm:
            eps = self.shape.norm_eps
            q, k = rms_norm(q, self.q_gain, eps), rms_norm(k, self.k_gain, eps)
        return q, k

    def circuit_tags(self) -> dict[str, str]:
        """The gains set the scores: qk."""
        return super().circuit_tags() | {"q_gain": "qk", "k_gain": "qk"}

    @classmethod
    def label(cls, options: Any) -> str:
        """Return `standard`, or the usual name of its grouped forms."""
        if options.kv_heads and not options.window and not options.qk_norm:
            return "MQA" if options.kv_heads == 1 else f"GQA-{options.kv_heads}"
        return super().label(options)
