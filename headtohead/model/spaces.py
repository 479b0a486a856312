"""Residual spaces: the space of a model's hidden states.

A mechanism names the space it needs. The first layer's space embeds the tokens, the last layer's has the output layer;
between layers with different spaces the decoder inserts a linear adapter.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError, unknown
from headtohead.mechanisms.contract.base import Circuit, Draw, Frame
from headtohead.mechanisms.families.groups import Circle, TorusOptions
from headtohead.model.layers import Embedding, FeedForward, RmsNorm
from headtohead.model.sizes import Size


class Space:
    """A residual space, which has no parameters itself; this one has plain vectors, to which updates are added."""

    name: ClassVar[str] = "euclidean"
    dtype: ClassVar[torch.dtype | None] = None
    """Minimum precision of states; None: the dtype of the computation."""
    linear: ClassVar[bool] = True
    """Whether a state can be scaled by a number, as dropout needs."""

    def __init__(self, size: Size, options: Any = None) -> None:
        self.size, self.options = size, options

    @property
    def geometry(self) -> str:
        """Two neighboring layers with equal geometry need no adapter."""
        return self.name

    @property
    def feature_width(self) -> int:
        """Width of the features of a state."""
        return self.size.width

    def features(self, x: Tensor) -> Tensor:
        """Return (batch, time, feature_width), the input of adapters, feed-forward blocks and output layers."""
        return x

    def place(self, free: Tensor) -> Tensor:
        """Return the state for unconstrained coordinates (..., width)."""
        return free

    def enter(self, features: Tensor, weight: Tensor) -> Tensor:
        """Return the state of this space from another space's features and an adapter's weight."""
        return F.linear(features, weight)

    def entry_std(self, features: int) -> float | None:
        """Return the initial standard deviation of an adapter into this space; None: the model's."""
        return None

    def embedding(self) -> Embedding:
        """Return the module that maps tokens (batch, time) to states, called as (tokens, frame)."""
        return Embedding(self.size)

    def norm(self) -> nn.Module:
        """Return the norm before a mechanism, a feed-forward block or the output layer."""
        settings = self.size.settings
        if settings.norm == "rms":
            return RmsNorm(self.size.width, settings.norm_eps)
        return nn.LayerNorm(self.size.width, settings.norm_eps)

    def feed_forward(self) -> FeedForward | None:
        """Return the feed-forward block, or None for none."""
        return FeedForward(self.size)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """Return the state after an update."""
        return x + update

    def head(self, first: Space) -> nn.Module | None:
        """Return the output layer's own parameters, given the space that embeds; None: the embedding's table."""
        if not self.size.settings.tied:
            return nn.Linear(self.size.width, self.size.vocabulary, bias=False)
        if first.geometry != self.geometry:
            raise UserError("a tied head needs the same residual space at both ends; set tied = false")
        return None

    def readout(self, embedding: Embedding, head: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output layer's weight (vocabulary, feature_width) and its bias."""
        return embedding.weight if head is None else head.weight, None

    def circuits(self, embedding: nn.Module) -> list[Circuit]:
        """Return the circuits of the embedding's parameters."""
        names = [name for name, _ in embedding.named_parameters()]
        return [Circuit("position" if name == "positions" else "embedding", (name,)) for name in names]


class Adapter(nn.Module):
    """The linear map between two residual spaces."""

    def __init__(self, before: Space, after: Space) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.weight = nn.Parameter(torch.empty(after.size.width, before.feature_width))

    def initialise(self, draw: Draw) -> None:
        """Draw the weight at the scale that the target space requests."""
        with torch.no_grad():
            std = self.after.entry_std(self.before.feature_width)
            self.weight.copy_(draw("weight", self.weight.shape, std))

    def forward(self, x: Tensor) -> Tensor:
        """Return the state in the target space."""
        return self.after.enter(self.before.features(x), self.weight)


class Torus(Space):
    """Angles, or blocks of another compact group; stored in float32, since bf16 is off by 0.1 rad near 50.

    There are no norms: the features [cos, sin] have constant length. Feed-forward block and output layer take features; the
    feed-forward block returns a step on the torus.
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
                f"{self.group.name} has blocks of {self.group.numbers} coordinates, which do not divide width {size.width}"
            )

    @property
    def geometry(self) -> str:
        """The group's blocks."""
        return f"{self.name} of {self.group.name}"

    @property
    def feature_width(self) -> int:
        """Features per block times the number of blocks."""
        return self.size.width // self.group.numbers * self.group.width

    def features(self, x: Tensor) -> Tensor:
        """Cosine and sine of each angle, or the group's own features, block by block."""
        return self.group.features(self._blocks(x)).flatten(-2)

    def place(self, free: Tensor) -> Tensor:
        """The unconstrained coordinates as points of the group, in float32 or wider."""
        free = free.to(torch.promote_types(free.dtype, torch.float32))
        return self.group.place(self._blocks(free)).flatten(-2)

    def enter(self, features: Tensor, weight: Tensor) -> Tensor:
        """Normalize features to unit mean square, so that angles do not depend on the scale of the other space's states."""
        unit = features * torch.rsqrt(features.square().mean(-1, keepdim=True) + self.size.settings.norm_eps)
        return self.place(F.linear(unit, weight))

    def entry_std(self, features: int) -> float:
        """Angles then have the variance of uniform ones, pi^2 / 3; other groups' unconstrained coordinates have 1."""
        return (math.pi / math.sqrt(3) if self.group.numbers == 1 else 1.0) / math.sqrt(features)

    def embedding(self) -> Embedding:
        """A table of points."""
        return TorusEmbedding(self)

    def norm(self) -> nn.Module:
        """None is needed: the identity."""
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
                f"readout=tied compares states with the embedding's; states are in {self.geometry}, the embedding is in "
                f"{first.geometry}"
            )
        return TiedHead(self)

    def readout(self, embedding: Embedding, head: Any) -> tuple[Tensor, Tensor | None]:
        """The head's own weight; tied: logit_v = sum_j a_j score(th_j, E[v, j]) + b_v."""
        if not isinstance(head, TiedHead):
            return head.weight, head.bias
        gain = head.gain.repeat_interleave(self.group.width)
        return self.features(self.place(embedding.weight)) * gain, head.bias

    def circuits(self, embedding: nn.Module) -> list[Circuit]:
        """Phases are a separate group without weight decay: 0 is no special angle."""
        rest = [name for name, _ in embedding.named_parameters() if name != "weight"]
        return [
            Circuit("own", ("weight",), decay=False),
            *(Circuit("position", (name,), False) for name in rest),
        ]

    def _blocks(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.group.numbers))


