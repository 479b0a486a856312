"""The layer of a score function: standard attention whose scores pass through the function."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headtohead.kernels import scored_attend, scored_weights
from headtohead.mechanisms.contract.base import (
    Circuit,
    Draw,
    Flops,
    Frame,
    Mode,
    Shape,
    Supports,
)
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.contract.projected import Projected, joined_linear
from headtohead.mechanisms.contract.score import Score, bind, verify, visible_keys


@dataclass(frozen=True)
class ScoredOptions(Options):
    """Options of every layer with a score function."""

    function: ClassVar[Score]

    kv_heads: int = option(0, "key/value heads shared by the query heads; 0: the model's setting", low=0)


class Scored(Projected):
    """Attention with the scores f(q_i . k_j / sqrt(d), head, i, j)."""

    supports: ClassVar[Supports] = Supports(bidirectional=False)
    # Like other biases, learned scores are exempt from weight decay.
    tags: ClassVar = {"learned": Circuit("qk", decay=False)}

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options, kv_heads=options.kv_heads)
        width, narrow = shape.width, self.kv_heads * self.dim
        self.q = self.linear(width, width)
        self.k = self.linear(width, narrow)
        self.v = self.linear(width, narrow)
        self.o = self.linear(width, width, output=True)
        verify(options, shape.heads, shape.context)
        self.change = bind(options, shape.heads, shape.context)
        shapes, specs = self.score.shapes(options, shape.heads, shape.context), self.score.learned
        tables = {name: nn.Parameter(torch.full(shapes[name], specs[name].init)) for name in specs}
        self.learned = nn.ParameterDict(tables)
        # Weights of a sigmoid are positive, but a row may sum to any number.
        self.signed = self.score.normalize == "sigmoid"

    @property
    def score(self) -> Score:
        """The score function."""
        score: Score = self.options.function
        return score

    def initialise(self, draw: Draw) -> None:
        """Set initial values, those of learned tensors as declared."""
        super().initialise(draw)
        with torch.no_grad():
            for name, spec in self.score.learned.items():
                table = self.learned[name]
                noise = draw(f"learned.{name}", table.shape, spec.std) if spec.std else 0.0
                table.copy_(torch.full_like(table, spec.init) + noise)

    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v in heads."""
        return self.in_heads(*joined_linear(x, [self.q, self.k, self.v]))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values (batch, heads, time, dim)."""
        if cache is not None:
            k, v = cache.append("k", k), cache.append("v", v)
        return scored_attend(q, k, v, self.change, **self._given(frame, q.device))

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the map (batch, heads, time, time)."""
        q, k, _ = self.positioned(x, frame)
        return scored_weights(q, k, self.change, **self._given(frame, x.device))

    def _given(self, frame: Frame, device: torch.device) -> dict[str, Any]:
        """Return positions, padding, normalization and learned tensors, as the kernels take them."""
        return {
            "i": frame.positions(device),
            "j": frame.positions(device, keys=True),
            "padding": frame.padding,
            "normalize": self.score.normalize,
            "learned": tuple(self.learned.values()),
        }

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return projections + score and mix over the visible keys (causal) or all keys (full).

        A decoding step scores every cached key and then hides some. The function itself is elementwise and not counted,
        like the softmax.
        """
        linear, per_key = self.linear_flops(mode), self.key_flops(mode)
        full = linear + per_key * context
        if mode == "decode":
            return Flops(full, full)
        seen = visible_keys(self.options, self.heads, self.shape.context, context)
        return Flops(linear + per_key * seen, full)


@cache
def scored_mechanism(score: Score, name: str) -> type[Scored]:
    """Return the mechanism class of a user's score function, with its options, under the name by which it was found."""
    score = dataclasses.replace(score, name=name)
    members = {
        "name": name,
        "Options": score.options_class(ScoredOptions),
        "__module__": score.function.__module__,
        "__doc__": score.function.__doc__ or score.summary,
    }
    return type(name, (Scored,), members)
