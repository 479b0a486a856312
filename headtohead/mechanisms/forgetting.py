"""Softmax attention with a forget gate: every token can lower the scores of all tokens before it, so that the past fades at a
rate that the data decide.

    f_t = sigmoid(w . x_t + b), one per head        D_ij = sum_(l = j+1..i) log f_l
    o_i = W_o [ sum_(j <= i) softmax_j(q_i . k_j / sqrt(d) + D_ij) v_j ]_heads

Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate" (FoX), arXiv 2503.02130. The gates encode order,
and the paper's models have no other positions: `rope=true` also applies the model's rotary positions, if it has them.

With c_t = sum_(l <= t) log f_l, D_ij = c_i - c_j, and c_i is the same for all keys of a query, so it cancels in the softmax.
Training therefore adds only -c_j, as further coordinates of the keys, and PyTorch's fused attention computes the rest; no
matrix of all D_ij is formed. Decoding caches c.

Arms: forgetting:rope=true forgetting:kv_heads=2

Claims: Better than a transformer with rotary positions in long-context language modeling, in extrapolation to longer
contexts and on short-context tasks; as good on long-context tasks, such as finding a needle in a long text, where recurrent
models fail.

Watch: The gates start near 1/2: at initialization a score falls by 0.7 per token. This is the plain layer: the paper's "Pro"
block also has an output gate (see `gated`), an output norm, normalized queries and keys (`qk_norm=true`), and shifted keys
and values. In a model with rotary positions the other arms have them and this one, by default, does not. Sums of logarithms
are float32: after 10 000 tokens at the initial rate scores are accurate to about 0.001. Decoding does not use CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.kernels import attention_weights
from headtohead.kernels.attention.softmax import per_query_head
from headtohead.kernels.path import is_plain
from headtohead.mechanisms.contract.base import Circuit, Frame, Shape, Supports
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.families.variant import Variant, VariantOptions


@dataclass(frozen=True)
class ForgettingOptions(VariantOptions):
    """Options of forgetting attention."""

    cases: ClassVar[str] = "rope=true window=3 kv_heads=2 rope=true,kv_heads=1,window=5,qk_norm=true"

    rope: bool = option(False, "also apply the model's rotary positions; the paper has none")


class Forgetting(Variant):
    """Softmax attention whose scores decay at a rate computed from the tokens in between."""

    name: ClassVar[str] = "forgetting"
    Options: ClassVar[type] = ForgettingOptions
    supports: ClassVar[Supports] = Supports(bidirectional=False)
    tags: ClassVar = {**Variant.tags, "forget_gate": Circuit("own", follows="qk")}

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        # The offset is part of the gate, not a model bias.
        self.forget_gate = nn.Linear(shape.width, self.heads, bias=True)

    def position(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v, without rotary positions unless `rope`."""
        return super().position(q, k, v, frame) if self.options.rope else (q, k, v)

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the output of this layer for x (batch, time, width)."""
        q, k, v = self.positioned(x, frame, cache)
        sums = self._sums(x, frame, cache)
        if cache is not None:
            k, v, sums = cache.append("k", k), cache.append("v", v), cache.append("sums", sums)
        return self.write(self._attended(q, k, v, sums, frame), frame)

    def _sums(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return c (batch, heads, time, 1), at least float32; a padding token does not decay."""
        logits = self.forget_gate(x)
        logs = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        if frame.padding is not None:
            logs = logs * frame.padding[:, frame.start :, None]
        sums = logs.cumsum(1)
        if cache is not None:
            sums = sums + cache.tensors["total"].unsqueeze(1)
            cache.tensors["total"].copy_(sums[:, -1])
        return sums.transpose(1, 2).unsqueeze(-1)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, frame: Frame) -> Tensor:
        """Return the mixed values (batch, heads, time, dim) from the sums (batch, heads, keys, 1) of all keys."""
        if is_plain() or q.shape[-2] < k.shape[-2]:
            # The bias is as large as the map: small for a few queries over many keys.
            return frame.attend(q, k, v, window=self.window, bias=_decay(sums, q))
        k, v, scale = per_query_head(k, q), per_query_head(v, q), self.dim**-0.5
        parts = _parts(-sums / scale, k.dtype)
        q = torch.cat((q, torch.ones_like(parts)), -1)
        return frame.attend(q, torch.cat((k, parts), -1), v, window=self.window, scale=scale)

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the softmax map (batch, heads, time, time)."""
        q, k, _ = self.positioned(x, frame)
        mask, bias = frame.mask(x.device, self.window), _decay(self._sums(x, frame), q)
        return attention_weights(q, k, mask, bias=bias)

    def cache_spec(self) -> tuple[Entry, ...]:
        """Keys, values and the sum c at every token or of the window, and c at the last token."""
        return (
            *super().cache_spec(),
            Entry("sums", (self.heads, 1), least=torch.float32, window=self.window),
            Entry("total", (self.heads,), "sequence", least=torch.float32),
        )


def _decay(sums: Tensor, q: Tensor) -> Tensor:
    """Return c_i - c_j (batch, heads, queries, keys) for queries at the last positions of the keys, in their dtype."""
    return (sums[..., -q.shape[-2] :, :] - sums.mT).to(q.dtype)


def _parts(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values (..., 1) as a sum of one number of this dtype, or of three if it has only 8 or 11 bits, (..., parts).

    Products of queries and keys are accumulated in float32, so the sum of the parts keeps 24 bits of the values.
    """
    if dtype.itemsize >= 4:
        return values.to(dtype)
    parts = []
    for _ in range(3):
        parts.append(values.to(dtype))
        values = values - parts[-1].to(values.dtype)
    return torch.cat(parts, -1)
