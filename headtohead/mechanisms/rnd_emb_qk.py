"""Queries and keys from noise drawn once, the companion, which passes the same blocks: softmax of dot products, and a map
that no input changes.

    X starts as eps ~ N(0, sigma^2 I)        q, k = W_q norm(X), W_k norm(X)        v = W_v x
    o_i = W_o sum_j softmax_j(q_i . k_j / sqrt(d)) v_j

RndEmbQK of Xue, Moosavi, Aletras, "Deconstructing Attention", arXiv 2510.11602. The noise comes from the run's seed and
is saved with the weights. `per_layer=true` gives each layer noise of its own and runs no companion.

Arms: rnd_emb_qk:per_layer=true even(rnd_emb_qk)

Claims: Alone 84.8 word perplexity on WikiText against 38.1, last words of LAMBADA 1.3 % right against 22.9; every
second layer standard, 39.3 and 22.0 % (500M, 15B tokens); at 1.7B the hybrid has 28.0 against 27.6.

Watch: What it learns is where to look by position alone: race it beside `prefix_mean`. The companion costs a batch one
sequence more, and inputs longer than it are refused. A bidirectional model runs the whole companion, however short the
input. `sigma` is not published; ours is the usual start of an embedding. One run per cell.
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
        False, "noise of its own for each layer, normed and projected there, in place of one companion"
    )

    def validate(self) -> None:
        """Refuse what would do nothing."""
        if self.sigma == 0:
            raise UserError("sigma=0 leaves no noise: every query and key would be the same")
        if self.per_layer and self.detach:
            raise UserError(
                "detach stops gradients through the blocks a companion passes; per_layer passes none"
            )

    @classmethod
    def examples(cls) -> list[Options]:
        """The common ones, and louder noise in each layer."""
        return [*super().examples(), cls(sigma=0.5, per_layer=True, kv_heads=2)]


class RndEmbQK(Accompanied):
    """Softmax attention with the queries and keys of random vectors that pass the same blocks."""

    name: ClassVar[str] = "rnd_emb_qk"
    Options: ClassVar[type] = RndEmbQKOptions
    noise: Tensor

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        if options.per_layer:
            self.register_buffer("noise", torch.zeros(self.length, shape.width))

    def initialise(self, draw: Draw) -> None:
        """Set start values, and draw this layer's noise where it has its own."""
        super().initialise(draw)
        if self.options.per_layer:
            self.noise.copy_(draw("noise", self.noise.shape, self.options.sigma))

    def companion_spec(self) -> CompanionSpec | None:
        """Noise beside the data, unless each layer has its own."""
        if self.options.per_layer:
            return None
        return CompanionSpec(self.length, "noise", sigma=self.options.sigma)

    def companion(self, frame: Frame) -> Companion:
        """Return the companion at this layer; a layer's own noise stands in its place."""
        if not self.options.per_layer:
            return super().companion(frame)
        assert frame.norm is not None
        return Companion(frame.norm(self.noise).unsqueeze(0))
