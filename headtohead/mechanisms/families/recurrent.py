"""What recurrences with a state of fixed size share: the scan, its cache, short convolutions, decay by time steps."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.kernels import gated_scan, scan_weights
from headtohead.mechanisms.contract.base import Draw, Flops, Frame, Mode, Supports
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.projected import Projected
from headtohead.mechanisms.families.convolution import convolve, recent_inputs, without_padding


class Inputs(NamedTuple):
    """The inputs of the scan in heads, (batch, heads, time, ...); q and k may have one head for all."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    """Per key channel, or (batch, heads, time, 1)."""
    beta: Tensor | None = None
    """(batch, heads, time, 1): the strength of the delta rule; None: values are added."""
    gate: Tensor | None = None
    """(batch, time, width): the output gate, before its activation."""
    skipped: Tensor | None = None
    """(batch, heads, time, dim): what is added to the output of the scan."""


class Recurrent(Projected):
    """A layer with a state (key_dim, dim) per head; `inputs` and `finish` are its own."""

    supports: ClassVar[Supports] = Supports(bidirectional=False)
    no_stage = "{name} is a recurrence without scores of (q, k), so {stage} cannot be added to it"
    signed = True
    key_dim: int
    convolutions: tuple[str, ...] = ()
    """Names of the projections that a short convolution follows; the convolution of q is `q_conv`."""

    def inputs(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Inputs:
        """Return the inputs of the scan; a padding token neither adds nor decays."""
        raise NotImplementedError

    def finish(self, mixed: Tensor, inputs: Inputs) -> Tensor:
        """Return (batch, time, width), the input of the output projection, from (batch, time, heads, dim)."""
        raise NotImplementedError

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the output of this layer for x (batch, time, width)."""
        given = self.inputs(x, frame, cache)
        before = None if cache is None else cache.tensors["state"]
        mixed, state = gated_scan(given.q, given.k, given.v, given.log_decay, before, given.beta)
        if cache is not None:
            cache.tensors["state"].copy_(state)
        if given.skipped is not None:
            mixed = mixed + given.skipped
        output: Tensor = self.o(self.finish(mixed.transpose(1, 2).to(x.dtype), given))
        return output

    def convolved(self, parts: dict[str, Tensor], frame: Frame, cache: Cache | None) -> list[Tensor]:
        """Return the projections (batch, time, channels) after their short convolutions, each with its SiLU."""
        found = []
        for name, part in parts.items():
            if name in self.convolutions:
                convolution = getattr(self, f"{name}_conv")
                found.append(convolution(without_padding(part, frame), cache, f"{name}_inputs", silu=True))
            else:
                found.append(F.silu(part))
        return found

    def initialise(self, draw: Draw) -> None:
        """Set initial values; a convolution has the standard deviation of PyTorch's."""
        super().initialise(draw)
        with torch.no_grad():
            for name in self.convolutions:
                weight = getattr(self, f"{name}_conv").weight
                weight.copy_(draw(f"{name}_conv.weight", weight.shape, (3 * weight.shape[-1]) ** -0.5))

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the weights (batch, heads, time, time) of the values in the output of the scan; signed."""
        given = self.inputs(x, frame)
        q, k = given.q.to(given.log_decay.dtype), given.k.to(given.log_decay.dtype)
        return scan_weights(q, k, given.log_decay, given.beta)

    def cache_spec(self) -> tuple[Entry, ...]:
        """The state and the last inputs of the convolutions, independent of the context."""
        state = Entry("state", (self.heads, self.key_dim, self.dim), "sequence", least=torch.float32)
        recent = []
        for name in self.convolutions:
            channels, taps = getattr(self, f"{name}_conv").weight.shape
            recent.append(recent_inputs(f"{name}_inputs", taps, channels))
        return (state, *recent)

    state_flops: ClassVar[float] = 4.0
    """FLOPs per token and element of the state: 2 to add to it, 2 to read it."""

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return projections + the update and the read of the state, the same at every context."""
        total = self.projection_flops(mode) + self.state_flops * self.heads * self.key_dim * self.dim
        return Flops(total, total)


class ShortConvolution(nn.Module):
    """A causal convolution over the last tokens; the last column of its weight is that of the current token."""

    def __init__(self, channels: int, taps: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, taps))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor, cache: Cache | None, entry: str, *, silu: bool = False) -> Tensor:
        """Return (batch, time, channels) from the same, with or without SiLU; the cache's entry has the last inputs before x."""
        return convolve(x, self.weight.flip(-1).mT, self.bias, silu=silu, cache=cache, entry=entry)


def real_tokens(frame: Frame) -> Tensor | None:
    """Return (batch, time, 1), true at tokens that are not padding, or None without padding."""
    return None if frame.padding is None else frame.padding[:, frame.start :, None]


def wide(x: Tensor) -> Tensor:
    """Return x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x) in float32 or wider."""
    # F.softplus returns x above 20, and `aot_eager` expects other strides of its gradient than PyTorch computes.
    x = wide(x)
    return torch.logaddexp(x, torch.zeros_like(x))


def draw_decay(log_rate: Tensor, bias: Tensor, draw: Draw) -> None:
    """Set decays exp(-exp(log_rate) softplus(x + bias)) as in Mamba-2: rates uniform in 1 to 16, steps at x = 0 from 0.001 to
    0.1, uniform in their logarithm.
    """
    with torch.no_grad():
        log_rate.copy_((1 + 15 * _uniform(draw, "rate", log_rate.shape)).log())
        low, high = math.log(0.001), math.log(0.1)
        step = (low + (high - low) * _uniform(draw, "step", bias.shape)).exp()
        bias.copy_(step + (-torch.expm1(-step)).log())  # the inverse of softplus


def _uniform(draw: Draw, name: str, shape: Any) -> Tensor:
    """Return values uniform in 0 to 1: the distribution function of normal ones."""
    return 0.5 * (1 + torch.erf(draw(name, shape, 1.0) / math.sqrt(2)))
