"""A row of metrics.jsonl: what a run logs after an interval of training, or at an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from headtohead.common.typed import Number

_LARGEST_LOGGED, _SMALLEST_LOGGED = 1e100, 1e-100
"""Bounds of logged numbers: squares, sums and ratios of them are finite. Values of float32 are well inside."""
_LARGEST_COUNT = 2**53
"""Upper bound of a count; larger integers do not fit into a float."""
_Logged = Annotated[float, Meta(gt=-_LARGEST_LOGGED, lt=_LARGEST_LOGGED)]
_Layers = Annotated[list[Annotated[float, Meta(ge=0, lt=_LARGEST_LOGGED)] | None], Meta(min_length=1)]
Circuits = dict[str, dict[str, _Layers]]
"""Lists of numbers over layers, by circuit and quantity."""


class LoggedRow(Struct, frozen=True, gc=False):
    """A row of training, or with `valid` of an evaluation; a number is None if it is not logged or not finite."""

    step: Annotated[int, Meta(ge=0, lt=_LARGEST_COUNT)]
    tokens: Annotated[int, Meta(ge=1, lt=_LARGEST_COUNT)] | None = None
    nats: _Logged | None = None
    lr: _Logged | None = None
    grad_norm: _Logged | None = None
    grad_norm_max: _Logged | None = None
    seconds: Annotated[float, Meta(ge=0, lt=1e9)] | None = None
    circuits: Circuits | None = None
    valid: Mapping[str, Number | None] | None = None
    test: Mapping[str, Number | None] | None = None

    def __post_init__(self) -> None:
        for value in (self.nats, self.lr, self.grad_norm, self.grad_norm_max, self.seconds):
            if value and abs(value) < _SMALLEST_LOGGED:
                raise ValueError(f"{value} is too small")
        if self.test is not None and self.valid is None:
            raise ValueError("an evaluation without valid")
