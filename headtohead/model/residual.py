"""Residual spaces: where a model's states live.

A mechanism names the space it needs. The first layer's space embeds the tokens, the last one's reads out; where
neighbours differ the decoder puts a linear adapter between them.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError, unknown
from headtohead.kernels import rms_norm, swiglu
from headtohead.mechanisms.base import Circuit, Draw, Frame
from headtohead.model.sizes import Size


class RmsNorm(nn.Module):
    """x / rms(x) * gain over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x, the same shape."""
        return rms_norm(x, self.gain, self.eps)


class FeedForward(nn.Module):
    """What a block does to each token alone: gated (swiglu) or plain (gelu)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        bias = size.settings.bias == "all"
        self.gated = size.settings.ffn == "swiglu"
        if self.gated:
            self.gate = nn.Linear(size.width, size.ffn, bias=bias)
        self.up = nn.Linear(size.width, size.ffn, bias=bias)
        self.down = nn.Linear(size.ffn, size.width, bias=bias)

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


class Space:
    """The contract of a residual space; one object serves a whole model and holds no parameters itself."""

    name: ClassVar[str] = ""
    dtype: ClassVar[torch.dtype | None] = None
    """The dtype states are kept in; None: whatever the arithmetic gives."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def features(self) -> int:
        """Return how wide a state is once its features are taken, for adapters and read-outs."""
        raise NotImplementedError

    def embedding(self) -> Embedding:
        """Return the module that turns tokens (batch, time) into states, called as (tokens, frame)."""
        raise NotImplementedError

    def norm(self) -> nn.Module:
        """Return the norm that stands before a mechanism, a feed-forward part or the read-out."""
        raise NotImplementedError

    def feed_forward(self) -> FeedForward:
        """Return the feed-forward part of a block."""
        raise NotImplementedError

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """Return the state after an update."""
        raise NotImplementedError

    def circuits(self, embedding: nn.Module) -> list[Circuit]:
        """Return the circuits of the embedding's parameters."""
        raise NotImplementedError


class Euclidean(Space):
    """Plain vectors: states add."""

    name = "euclidean"

    def features(self) -> int:
        """A state is its own feature vector."""
        return self.size.width

    def embedding(self) -> Embedding:
        """A table of vectors, plus a table of positions where they are learned."""
        return Embedding(self.size)

    def norm(self) -> nn.Module:
        """The model's norm."""
        settings = self.size.settings
        if settings.norm == "rms":
            return RmsNorm(self.size.width, settings.norm_eps)
        return nn.LayerNorm(self.size.width, settings.norm_eps)

    def feed_forward(self) -> FeedForward:
        """The model's feed-forward part."""
        return FeedForward(self.size)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """The sum."""
        return x + update

    def circuits(self, embedding: nn.Module) -> list[Circuit]:
        """The two tables."""
        names = [name for name, _ in embedding.named_parameters()]
        return [Circuit("position" if name == "positions" else "embedding", (name,)) for name in names]


class Embedding(nn.Module):
    """Token vectors, with learned positions added where the model has them."""

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
                f"learned positions end at {len(self.positions)}; {frame.start + frame.time} were asked for"
            )
        return x + self.positions[frame.positions(tokens.device)]


SPACES: dict[str, type[Space]] = {"euclidean": Euclidean}


def find_space(name: str, size: Size) -> Space:
    """Return the space of that name for a model."""
    if name not in SPACES:
        raise unknown("residual space", name, SPACES)
    return SPACES[name](size)
