"""Softmax attention with an output gate: a sigmoid of the token decides how much of each head's result passes on, so that a
head can also return nothing.

    q, k, v = W_q x, W_k x, W_v x in heads        y_i = sum_(j <= i) softmax_j(q_i . k_j / sqrt(d)) v_j
    o_i = W_o [ y_i * sigmoid(W_g x_i) ]_heads

Qiu et al., "Gated Attention for Large Language Models", arXiv 2505.06708: the position after the weighted values and before
W_o, the best of those compared there, and the form used in Qwen3-Next. `gate=element` has a gate for every coordinate of y,
`gate=head` one for each head.

Arms: gated:gate=head gated:kv_heads=2

Claims: At 15B (mixture of experts) and 1.7B (dense), with up to 3.5T tokens, the gate improves loss and benchmarks, makes
training more stable, allows larger learning rates, and the first token no longer collects most of the attention. The paper
gives two reasons: W_v and W_o are no longer one linear map, and the gates are sparse.

Watch: `gate=element` has 5 D² parameters per layer where standard has 4 D²: race it with `shape = params`; `gate=head` adds
only D h. A gate starts near 1/2, which halves the attention part of the residual stream at initialization. The attention map
does not show the gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headtohead.mechanisms.contract.base import Circuit, Frame, Shape
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.families.variant import Variant, VariantOptions


@dataclass(frozen=True)
class GatedOptions(VariantOptions):
    """Options of gated attention."""

    cases: ClassVar[str] = "gate=head kv_heads=2,window=3 gate=head,kv_heads=1,qk_norm=true"

    gate: str = option("element", "one gate per coordinate, or one per head", choices=("element", "head"))


class Gated(Variant):
    """Softmax attention whose result is multiplied by a sigmoid of the token before the output projection."""

    name: ClassVar[str] = "gated"
    Options: ClassVar[type] = GatedOptions
    tags: ClassVar = {**Variant.tags, "gate": Circuit("own", follows="ov")}

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        self.gate = self.linear(shape.width, shape.width if options.gate == "element" else self.heads)

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the output of this layer for x (batch, time, width)."""
        q, k, v = self.positioned(x, frame, cache)
        mixed = self.mix(q, k, v, frame, cache)
        # (batch, heads, time, dim), or (batch, heads, time, 1) for a gate per head.
        return self.write(mixed * torch.sigmoid(self.split_heads(self.gate(x), self.heads)), frame)

    @property
    def graph_safe(self) -> bool:
        """True with every option: the gate depends on the token alone."""
        return type(self) is Gated and self.graph_safe_stages()
