"""Softmax attention with a sink: one more score takes part in the softmax and has no value, so that a head can attend to
nothing instead of to an unimportant token.

    a_ij = e^(s_ij) / (e^b + sum_(l <= i) e^(s_il)), s_ij = q_i . k_j / sqrt(d)        o_i = W_o [ sum_j a_ij v_j ]_heads

`bias=zero` has b = 0, softmax-plus-one (Miller, "Attention is off by one", 2023); `bias=learned` learns one b per head, as
gpt-oss does (OpenAI, arXiv 2508.10925). The result is standard attention times sigmoid(log sum_l e^(s_il) - b).

Training multiplies the output of PyTorch's fused attention by this sigmoid, and calls its backward kernel with the result
and with the logarithm of the sum that includes e^b. With a window or padding, the sink is one more key with the value 0.

Arms: sink:bias=zero sink:kv_heads=2

Claims: Without a sink, trained models put much of the attention on the first token, with very large activations there
(Xiao et al., arXiv 2309.17453); a sink makes this unnecessary. Miller expects fewer outliers and easier quantization, without
an experiment.

Watch: Parameters, FLOPs and cache are standard's; `bias=learned` adds one number per head and starts as `bias=zero`. Rows of
the attention map sum to less than 1. A window does not hide the sink. The sink is no position: the output of the first token
is not its value but a fraction of it. Decoding does not use CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.kernels import attend, sink_attend
from headtohead.kernels.attention.sink import sink_serves, sink_weights
from headtohead.kernels.attention.softmax import per_query_head
from headtohead.kernels.path import is_plain
from headtohead.mechanisms.contract.base import Frame, Shape
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.families.variant import Variant, VariantOptions


@dataclass(frozen=True)
class SinkOptions(VariantOptions):
    """Options of attention with a sink."""

    cases: ClassVar[str] = "bias=zero window=3 kv_heads=2 bias=zero,kv_heads=1,window=5,qk_norm=true"

    bias: str = option(
        "learned", "score of the sink: learned per head from 0 on, or 0", choices=("learned", "zero")
    )


class Sink(Variant):
    """Softmax attention in which a head can attend to nothing."""

    name: ClassVar[str] = "sink"
    Options: ClassVar[type] = SinkOptions
    substochastic = True
    tags: ClassVar = {**Variant.tags, "sink": "qk"}

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        if options.bias == "learned":
            self.sink = nn.Parameter(torch.zeros(self.heads))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values (batch, heads, time, dim)."""
        if cache is not None:
            k, v = cache.append("k", k), cache.append("v", v)
        # A few queries over many keys have a small map, and a sink among the keys would copy the whole cache.
        if is_plain() or q.shape[-2] < k.shape[-2]:
            return self._weights(q, k, frame) @ per_query_head(v, q)
        if frame.causal and frame.padding is None and not self.window and sink_serves(q):
            return sink_attend(q, k, v, self._bias(), self.dim**-0.5)
        return self._with_sink_key(q, k, v, frame)

    def _weights(self, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        """Return the attention map (batch, heads, time, keys)."""
        mask = frame.mask(q.device, self.window, keys=k.shape[-2])
        return sink_weights(q, k, mask, self._bias(), self.dim**-0.5)

    def _with_sink_key(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> Tensor:
        """Return the same as the map times the values, for as many queries as keys, by fused attention with a mask.

        The sink is a key with the value 0 in front of the others. One more coordinate, b sqrt(d) in every query, 0 in every
        key and 1 in the sink, gives it the score b.
        """
        if (bias := self._bias()) is not None:
            score = (bias.to(q.dtype) * self.dim**0.5)[:, None, None]
            q = torch.cat((q, score.expand_as(q[..., :1])), -1)
            sink = F.pad(torch.zeros_like(k[..., :1, :]), (0, 1), value=1.0)
            k = torch.cat((sink, F.pad(k, (0, 1))), -2)
        else:
            k = F.pad(k, (0, 0, 1, 0))
        mask = F.pad(frame.mask(q.device, self.window), (1, 0), value=True)
        return attend(q, k, F.pad(v, (0, 0, 1, 0)), scale=self.dim**-0.5, mask=mask)

    def _bias(self) -> Tensor | None:
        """Return the sink's score (heads,), or None if it is 0."""
        return None if self.options.bias == "zero" else self.sink

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the map (batch, heads, time, time); its rows sum to less than 1."""
        q, k, _ = self.positioned(x, frame)
        return self._weights(q, k, frame)