class TorusEmbedding(Embedding):
    """Points of the torus, rotated by learned positions if the model has them."""

    def __init__(self, space: Torus) -> None:
        super().__init__(space.size)
        self.space = space

    def initialise(self, draw: Draw) -> None:
        """Scatter the points over the torus; initial positions are small."""
        super().initialise(draw)
        with torch.no_grad():
            normal = draw("embedding", self.weight.shape, 1.0)
            self.weight.copy_(self.space.options.spread * self.space.group.scatter(normal))

    def forward(self, tokens: Tensor, frame: Frame) -> Tensor:
        """Return (batch, time, width), in float32 or wider."""
        return self.space.place(super().forward(tokens, frame))


class TorusFeedForward(FeedForward):
    """W_d (silu(W_g f) * W_u f), with f the state's features; `tanh_bounded` limits each increment to pi."""

    def __init__(self, space: Torus) -> None:
        kind = space.options.ffn
        super().__init__(space.size, "" if kind == "model" else kind, space.feature_width)
        self.space = space
        self.bounded = kind == "tanh_bounded"

    def initialise(self, draw: Draw) -> None:
        """Input matrices with variance one over their width; the output matrix zero, or small."""
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


SPACES: dict[str, type[Space]] = {"euclidean": Space, "torus": Torus}


def find_space(name: str, size: Size, options: Any = None) -> Space:
    """Return the space of that name for a model, with a mechanism's options."""
    if name not in SPACES:
        raise unknown("residual space", name, SPACES)
    return SPACES[name](size, options)


class TiedHead(nn.Module):
    """Parameters of the output layer in addition to the embedding's points: a weight per block and a bias per token."""

    def __init__(self, space: Torus) -> None:
        super().__init__()
        # The same initial sharpness as a tied Euclidean head, where a token scores itself width * init_std.
        self.gain = nn.Parameter(
            torch.full((space.size.width // space.group.numbers,), space.size.settings.init_std)
        )
        self.bias = nn.Parameter(torch.zeros(space.size.vocabulary))
