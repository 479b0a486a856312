"""Residual spaces: where a model's states live.

A mechanism names the space it needs. The first layer's space embeds the tokens, the last one's reads out; where
neighbours differ the decoder puts a linear adapter between them.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError, unknown
from headtohead.kernels import rms_norm, swiglu
from headtohead.mechanisms.contract.base import Circuit, Draw, Frame, default_initialise
from headtohead.mechanisms.families.groups import Circle, TorusOptions
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


class Space:
    """The contract of a residual space; it holds no parameters itself."""

    name: ClassVar[str] = ""
    dtype: ClassVar[torch.dtype | None] = None
    """The narrowest dtype states are kept in; None: whatever the arithmetic gives."""
    linear: ClassVar[bool] = True
    """Whether a state times a number means something, as dropout needs."""

    def __init__(self, size: Size, options: Any = None) -> None:
        self.size, self.options = size, options

    @property
    def geometry(self) -> str:
        """What two neighbours must share to need no adapter."""
        return self.name

    @property
    def feature_width(self) -> int:
        """How wide a state is once its features are taken."""
        return self.size.width

    def features(self, x: Tensor) -> Tensor:
        """Return (batch, time, feature_width), what adapters, feed-forward parts and read-outs see of a state."""
        return x

    def place(self, free: Tensor) -> Tensor:
        """Return the state that free numbers (..., width) stand for."""
        return free

    def enter(self, features: Tensor, weight: Tensor) -> Tensor:
        """Return the state of this space that an adapter's weight makes of another space's features."""
        return F.linear(features, weight)

    def entry_std(self, features: int) -> float | None:
        """Return the standard deviation at which an adapter into this space starts; None: the model's."""
        return None

    def embedding(self) -> Embedding:
        """Return the module that turns tokens (batch, time) into states, called as (tokens, frame)."""
        raise NotImplementedError

    def norm(self) -> nn.Module:
        """Return the norm that stands before a mechanism, a feed-forward part or the read-out."""
        raise NotImplementedError

    def feed_forward(self) -> FeedForward | None:
        """Return the feed-forward part of a block, or None for none."""
        raise NotImplementedError

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """Return the state after an update."""
        raise NotImplementedError

    def head(self, first: Space) -> nn.Module | None:
        """Return the read-out's own parameters, where the first layer's space embeds; None: the embedding's table."""
        raise NotImplementedError

    def readout(self, embedding: Embedding, head: Any) -> tuple[Tensor, Tensor | None]:
        """Return the read-out's weight (vocabulary, feature_width) and its bias."""
        return embedding.weight if head is None else head.weight, None

    def circuits(self, embedding: nn.Module) -> list[Circuit]:
        """Return the circuits of the embedding's parameters."""
        raise NotImplementedError


class Adapter(nn.Module):
    """The linear map between two residual spaces."""

    def __init__(self, before: Space, after: Space) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.weight = nn.Parameter(torch.empty(after.size.width, before.feature_width))

    def initialise(self, draw: Draw) -> None:
        """Draw the weight at the scale the space behind it asks for."""
        with torch.no_grad():
            std = self.after.entry_std(self.before.feature_width)
            self.weight.copy_(draw("weight", self.weight.shape, std))

    def forward(self, x: Tensor) -> Tensor:
        """Return the state in the space behind."""
        return self.after.enter(self.before.features(x), self.weight)


class Euclidean(Space):
    """Plain vectors: states add."""

    name = "euclidean"

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

    def head(self, first: Space) -> nn.Module | None:
        """A matrix, or none where it is tied to the embedding."""
        if not self.size.settings.tied:
            return nn.Linear(self.size.width, self.size.vocabulary, bias=False)
        if first.geometry != self.geometry:
            raise UserError("a tied head needs the same residual space at both ends; set tied = false")
        return None

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


