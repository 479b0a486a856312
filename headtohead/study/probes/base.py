"""Probes: measurements on a trained run other than its loss.

A probe is not part of a run's identity: it can be requested after the run is done, and is taken again if its file is
missing or damaged. Its result is stored in the run directory as probes/NAME.json, with a checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.common.numbers import is_number
from headtohead.common.typed import Number
from headtohead.data.shards import Prepared
from headtohead.data.tasks.base import Task
from headtohead.data.tokenizers import Tokenizer
from headtohead.model.decoder import Decoder

Found = Struct | Mapping[str, Struct]
"""The result of a probe: its own Struct, or one for each of several things measured, or `Unavailable`."""
Maybe = Number | None
"""A number, or null if undefined."""


class Unavailable(Struct, frozen=True):
    """The result of a probe on a run that has nothing to measure."""

    none: str
    """The reason."""


@dataclass(frozen=True)
class Subject:
    """The trained run that a probe measures."""

    model: Decoder
    """In evaluation mode, on the device the study runs on."""
    dataset: Prepared | Task
    """The corpus or the task it was trained on."""
    source: str
    """The name of that corpus or task."""
    precision: str
    """The precision it was trained in."""
    data_dir: str = ""
    progress: Callable[[float], None] = lambda share: None

    @property
    def corpus(self) -> Prepared:
        """The corpus it was trained on."""
        assert isinstance(self.dataset, Prepared)
        return self.dataset

    @property
    def tokenizer(self) -> Tokenizer:
        """The corpus' tokenizer."""
        return self.corpus.tokenizer

    @property
    def task(self) -> Task:
        """The task it was trained on."""
        assert isinstance(self.dataset, Task)
        return self.dataset

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.readout.device

    def windows(self, count: int, length: int) -> Tensor:
        """Return at most `count` windows (windows, length) of the test split, spread evenly over it."""
        text = self.corpus.splits["test"].tokens
        length = min(length, len(text))
        most = len(text) // length
        count = min(count, most)
        rows = [text[index * most // count * length :][:length] for index in range(count)]
        return torch.tensor([[int(token) for token in row] for row in rows], device=self.device)


@dataclass(frozen=True)
class Probe:
    """A probe: its description, its measurement, and the argument in NAME:ARGUMENT."""

    about: str
    measure: Callable[[Subject, str], Found]
    form: Any
    """The type of its result; a stored one is read with msgspec."""
    check: Callable[[str], str] | None = None
    """Returns the argument in canonical form or raises UserError; None: the probe takes no argument."""
    argument: str = ""
    """Help text for the argument."""
    amount: bool = False
    """Whether the argument is an amount rather than a choice of what to measure."""
    needs: Callable[[str], Sequence[str]] | None = None
    """Returns the corpora and tasks that it reads, from its argument; they are looked for before training."""
    timed: bool = False
    """Whether it measures time, so that its result depends on the machine."""
    of: str = "corpora"
    """The studies it applies to: `corpora` or `tasks`."""
    words: Mapping[str, str] = field(default_factory=dict)
    """What some of its numbers are, by path, for people who read claims about them."""


def whole_number(argument: str, probe: str, what: str, usual: int, most: int) -> str:
    """Return an integer argument in canonical form, empty for the default `usual`."""
    short = argument.isdecimal() and len(argument) <= 12
    if argument and not (short and 1 <= int(argument) <= most):
        raise UserError(f"probe {probe} takes the number of {what}, 1 to {most:,}, got '{argument[:40]}'")
    return "" if not argument or int(argument) == usual else str(int(argument))


def number_at(found: Any, path: str) -> float | None:
    """Return the number at a path such as `mean.sink`, or None if there is none."""
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else getattr(found, key, None)
    return float(found) if is_number(found) else None
