"""Queries and keys from fixed random vectors, the companion, which passes through the same blocks: softmax of dot products,
with an attention map that does not depend on the input.

    X starts as eps ~ N(0, sigma^2 I)        q, k = W_q norm(X), W_k norm(X)        v = W_v x
    o_i = W_o sum_j softmax_j(q_i . k_j / sqrt(d)) v_j

RndEmbQK of Xue, Moosavi, Aletras, "Deconstructing Attention", arXiv 2510.11602. The noise is drawn from the run's seed and
saved with the weights. `per_layer=true` gives each layer its own noise and runs no companion.

Arms: rnd_emb_qk:per_layer=true even(rnd_emb_qk)

Claims: Used in every layer, 84.8 word perplexity on WikiText against 38.1, and 1.3 % accuracy on the last words of LAMBADA
against 22.9; with every second layer standard, 39.3 and 22.0 % (500M, 15B tokens); at 1.7B the hybrid has 28.0 against 27.6.

Watch: It can only learn to attend by position: race it with `prefix_mean`. The companion adds one sequence to the cost of a
batch, and longer inputs are rejected. A bidirectional model runs the whole companion, however short the input. `sigma` is
not published; ours is the usual initial standard deviation of an embedding. One run per cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Companion, CompanionSpec, Draw, Frame, Shape
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.families.companion import Accompanied, AccompaniedOptions


@dataclass(frozen=True)
class RndEmbQKOptions(AccompaniedOptions):
    """Options of queries and keys from noise."""

    sigma: float = option(0.02, "standard deviation of the noise", low=0.0)
    per_layer: bool = option(
        False, "separate noise for each layer, normalized and projected there, instead of one companion"
    )

    def validate(self) -> None:
        """Raise if options would have no effect."""
        if self.sigma == 0:
            raise UserError("sigma=0 would make every query and key equal; use sigma > 0")
        if self.per_layer and self.detach:
            raise UserError("detach stops gradients at the companion; per_layer=true has no companion")

    @classmethod
    def examples(cls) -> list[Options]:
        """Return the shared examples, and larger noise in each layer."""
        return [*super().examples(), cls(sigma=0.5, per_layer=True, kv_heads=2)]


class RndEmbQK(Accompanied):
    """Softmax attention with the queries and keys of random vectors that pass through the same blocks."""

    name: ClassVar[str] = "rnd_emb_qk"
    Options: ClassVar[type] = RndEmbQKOptions
    noise: Tensor

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        if options.per_layer:
            self.register_buffer("noise", torch.zeros(self.length, shape.width))

    def initialise(self, draw: Draw) -> None:
        """Set initial values, and draw this layer's noise if it has its own."""
        super().initialise(draw)
        if self.options.per_layer:
            self.noise.copy_(draw("noise", self.noise.shape, self.options.sigma))

    def companion_spec(self) -> CompanionSpec | None:
        """Noise for the companion, unless each layer has its own."""
        if self.options.per_layer:
            return None
        return CompanionSpec(self.length, "noise", sigma=self.options.sigma)

    def companion(self, frame: Frame) -> Companion:
        """Return the companion at this layer, or the layer's own noise."""
        if not self.options.per_layer:
            return super().companion(frame)
        assert frame.norm is not None
        return Companion(frame.norm(self.noise).unsqueeze(0))
