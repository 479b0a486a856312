"""No token mixing: three width x width maps replace those of q, k and v and form a gated layer on each token. It measures
the value of attention's parameters without attention.

    o_i = W_o W_down (SiLU(W_gate x_i) * W_up x_i)

MLP of Xue, Moosavi, Aletras, "Deconstructing Attention", arXiv 2510.11602.

Arms: even(token_mlp)

Claims: Used in every layer it fails, with 993.5 word perplexity on WikiText against 38.1, the same at every context (500M,
15B tokens); with every second layer standard it has 45.8.

Watch: Used in every layer, its loss cannot fall below that of a bigram model of the text, at any context. It has standard's
parameters but none of its quadratic FLOPs: compare at equal FLOPs as well. A hybrid that does well may only show that half
the attention layers suffice; `even(no_attention)` tests that.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from headtohead.kernels import swiglu
from headtohead.mechanisms.contract.base import Circuit, Flops, Frame, Mechanism, Mode, Shape
from headtohead.mechanisms.contract.cache import Cache, Entry


class TokenMLP(Mechanism):
    """A gated layer on each token, with standard attention's parameter count."""

    name: ClassVar[str] = "token_mlp"
    # The gated maps compute the input of o.
    tags: ClassVar = dict.fromkeys(("gate", "up", "down"), Circuit("own", follows="ov"))

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        width, bias = shape.width, shape.bias != "none"
        self.gate = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, width, bias=bias)
        self.down = nn.Linear(width, width, bias=bias)
        self.o = nn.Linear(width, width, bias=shape.bias == "all")

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the output of this layer for x (batch, time, width)."""
        biases = None if self.gate.bias is None else (self.gate.bias, self.up.bias, self.down.bias)
        output: Tensor = self.o(swiglu(x, self.gate.weight, self.up.weight, self.down.weight, biases))
        return output

    def cache_spec(self) -> tuple[Entry, ...]:
        """Nothing: no token attends to another."""
        return ()

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return two per weight."""
        linear = 2.0 * 4 * self.shape.width**2
        return Flops(linear, linear)
