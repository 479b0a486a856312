"""The state space layer of Mamba-2: a state of fixed size that each token decays and writes to with its own step size. Use it
in hybrids such as `(selective_state standard)*3`.

    S_t = e^(-dt_t A) S_(t-1) + dt_t k_t^T v_t        o_t = q_t S_t + D v_t        dt_t = softplus(W_dt x_t + c)
    q, k, v = silu(conv(W x))        y_t = W_o norm(o_t * silu(W_g x_t))

per head, S of (state, d_v), A > 0 and D per head; q and k, which the paper calls C and B, are shared by the heads of a group.
Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality",
arXiv 2405.21060. Defaults are the paper's: one group, a state twice as wide as a head (128 for heads of 64), a convolution of
4 tokens with bias, the norm of the whole width after the gate, A from 1 to 16 and steps from 0.001 to 0.1 at initialization.
The inner width is the model's, not twice as wide: it replaces attention next to a feed-forward block, while Mamba-2 has no
such block. Training processes chunks of 64 tokens, which equals the recurrence step by step.

Arms: selective_state:state=16 selective_state:groups=0

Claims: Mamba-2 matches Mamba and a Transformer++ in scaling on the Pile and is better per unit of compute and time; larger
states and more heads per group of q and k help recall (multi-query associative recall); the chunked algorithm is 2 to 8 times
as fast as Mamba's scan.

Watch: FLOPs and cache do not depend on the context; the cache is the state (float32) and the last inputs of the convolutions.
Within a chunk, training computes more than its FLOP count. With one group it has fewer parameters than standard, which
`shape = params` gives to the feed-forward block. Only decays and the convolutions encode order: it accepts any
positions, and rotary ones have no effect on it. Its attention map, without D and before gate and norm, is signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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


@dataclass(frozen=True)
class SelectiveStateOptions(Options):
    """Options of the selective state space layer."""

    state_rows: ClassVar[str] = "state"
    cases: ClassVar[str] = """
        state=5 groups=0 groups=2 conv=0 skip=false output_norm=false output_gate=false
        state=3,groups=2,conv=2,skip=false,output_gate=false
    """

    state: int = option(
        0, "rows of a head's state, the width of queries and keys; 0: twice the head width", low=0, high=2**17
    )
    groups: int = option(1, "groups of heads, each with its own queries and keys; 0: as many as heads", low=0)
    conv: int = option(
        4, "tokens of the short convolution after the projections q, k, v; 0: none", low=0, high=2**12
    )
    skip: bool = option(True, "add D v, with a learned D per head")
    output_norm: bool = option(True, "normalize the gated output")
    output_gate: bool = option(True, "gate the output by silu of a projection of x")

    def validate(self) -> None:
        """Raise if a convolution is of one token."""
        if self.conv == 1:
            raise UserError("conv=1 is no convolution; give 2 or more, or 0 for none")


class SelectiveState(Recurrent):
    """The state space layer of Mamba-2, in place of attention; the cache is one state per sequence."""

    name: ClassVar[str] = "selective_state"
    Options: ClassVar[type] = SelectiveStateOptions
    tags: ClassVar = {
        **dict.fromkeys(("q_conv", "k_conv", "step", "rate"), Circuit("own", follows="qk")),
        **dict.fromkeys(("v_conv", "skip", "gain", "gate"), Circuit("own", follows="ov")),
    }

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options, kv_heads=shape.heads)
        width, heads = shape.width, shape.heads
        self.groups = options.groups or heads
        if heads % self.groups:
            raise UserError(f"selective_state: {heads} heads cannot form groups={self.groups} evenly")
        self.key_dim = options.state or 2 * self.dim
        shared = self.groups * self.key_dim
        self.q = self.linear(width, shared)
        self.k = self.linear(width, shared)
        self.v = self.linear(width, width)
        if options.conv:
            self.convolutions = ("q", "k", "v")
            self.q_conv = ShortConvolution(shared, options.conv, bias=True)
            self.k_conv = ShortConvolution(shared, options.conv, bias=True)
            self.v_conv = ShortConvolution(width, options.conv, bias=True)
        if options.output_gate:
            self.gate = self.linear(width, width)
        # The offset is part of the step, not a model bias.
        self.step = nn.Linear(width, heads, bias=True)
        self.rate = nn.Parameter(torch.zeros(heads))
        if options.skip:
            self.skip = nn.Parameter(torch.ones(heads))
        if options.output_norm:
            self.gain = nn.Parameter(torch.ones(width))
        self.o = self.linear(width, width, output=True)

    def initialise(self, draw: Draw) -> None:
        """Set initial values; rates and steps as in the paper."""
        super().initialise(draw)
        draw_decay(self.rate, self.step.bias, draw)

    def inputs(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Inputs:
        """Return the inputs of the scan; the step size is a factor of v, so that one group of k serves all heads."""
        gated = self.options.output_gate
        parts = joined_linear(x, [self.q, self.k, self.v, *([self.gate] if gated else [])])
        named = dict(zip(("q", "k", "v"), parts[:3], strict=True))
        q, k, v = self.convolved(named, frame, cache)
        v = self.split_heads(v, self.heads)
        q, k = (self._for_heads(self.split_heads(part, self.groups)) for part in (q, k))
        step = self.split_heads(softplus(self.step(x)), self.heads)
        if (real := real_tokens(frame)) is not None:
            step = step * real.unsqueeze(1)
        log_decay = -wide(self.rate).exp()[:, None, None] * step
        skipped = self.skip[:, None, None].to(v.dtype) * v if self.options.skip else None
        return Inputs(q, k, v * step, log_decay, gate=parts[3] if gated else None, skipped=skipped)

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the weights (batch, heads, time, time) of the values in q S, without D; signed."""
        step = self.inputs(x, frame).log_decay / -wide(self.rate).exp()[:, None, None]
        return super().attention_map(x, frame) * step.transpose(-2, -1)

    def _for_heads(self, x: Tensor) -> Tensor:
        """Return what a group shares for each of its heads; one group is broadcast."""
        each = self.heads // self.groups
        return x if self.groups == 1 or each == 1 else x.repeat_interleave(each, 1)

    @property
    def graph_safe(self) -> bool:
        """True with every option: a step depends on the position through the cache only."""
        return type(self) is SelectiveState

    def finish(self, mixed: Tensor, inputs: Inputs) -> Tensor:
        """Return the heads, gated and then normalized over the whole width."""
        heads = mixed.flatten(2)
        if inputs.gate is not None:
            heads = heads * F.silu(inputs.gate)
        return rms_norm(heads, self.gain, self.shape.norm_eps) if self.options.output_norm else heads