class Torus(Space):
    """Angles, or blocks of another compact group; kept in float32, since bf16 loses 0.1 rad near 50.

    Nothing is normed: the features [cos, sin] have constant length. Feed-forward part and read-out see features; the
    feed-forward part's output is a step on the torus.
    """

    name = "torus"
    dtype = torch.float32
    linear = False
    options: TorusOptions

    def __init__(self, size: Size, options: TorusOptions | None = None) -> None:
        super().__init__(size, options or TorusOptions(Circle()))
        self.group = self.options.group
        if size.width % self.group.numbers:
            raise UserError(
                f"{self.group.name} takes {self.group.numbers} numbers a block; they do not divide the width {size.width}"
            )

    @property
    def geometry(self) -> str:
        """The group's blocks."""
        return f"{self.name} of {self.group.name}"

    @property
    def feature_width(self) -> int:
        """So many features for each block."""
        return self.size.width // self.group.numbers * self.group.width

    def features(self, x: Tensor) -> Tensor:
        """Cosine and sine of each angle, or the group's own features, block by block."""
        return self.group.features(self._blocks(x)).flatten(-2)

    def place(self, free: Tensor) -> Tensor:
        """The free numbers as points of the group, in float32 at least."""
        free = free.to(torch.promote_types(free.dtype, torch.float32))
        return self.group.place(self._blocks(free)).flatten(-2)

    def enter(self, features: Tensor, weight: Tensor) -> Tensor:
        """Features of unit mean square, so that the angles do not depend on how far another space's states have grown."""
        unit = features * torch.rsqrt(features.square().mean(-1, keepdim=True) + self.size.settings.norm_eps)
        return self.place(F.linear(unit, weight))

    def entry_std(self, features: int) -> float:
        """Angles then start as wide as uniform ones, of variance pi^2 / 3; other groups' free numbers at 1."""
        return (math.pi / math.sqrt(3) if self.group.numbers == 1 else 1.0) / math.sqrt(features)

    def embedding(self) -> Embedding:
        """A table of points."""
        return TorusEmbedding(self)

    def norm(self) -> nn.Module:
        """None is needed."""
        return nn.Identity()

    def feed_forward(self) -> FeedForward | None:
        """From features to a step."""
        return None if self.options.ffn == "none" else TorusFeedForward(self)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """A step on the group."""
        return self.group.step(self._blocks(x), self._blocks(update)).flatten(-2)

    def head(self, first: Space) -> nn.Module | None:
        """A matrix and a bias over the features; tied: a weight per block and a bias."""
        if self.options.readout == "linear":
            return nn.Linear(self.feature_width, self.size.vocabulary)
        if first.geometry != self.geometry:
            raise UserError(
                f"readout=tied compares states with the embedding's; they live in {self.geometry}, the embedding "
                f"in {first.geometry}"
            )
        return TiedHead(self)

    def readout(self, embedding: Embedding, head: Any) -> tuple[Tensor, Tensor | None]:
        """The head's own weight; tied: logit_v = sum_j a_j score(th_j, E[v, j]) + b_v."""
        if not isinstance(head, TiedHead):
            return head.weight, head.bias
        gain = head.gain.repeat_interleave(self.group.width)
        return self.features(self.place(embedding.weight)) * gain, head.bias

    def circuits(self, embedding: nn.Module) -> list[Circuit]:
        """Phases are a kind of their own, and never decayed: 0 is no special angle."""
        rest = [name for name, _ in embedding.named_parameters() if name != "weight"]
        return [
            Circuit("own", ("weight",), decay=False),
            *(Circuit("position", (name,), False) for name in rest),
        ]

    def _blocks(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.group.numbers))


class TiedHead(nn.Module):
    """What a read-out has besides the embedding's points: a weight per block and a bias per token."""

    def __init__(self, space: Torus) -> None:
        super().__init__()
        # A tied Euclidean head starts as sharp: there too a token scores itself width * init_std.
        self.gain = nn.Parameter(
            torch.full((space.size.width // space.group.numbers,), space.size.settings.init_std)
        )
        self.bias = nn.Parameter(torch.zeros(space.size.vocabulary))


class TorusEmbedding(Embedding):
    """Points of the torus, with learned positions turning them where the model has them."""

    def __init__(self, space: Torus) -> None:
        super().__init__(space.size)
        self.space = space

    def initialise(self, draw: Draw) -> None:
        """Scatter the points over the torus; positions start small."""
        super().initialise(draw)
        with torch.no_grad():
            normal = draw("embedding", self.weight.shape, 1.0)
            self.weight.copy_(self.space.options.spread * self.space.group.scatter(normal))

    def forward(self, tokens: Tensor, frame: Frame) -> Tensor:
        """Return (batch, time, width), in float32 at least."""
        return self.space.place(super().forward(tokens, frame))


class TorusFeedForward(FeedForward):
    """W_d (silu(W_g f) * W_u f), f the state's features; `tanh_bounded` keeps each increment within pi."""

    def __init__(self, space: Torus) -> None:
        kind = space.options.ffn
        super().__init__(space.size, "" if kind == "model" else kind, space.feature_width)
        self.space = space
        self.bounded = kind == "tanh_bounded"

    def initialise(self, draw: Draw) -> None:
        """Matrices that read features at one over their width; the one that writes at 0, or small."""
        super().initialise(draw)
        stds = dict.fromkeys(("gate.weight", "up.weight"), self.space.feature_width**-0.5)
        small = self.space.options.ffn_start == "small"
        hidden = max(1, self.space.size.ffn)
        stds["down.weight"] = 0.5 / math.sqrt(2 * hidden * self.space.size.layers) if small else 0.0
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in stds:
                    parameter.copy_(draw(name, parameter.shape, stds[name]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the update (batch, time, width)."""
        update = super().forward(self.space.features(x).to(self.up.weight.dtype))
        return math.pi * torch.tanh(update) if self.bounded else update


SPACES: dict[str, type[Space]] = {"euclidean": Euclidean, "torus": Torus}


def find_space(name: str, size: Size, options: Any = None) -> Space:
    """Return the space of that name for a model, as a mechanism asks for it."""
    if name not in SPACES:
        raise unknown("residual space", name, SPACES)
    return SPACES[name](size, options)
