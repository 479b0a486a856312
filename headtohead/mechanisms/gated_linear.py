"""A recurrence of the state-space family: a state of fixed size with input-dependent decay, instead of a growing cache. Use
it in hybrids such as `(gated_linear standard)*3`.

    S_t = diag(a_t) S_(t-1) + k_t^T v_t        o_t = q_t S_t / sqrt(d_k)        a_t = sigmoid(W_2 W_1 x_t + b)^(1/tau)
    y_t = W_o (norm(o_t) * silu(W_g x_t))

per head, S of (d_k, d_v). Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training",
arXiv 2312.06635. Queries and keys are half as wide as values (`key_dim`), so that the parameter count is close to the usual
4d². Training processes chunks of 64 tokens, which equals the recurrence step by step.

Claims: Competitive with a LLaMA-style transformer and with RetNet and Mamba at moderate sizes; trained at 2K tokens, it
generalizes beyond 20K without much loss of perplexity; faster than FlashAttention-2 as a single layer, even at 1K.

Watch: FLOPs and cache do not depend on the context; at short contexts the state (float32) is larger than standard's cache.
Within a chunk, training computes more than its FLOP count. Only the decays encode order: it accepts any positions, and
rotary ones have no effect on it. Its attention map, before the norm, is signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.kernels import rms_norm
from headtohead.mechanisms.contract.base import Circuit, Frame, Shape
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.contract.projected import joined_linear
from headtohead.mechanisms.families.recurrent import Inputs, Recurrent, real_tokens, wide


@dataclass(frozen=True)
class GatedLinearOptions(Options):
    """Options of the gated linear recurrence."""

    state_rows: ClassVar[str] = "key_dim"
    cases: ClassVar[str] = """
        key_dim=5 gate_rank=3 temperature=1 output_gate=false
        key_dim=4,gate_rank=2,temperature=0.25,output_gate=false
    """

    key_dim: int = option(0, "width of a head's queries and keys; 0: half the head width", low=0)
    gate_rank: int = option(16, "rank of the projection from a token to its decays", low=1)
    temperature: float = option(
        16.0, "tau: exponent 1/tau on the sigmoid of the decay, so that decay is slow at initialization"
    )
    output_gate: bool = option(True, "gate the normalized output by silu of a projection of x")

    def validate(self) -> None:
        """Raise if the temperature would make the state grow."""
        if not self.temperature > 0:
            raise UserError(f"temperature={self.temperature:g} must be above 0, or decays leave (0, 1)")


class GatedLinear(Recurrent):
    """Linear attention with data-dependent decay per key channel; the cache is one state per sequence."""

    name: ClassVar[str] = "gated_linear"
    Options: ClassVar[type] = GatedLinearOptions
    tags: ClassVar = {
        **dict.fromkeys(("decay_down", "decay_up"), Circuit("own", follows="qk")),
        **dict.fromkeys(("gain", "gate"), Circuit("own", follows="ov")),
    }

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options, kv_heads=shape.heads)
        width = shape.width
        self.key_dim = options.key_dim or max(1, self.dim // 2)
        narrow = self.heads * self.key_dim
        self.q = self.linear(width, narrow)
        self.k = self.linear(width, narrow)
        self.v = self.linear(width, width)
        if options.output_gate:
            self.gate = self.linear(width, width)
        # The offset is part of the decay, not a model bias: sigmoid(0)^(1/16) decays by half in 16 tokens.
        self.decay_down = nn.Linear(width, options.gate_rank, bias=False)
        self.decay_up = nn.Linear(options.gate_rank, narrow, bias=True)
        self.gain = nn.Parameter(torch.ones(self.dim))
        self.o = self.linear(width, width, output=True)

    def inputs(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Inputs:
        """Return the inputs of the scan."""
        layers = [self.q, self.k, self.v, *([self.gate] if self.options.output_gate else [])]
        parts = joined_linear(x, layers)
        q, k, v = (self.split_heads(part, self.heads) for part in parts[:3])
        decay = F.logsigmoid(wide(self.decay_up(self.decay_down(x)))) / self.options.temperature
        log_decay = self.split_heads(decay, self.heads)
        if (real := real_tokens(frame)) is not None:
            k, log_decay = k * real.unsqueeze(1), log_decay * real.unsqueeze(1)
        gate = parts[3] if self.options.output_gate else None
        return Inputs(q * self.key_dim**-0.5, k, v, log_decay, gate=gate)

    @property
    def graph_safe(self) -> bool:
        """True with every option: a step depends on the position through the cache only."""
        return type(self) is GatedLinear

    def finish(self, mixed: Tensor, inputs: Inputs) -> Tensor:
        """Return the normalized heads, gated."""
        heads = rms_norm(mixed, self.gain, self.shape.norm_eps).flatten(2)
        return heads if inputs.gate is None else heads * F.silu(inputs.gate)
