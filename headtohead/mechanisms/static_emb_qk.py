"""Queries and keys from the token embeddings: the attention map depends on the input, but not on the layers below.

    q, k = W_q norm(e), W_k norm(e) with e = Emb(tokens)        v = W_v x
    o_i = W_o sum_j softmax_j(q_i . k_j / sqrt(d)) v_j

StaticEmbQK of Xue, Moosavi, Aletras, "Deconstructing Attention", arXiv 2510.11602.

Arms: even(static_emb_qk)

Claims: Used in every layer, 79.9 word perplexity on WikiText against 38.1; with every second layer standard, 38.7: queries
and keys of the current layer are not essential (500M, 15B tokens).

Watch: In layer 1 it equals `standard`. Parameters, FLOPs and cache are standard's. The paper does not state whether the
embeddings are normalized; `norm=raw` leaves them at their small initial scale. One run per cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headtohead.kernels import attention_weights
from headtohead.mechanisms.contract.base import Frame
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.contract.projected import joined_linear
from headtohead.mechanisms.families.deconstructed import Deconstructed, DeconstructedOptions


@dataclass(frozen=True)
class StaticEmbQKOptions(DeconstructedOptions):
    """Options of static queries and keys."""

    norm: str = option(
        "layer",
        "normalization of the embeddings: this layer's norm, so that a first layer is standard, or none (raw)",
        choices=("layer", "raw"),
    )


class StaticEmbQK(Deconstructed):
    """Softmax attention whose queries and keys come from the embeddings at the input of layer 0."""

    name: ClassVar[str] = "static_emb_qk"
    Options: ClassVar[type] = StaticEmbQKOptions

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the output of this layer for x (batch, time, width)."""
        q, k = self._queries_keys(frame)
        v = self.split_heads(self.v(x), self.kv_heads)
        return self.write(self.mix(q, k, v, frame, cache), frame)

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the softmax map (batch, heads, time, time)."""
        return attention_weights(*self._queries_keys(frame), frame.mask(x.device))

    def _queries_keys(self, frame: Frame) -> tuple[Tensor, Tensor]:
        """Return q and k of the embeddings, with positions applied."""
        assert frame.embeddings is not None
        assert frame.norm is not None
        static = frame.embeddings if self.options.norm == "raw" else frame.norm(frame.embeddings)
        q, k = joined_linear(static, [self.q, self.k])
        q, k = self.evolve(self.split_heads(q, self.heads), self.split_heads(k, self.kv_heads), frame)
        return frame.rotate(q), frame.rotate(k)
