"""A state of fixed size that is corrected, not only added to: before a token writes its value under its key, what the state
returned for that key is removed, and the whole state decays. Use it in hybrids such as `(gated_delta standard)*3`.

    S_t = (I - b_t k_t^T k_t) diag(a_t) S_(t-1) + b_t k_t^T v_t        o_t = q_t S_t / sqrt(d_k)
    q, k, v = silu(conv(W x)), q and k of norm 1        b_t = beta_max sigmoid(W_b x_t)
    a_t = exp(-A softplus(W_a x_t + c))        y_t = W_o (norm(o_t) * silu(W_g x_t))

per head, S of (d_k, d_v), A > 0 per head. Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta
Rule", arXiv 2412.06464. `decay=channel` decays each key channel on its own, as Kimi Delta Attention does (Kimi Team, "Kimi
Linear: An Expressive, Efficient Attention Architecture", arXiv 2510.26692); `decay=none` is DeltaNet (arXiv 2406.06484).
Queries and keys are half as wide as values (`key_dim`), so that the parameter count is close to the usual 4d². Training
processes chunks of 64 tokens with one triangular system each, which equals the recurrence step by step.

Arms: gated_delta:decay=channel,output_gate=sigmoid gated_delta:decay=none

Claims: Better than Mamba-2 and DeltaNet in language modeling, common-sense reasoning, in-context retrieval, length
extrapolation and long contexts; hybrids with sliding-window attention or Mamba-2 layers are better still. Kimi Linear, three
layers with decay per channel to one of full attention, is claimed to outperform full attention at equal training, with up to
75 % less cache and 6 times the decoding throughput at 1M tokens.

Watch: FLOPs and cache do not depend on the context; the cache is the state (float32) and the last inputs of the convolutions.
Within a chunk, training computes more than its FLOP count, and the states of chunks are computed one after the other. Only
decays and convolutions encode order: it accepts any positions, and rotary ones have no effect on it. Its attention map,
before the norm, is signed. The papers' gates differ in detail: Kimi Linear's output gate is a sigmoid of low rank, here of
full rank (`output_gate=sigmoid`). `qk_norm=false` allows keys for which the state grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.kernels import rms_norm
from headtohead.mechanisms.contract.base import Circuit, Draw, Frame, Shape
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.contract.projected import joined_linear
from headtohead.mechanisms.families.recurrent import (
    Inputs,
    Recurrent,
    ShortConvolution,
    draw_decay,
    real_tokens,
    softplus,
    wide,
)

DECAYS = ("head", "channel", "none")
GATES = ("silu", "sigmoid", "none")
_EPS = 1e-6


@dataclass(frozen=True)
class GatedDeltaOptions(Options):
    """Options of the gated delta rule."""

    state_rows: ClassVar[str] = "key_dim"
    cases: ClassVar[str] = """
        decay=channel decay=none key_dim=5 conv=0 qk_norm=false output_norm=false output_gate=sigmoid output_gate=none
        beta_max=2 decay=channel,decay_rank=2,conv=2,output_gate=sigmoid
        decay=none,key_dim=3,conv=0,output_norm=false,output_gate=none
    """

    decay: Literal["head", "channel", "none"] = option(
        "head", "one decay per head, one per key channel (Kimi Delta Attention), or no decay", choices=DECAYS
    )
    key_dim: int = option(0, "width of a head's queries and keys; 0: half the head width", low=0, high=2**17)
    decay_rank: int = option(
        0, "decay=channel: rank of the projection to the decays; 0: the head width", low=0, high=2**17
    )
    conv: int = option(
        4, "tokens of the short convolution after the projections q, k, v; 0: none", low=0, high=2**12
    )
    qk_norm: bool = option(True, "scale queries and keys to norm 1")
    beta_max: float = option(1.0, "largest b; above 1, states can change sign (at most 2)", high=2.0)
    output_norm: bool = option(True, "normalize the output of each head")
    output_gate: Literal["silu", "sigmoid", "none"] = option(
        "silu", "activation of the gate on the output", choices=GATES
    )

    def validate(self) -> None:
        """Raise if b would not be positive, a convolution is of one token, or a rank has no effect."""
        if not self.beta_max > 0:
            raise UserError(f"beta_max={self.beta_max:g} must be above 0, or nothing is written")
        if self.conv == 1:
            raise UserError("conv=1 is no convolution; give 2 or more, or 0 for none")
        if self.decay_rank and self.decay != "channel":
            raise UserError(f"decay_rank has no effect with decay={self.decay}; use decay=channel")


class GatedDelta(Recurrent):
    """The gated delta rule: a state that forgets and is corrected; the cache is one state per sequence."""

    name: ClassVar[str] = "gated_delta"
    Options: ClassVar[type] = GatedDeltaOptions
    tags: ClassVar = {
        **dict.fromkeys(
            ("q_conv", "k_conv", "beta", "rate", "decay", "decay_down"), Circuit("own", follows="qk")
        ),
        **dict.fromkeys(("v_conv", "gain", "gate"), Circuit("own", follows="ov")),
    }
    state_flops: ClassVar[float] = 6.0
    """As without the delta rule, and 2 to read what the state returns for the key."""

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options, kv_heads=shape.heads)
        width, heads = shape.width, shape.heads
        self.key_dim = options.key_dim or max(1, self.dim // 2)
        narrow = heads * self.key_dim
        self.q = self.linear(width, narrow)
        self.k = self.linear(width, narrow)
        self.v = self.linear(width, width)
        if options.conv:
            self.convolutions = ("q", "k", "v")
            self.q_conv = ShortConvolution(narrow, options.conv)
            self.k_conv = ShortConvolution(narrow, options.conv)
            self.v_conv = ShortConvolution(width, options.conv)
        if options.output_gate != "none":
            self.gate = self.linear(width, width)
        self.beta = nn.Linear(width, heads, bias=False)
        # The offsets are part of the decay, not model biases.
        if options.decay == "head":
            self.decay = nn.Linear(width, heads, bias=True)
        elif options.decay == "channel":
            rank = options.decay_rank or self.dim
            self.decay_down = nn.Linear(width, rank, bias=False)
            self.decay = nn.Linear(rank, narrow, bias=True)
        if options.decay != "none":
            self.rate = nn.Parameter(torch.zeros(heads))
        if options.output_norm:
            self.gain = nn.Parameter(torch.ones(self.dim))
        self.o = self.linear(width, width, output=True)

    def initialise(self, draw: Draw) -> None:
        """Set initial values; decays as in Mamba-2."""
        super().initialise(draw)
        if self.options.decay != "none":
            draw_decay(self.rate, self.decay.bias, draw)

    def inputs(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Inputs:
        """Return the inputs of the scan."""
        gated = self.options.output_gate != "none"
        parts = joined_linear(x, [self.q, self.k, self.v, *([self.gate] if gated else [])])
        named = dict(zip(("q", "k", "v"), parts[:3], strict=True))
        q, k, v = (self.split_heads(part, self.heads) for part in self.convolved(named, frame, cache))
        if self.options.qk_norm:
            q, k = _normalized(q), _normalized(k)
        beta = self.options.beta_max * self.split_heads(wide(self.beta(x)).sigmoid(), self.heads)
        log_decay = self._log_decay(x, beta)
        if (real := real_tokens(frame)) is not None:
            beta, log_decay = beta * real.unsqueeze(1), log_decay * real.unsqueeze(1)
        return Inputs(q * self.key_dim**-0.5, k, v, log_decay, beta, parts[3] if gated else None)

    def _log_decay(self, x: Tensor, beta: Tensor) -> Tensor:
        """Return the log decays (batch, heads, time, key_dim or 1)."""
        if self.options.decay == "none":
            return torch.zeros_like(beta)
        logits = self.decay(x if self.options.decay == "head" else self.decay_down(x))
        rate = wide(self.rate).exp()[:, None, None]
        return -rate * self.split_heads(softplus(logits), self.heads)

    @property
    def graph_safe(self) -> bool:
        """True with every option: a step depends on the position through the cache only."""
        return type(self) is GatedDelta

    def finish(self, mixed: Tensor, inputs: Inputs) -> Tensor:
        """Return the heads, normalized and gated."""
        if self.options.output_norm:
            mixed = rms_norm(mixed, self.gain, self.shape.norm_eps)
        heads = mixed.flatten(2)
        if inputs.gate is None:
            return heads
        return heads * (F.silu if self.options.output_gate == "silu" else torch.sigmoid)(inputs.gate)


def _normalized(x: Tensor) -> Tensor:
    """Return x with norm 1 over the last dimension, in float32 or wider."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
