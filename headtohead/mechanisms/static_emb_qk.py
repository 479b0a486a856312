"""Queries and keys from the token embeddings: q, k = norm(e) W_q, norm(e) W_k with e = Emb(tokens); v = x W_v.

StaticEmbQK of Xue et al., arXiv 2510.11602: the map depends on the input, and not on this layer's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headtohead.kernels import attention_weights
from headtohead.mechanisms.base import Cache, Frame
from headtohead.mechanisms.deconstructed import Deconstructed, DeconstructedOptions
from headtohead.mechanisms.options import option
from headtohead.mechanisms.projected import joined_linear


@dataclass(frozen=True)
class StaticEmbQKOptions(DeconstructedOptions):
    """Options of static queries and keys."""

    norm: str = option(
        "layer",
        "what the embeddings go through first: this layer's norm, so that a first layer is standard, or nothing (raw)",
        choices=("layer", "raw"),
    )


class StaticEmbQK(Deconstructed):
    """Softmax attention whose queries and keys come from the embeddings that entered layer 0."""

    name: ClassVar[str] = "static_emb_qk"
    Options: ClassVar[type] = StaticEmbQKOptions

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return what this layer writes for x (batch, time, width)."""
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
