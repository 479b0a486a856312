"""Layers of the decoder besides attention: norm, feed-forward part, embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.kernels import rms_norm, swiglu
from headtohead.mechanisms.contract.base import Draw, Frame, default_initialise
from headtohead.model.sizes import Size


class RmsNorm(nn.Module):
    """x / rms(x) * gain over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, the same shape."""
        return rms_norm(x, self.gain, self.eps)


class FeedForward(nn.Module):
    """The tokenwise feed-forward block: gated (swiglu) or plain (gelu)."""

    def __init__(self, size: Size, kind: str = "", wide_in: int = 0) -> None:
        super().__init__()
        bias = size.settings.bias == "all"
        wide_in = wide_in or size.width
        self.gated = (kind or size.settings.ffn) != "gelu"
        if self.gated:
            self.gate = nn.Linear(wide_in, size.ffn, bias=bias)
        self.up = nn.Linear(wide_in, size.ffn, bias=bias)
        self.down = nn.Linear(size.ffn, size.width, bias=bias)

    def initialise(self, draw: Draw) -> None:
        """Draw every matrix by its name."""
        default_initialise(self, draw)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, time, width)."""
        if not self.gated:
            output: Tensor = self.down(F.gelu(self.up(x)))
            return output
        biases = None if self.gate.bias is None else (self.gate.bias, self.up.bias, self.down.bias)
        return swiglu(x, self.gate.weight, self.up.weight, self.down.weight, biases)

    def flops(self) -> float:
        """Return forward FLOPs per token, two per weight."""
        return 2.0 * sum(child.weight.numel() for child in self.children() if isinstance(child, nn.Linear))


class Embedding(nn.Module):
    """Token vectors, plus learned positions if the model has them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size.vocabulary, size.width))
        learned = size.settings.positions == "learned"
        self.positions = nn.Parameter(torch.empty(size.context, size.width)) if learned else None

    def initialise(self, draw: Draw) -> None:
        """Draw both tables by name."""
        with torch.no_grad():
            self.weight.copy_(draw("embedding", self.weight.shape))
            if self.positions is not None:
                self.positions.copy_(draw("positions", self.positions.shape))

    def forward(self, tokens: Tensor, frame: Frame) -> Tensor:
        """Return (batch, time, width)."""
        x = F.embedding(tokens, self.weight)
        if self.positions is None:
            return x
        if frame.start + frame.time > len(self.positions):
            raise UserError(
                f"the model has {len(self.positions)} learned positions; {frame.start + frame.time} were requested"
            )
        return x + self.positions[frame.positions(tokens.device)]
