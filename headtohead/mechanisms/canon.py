"""Softmax attention behind short causal convolutions: neighboring tokens exchange information directly, so that attention is
free for distant ones.

    C(h)_t = h_t + sum_(i = 0..K-1) w_i * h_(t-i), w_i a weight per channel, h before the first token zero
    at=A:  q, k, v = W_q C(x), W_k C(x), W_v C(x)        at=B:  q, k, v = C(W_q x), C(W_k x), C(W_v x)        at=AB: both
    o_i = W_o [ sum_(j <= i) softmax_j(q_i . k_j / sqrt(d)) v_j ]_heads

Allen-Zhu, "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon Layers", arXiv 2512.17351, with
K = 4, the residual h_t, no activation, and weights that start uniform in +-1/sqrt(K), as published. A is after the block's
norm, B before positions. The paper's positions C and D are in the feed-forward block, which is equal for all arms here.

Arms: canon:at=A canon:at=B

Claims: On synthetic tasks, two to four times the reasoning depth and 30 % more breadth; without positions as good as with
rotary ones; linear attention with these layers rivals Mamba2. On text at 1.3B and 100B tokens the gains are smaller and
noisy.

Watch: The paper's main results use all four positions, A to D. The convolutions add 4 D (A) and 12 D (B) parameters; their
multiplications, K per channel, are not matrix products and are not in the FLOPs. The cache also keeps the last K inputs of
each convolution, per sequence. They look back even in a bidirectional model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headtohead.mechanisms.contract.base import Draw, Frame, Shape
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.contract.projected import joined_linear, joined_outputs
from headtohead.mechanisms.families.convolution import convolve, recent_inputs, without_padding
from headtohead.mechanisms.families.variant import Variant, VariantOptions


@dataclass(frozen=True)
class CanonOptions(VariantOptions):
    """Options of canon layers."""

    cases: ClassVar[str] = "at=A at=B kernel=2 kernel=20 at=B,kernel=3,kv_heads=1,window=5,qk_norm=true"

    at: str = option("AB", "where: A before the projections, B after them, or both", choices=("AB", "A", "B"))
    kernel: int = option(4, "number of tokens in a convolution, the current one included", low=2, high=2**12)


class Canon(Variant):
    """Softmax attention with short convolutions over time before, after or around its projections."""

    name: ClassVar[str] = "canon"
    Options: ClassVar[type] = CanonOptions
    tags: ClassVar = {**Variant.tags, "canon_x": "both", "canon_q": "qk", "canon_k": "qk", "canon_v": "ov"}
    canon_x: Tensor
    canon_q: Tensor
    canon_k: Tensor
    canon_v: Tensor

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        narrow = self.kv_heads * self.dim
        widths = {"canon_x": shape.width} if "A" in options.at else {}
        widths |= {"canon_q": shape.width, "canon_k": narrow, "canon_v": narrow} if "B" in options.at else {}
        for name, width in widths.items():
            self.register_parameter(name, nn.Parameter(torch.empty(options.kernel, width)))

    def initialise(self, draw: Draw) -> None:
        """Set initial values; those of a convolution are uniform in +-1/sqrt(kernel)."""
        super().initialise(draw)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.startswith("canon_"):
                    uniform = torch.erf(draw(name, weight.shape, 1.0) / math.sqrt(2))
                    weight.copy_(uniform * self.options.kernel**-0.5)

    def positioned(
        self, x: Tensor, frame: Frame, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, convolved, evolved and with positions applied."""
        if "A" in self.options.at:
            x = self._convolved("x", x, self.canon_x, frame, cache)
        layers = [self.q, self.k, self.v]
        if "B" in self.options.at:
            weight = torch.cat((self.canon_q, self.canon_k, self.canon_v), -1)
            joined = self._convolved("qkv", joined_outputs(x, layers), weight, frame, cache)
            parts = joined.split([layer.out_features for layer in layers], -1)
        else:
            parts = joined_linear(x, layers)
        q, k, v = self.in_heads(*parts)
        q, k = self.evolve(q, k, frame)
        return self.position(q, k, v, frame)

    def _convolved(self, name: str, h: Tensor, weight: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return C(h) (batch, time, channels); padding is zero, as is everything before the first token."""
        return convolve(without_padding(h, frame), weight, residual=True, cache=cache, entry=name)

    def cache_spec(self) -> tuple[Entry, ...]:
        """Keys and values of every token or of the window, and the last inputs of each convolution."""
        kernel, width = self.options.kernel, self.shape.width
        joined = width + 2 * self.kv_heads * self.dim
        return (
            *super().cache_spec(),
            *((recent_inputs("x", kernel, width),) if "A" in self.options.at else ()),
            *((recent_inputs("qkv", kernel, joined),) if "B" in self.options.at else ()),
        )

    @property
    def graph_safe(self) -> bool:
        """True with every option: the position in the ring of last inputs comes from the cache."""
        return type(self) is Canon and self.graph_safe_stages()
