"""What a probe is: something measured on a trained run besides its loss, and kept beside its result.

A probe is no part of what a run is: it may be asked for when the run is long done, and is made again where its file is
missing or damaged. What it found stands in the run's directory as probes/NAME.json, sealed with a checksum.
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
"""The form of what a probe finds where there is nothing to find, with the reason."""
NUMBER = (float, None)
"""A number, or null where it is not defined."""
_LARGEST = 1e15


@dataclass(frozen=True)
class Subject:
    """A trained run under a probe."""

    model: Decoder
    """In evaluation mode, on the device the study runs on."""
    dataset: Prepared | Task
    """The corpus or the task it was trained on."""
    record: dict[str, Any]
    """Its spec.json."""
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
    def precision(self) -> str:
        """The precision it was trained in."""
        return str(self.record["training"]["precision"])

    @property
    def device(self) -> torch.device:
        """Where the model stands."""
        return self.model.readout.device

    def windows(self, count: int, length: int) -> Tensor:
        """Return at most `count` windows (windows, length) of the test split, spread evenly over it."""
        text = self.corpus.splits["test"].tokens
        length = min(length, len(text))
        most = len(text) // length
        count = min(count, most)
        rows = [text[place * most // count * length :][:length] for place in range(count)]
        return torch.tensor([[int(token) for token in row] for row in rows], device=self.device)


@dataclass(frozen=True)
class Probe:
    """A named probe: a line about it, how it measures, and what may stand behind its name and a colon."""

    about: str
    measure: Callable[[Subject, str], Found]
    form: Any
    """What it finds looks like this; `fits` says how that is written."""
    check: Callable[[str], str] | None = None
    """Returns the argument in its one spelling, or raises UserError; None: the probe takes no argument."""
    argument: str = ""
    """What may stand behind the colon, for people."""
    amount: bool = False
    """Whether the argument says how much is measured, rather than what."""
    ready: Callable[[str, str | Path | None], None] | None = None
    """Raises UserError where what the argument names is not at hand; asked, with the data directory, before training."""
    of: str = "corpora"
    """Whose runs it serves: those of studies of `corpora`, or of `tasks`."""


def whole_number(argument: str, probe: str, what: str, usual: int, most: int) -> str:
    """Return an argument that is a whole number in its one spelling, nothing for the usual one."""
    if argument and not (argument.isdecimal() and 1 <= int(argument) <= most):
        raise UserError(f"probe {probe} takes how many {what}, 1 to {most:,}, got '{argument}'")
    return "" if not argument or int(argument) == usual else str(int(argument))


def fits(value: Any, form: Any) -> bool:
    """Return whether a value from a file has a form: nothing behind it is trusted.

    float, int, str and bool mean themselves, finite and of sane size; None is null; [form] is a list of it; a tuple
    holds alternatives; {"a": form} a table with at least these, {str: form} a table whose every value has the form.
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
    """Return the number at a path such as `mean.sink`, or None where there is none."""
    for word in path.split("."):
        if not isinstance(found, dict) or word not in found:
            return None
        found = found[word]
    return float(found) if fits(found, float) else None
