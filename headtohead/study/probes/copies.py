"""Probe `copies`: loss by the length of the longest earlier match in the window."""

from __future__ import annotations

import math
from itertools import pairwise

from msgspec import Struct
from torch import Tensor

from headtohead.common.typed import Count
from headtohead.evaluation.copies import nats_and_matches
from headtohead.study.probes.base import Found, Maybe, Probe, Subject, whole_number

WINDOWS = 256
BINS = (0, 1, 2, 4, 8, 16)
"""The shortest match of each bin."""
DEEP = 4
"""The shortest match that counts as copied."""


class Copies(Struct, frozen=True):
    """The result: tokens and their mean nats, by the shortest match of a bin; null where no token is."""

    windows: Count
    tokens: dict[str, Count]
    nats: dict[str, Maybe]
    copied: Maybe
    """Mean nats of tokens after a match of four or more."""
    new: Maybe
    """Mean nats of the others."""


def _measure(subject: Subject, argument: str) -> Found:
    windows = subject.windows(int(argument or WINDOWS), subject.model.size.context + 1)
    nats, matches = nats_and_matches(subject.model, windows, subject.precision)

    def chosen(low: float, high: float) -> Tensor:
        return nats[(matches >= low) & (matches < high)]

    bins = {f"{low:g}": chosen(low, high) for low, high in pairwise((*BINS, math.inf))}
    return Copies(
        len(windows),
        {name: len(part) for name, part in bins.items()},
        {name: _mean(part) for name, part in bins.items()},
        _mean(chosen(DEEP, math.inf)),
        _mean(chosen(0, DEEP)),
    )


def _mean(nats: Tensor) -> float | None:
    return float(nats.mean()) if len(nats) else None


PROBE = Probe(
    f"mean nats by the length of the longest earlier match in the window, over {WINDOWS} held-out windows",
    _measure,
    Copies,
    lambda text: whole_number(text, "copies", "windows", WINDOWS, 65536),
    "number of windows",
    amount=True,
    words={"copied": f"nats per token after a match of {DEEP} or more tokens"},
)
