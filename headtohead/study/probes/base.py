"""Probes: measurements on a trained run other than its loss.

A probe is not part of a run's identity: it can be requested after the run is done, and is taken again if its file is
missing or damaged. Its result is stored in the run directory as probes/NAME.json, with a checksum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.common.numbers import is_number
from headtohead.data.shards import Prepared
from headtohead.data.tasks.base import Task
from headtohead.data.tokenizers import Tokenizer
from headtohead.model.decoder import Decoder

Found = dict[str, Any]
NONE = {"none": str}
"""The form of a probe's result if there is nothing to measure: the reason."""
NUMBER = (float, None)
"""A number, or null if undefined."""
_LARGEST = 1e15


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
    """The form of its result, in the notation of `fits`."""
    check: Callable[[str], str] | None = None
    """Returns the argument in canonical form or raises UserError; None: the probe takes no argument."""
    argument: str = ""
    """Help text for the argument."""
    amount: bool = False
    """Whether the argument is an amount rather than a choice of what to measure."""
    ready: Callable[[str, str | Path | None], None] | None = None
    """Called with the argument and the data directory before training; raises UserError if data is missing."""
    of: str = "corpora"
    """The studies it applies to: `corpora` or `tasks`."""


def whole_number(argument: str, probe: str, what: str, usual: int, most: int) -> str:
    """Return an integer argument in canonical form, empty for the default `usual`."""
    short = argument.isdecimal() and len(argument) <= 12
    if argument and not (short and 1 <= int(argument) <= most):
        raise UserError(f"probe {probe} takes the number of {what}, 1 to {most:,}, got '{argument[:40]}'")
    return "" if not argument or int(argument) == usual else str(int(argument))


def fits(value: Any, form: Any) -> bool:
    """Return whether a value from an untrusted file has the given form.

    float, int, str and bool are values of that type, with numbers finite and below 1e15; None is null; [form] is a list
    of `form`; a tuple lists alternatives; {"a": form} is a table with at least these keys; {str: form} is a table in
    which every value has `form`.
    """
    if isinstance(form, tuple):
        return any(fits(value, one) for one in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return False
        if str in form:
            return all(fits(item, form[str]) for item in value.values())
        return all(key in value and fits(value[key], one) for key, one in form.items())
    if form is None:
        return value is None
    if form is float:
        return is_number(value) and abs(value) < _LARGEST
    return type(value) is form and (form is not int or abs(value) < _LARGEST)


def number_at(found: Any, path: str) -> float | None:
    """Return the number at a path such as `mean.sink`, or None if there is none."""
    for key in path.split("."):
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return float(found) if fits(found, float) else None
