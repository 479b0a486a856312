"""The test fixture of one mechanism: a small shape, seeded inputs, both precisions."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headtohead.mechanisms.contract.base import (
    Companion,
    CompanionSpec,
    Frame,
    Mechanism,
    Rotary,
    Shape,
    seeded_draw,
)
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Settings, Size
from headtohead.model.spaces import Space, find_space

TIME = 11  # odd and prime, so that no window, chunk or head count divides it
TOLERANCE = 1e-10  # relative, in float64
VOCABULARY = 16


class Failure(Exception):
    """A failed check, with its message."""


@dataclasses.dataclass
class Fixture:
    """One mechanism with one set of options, and the inputs of the checks."""

    composed: Composed
    shape: Shape

    @classmethod
    def of(cls, composed: Composed, positions: str = "rope", bias: str = "none", heads: int = 4) -> Fixture:
        """Return the default fixture: width 16, two layers, layer 1."""
        return cls(composed, Shape(16, heads, 1, 2, 64, positions=positions, bias=bias))  # type: ignore[arg-type]

    def mechanism(self, dtype: torch.dtype = torch.float64, seed: int = 3) -> Mechanism:
        """Return the mechanism with initial values at ten times the usual scale plus noise, so that errors show."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            mechanism = self.composed.build(self.shape)
        mechanism.initialise(seeded_draw(seed, "check", 0.2))
        _perturb(mechanism)
        return mechanism.to(dtype).eval()

    def model(self, dtype: torch.dtype = torch.float64, seed: int = 3) -> Decoder:
        """Return a decoder of two blocks with this mechanism, with initial values changed as in `mechanism`."""
        text = [(7 * place + place // 5) % VOCABULARY for place in range(2 * self.shape.context)]
        decoder = Decoder(self.size, [self.composed] * 2, seed, companion=text)
        _perturb(decoder)
        return decoder.to(dtype).eval()

    @property
    def size(self) -> Size:
        """The size of that decoder, with the fixture's positions and biases."""
        shape = self.shape
        settings = Settings(positions=shape.positions, bias=shape.bias, init_std=0.2)
        return Size("check", shape.width, 2, shape.heads, 24, VOCABULARY, shape.context, settings)

    def tokens(self, batch: int = 3, time: int = TIME, seed: int = 5) -> Tensor:
        """Return tokens (batch, time) for `model`."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, VOCABULARY, (batch, time), generator=generator)

    @cached_property
    def space(self) -> Space:
        """Return the residual space of this mechanism."""
        mechanism = self.composed.build(self.shape)
        return find_space(mechanism.residual, self.size, mechanism.residual_options)

    @cached_property
    def companion(self) -> CompanionSpec | None:
        """What the mechanism requires of a companion."""
        return self.mechanism().companion_spec()

    def inputs(
        self, batch: int = 3, time: int = TIME, dtype: torch.dtype = torch.float64, seed: int = 5
    ) -> Tensor:
        """Return states x (batch, time, width) of the residual space."""
        free = torch.randn(batch, time, self.shape.width, generator=torch.Generator().manual_seed(seed))
        return self.space.place(free).to(dtype)

    def frame(
        self,
        x: Tensor,
        start: int = 0,
        padding: Tensor | None = None,
        causal: bool = True,
        embeddings: Any = None,
    ) -> Frame:
        """Return the frame of x; only the first rows get the companion, as in the decoder."""
        companion = None
        if self.companion and start == 0:
            rows = self.inputs(batch=1, time=self.companion.length, dtype=x.dtype, seed=17)
            companion = Companion(rows.to(x.device))
        return Frame(
            start=start,
            time=x.shape[1],
            causal=causal,
            padding=padding,
            rotary=Rotary(10_000.0, 64) if self.shape.positions == "rope" else None,
            embeddings=x.detach().flip(-1) if embeddings is None else embeddings,
            norm=lambda tensor: tensor,
            companion=companion,
        )

    def run(
        self, mechanism: Mechanism, x: Tensor, padding: Tensor | None = None, causal: bool = True
    ) -> Tensor:
        """Return the mechanism's output for x."""
        output: Tensor = mechanism(x, self.frame(x, padding=padding, causal=causal))
        return output

    def decode(
        self, mechanism: Mechanism, x: Tensor, cache: Cache, start: int, padding: Tensor | None
    ) -> Tensor:
        """Return the output for the rows x after `start` cached ones."""
        seen = None if padding is None else padding[:, : start + x.shape[1]]
        output: Tensor = mechanism(x, self.frame(x, start, seen), cache)
        cache.length = start + x.shape[1]
        return output


@torch.no_grad()
def _perturb(module: torch.nn.Module) -> None:
    """Add noise: parameters with a constant initial value, such as a zero matrix, hide what they multiply."""
    draw = seeded_draw(0, "shake", 0.1)
    for name, parameter in module.named_parameters():
        parameter.add_(draw(name, parameter.shape))


@torch.no_grad()
def relative(got: Tensor, wanted: Tensor, least: float = 1e-30) -> float:
    """Return max |got - wanted| / max |wanted|; a scale below `least` counts as `least`."""
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got - wanted).abs().max()) / max(float(wanted.abs().max()), least, 1e-30)


def require(condition: bool, message: str) -> None:
    """Raise Failure with the message unless the condition holds."""
    if not condition:
        raise Failure(message)


def require_close(
    got: Tensor, wanted: Tensor, message: str, tolerance: float = TOLERANCE, least: float = 1e-30
) -> None:
    """Raise Failure with the message, in which {error} is the relative error, unless two tensors agree."""
    error = relative(got, wanted, least)
    require(error < tolerance, message.replace("{error}", f"{error:.1e}"))
