"""Probe `positions`: loss by position in the window."""

from __future__ import annotations

from msgspec import Struct

from headtohead.common.typed import Number
from headtohead.evaluation.loss import nats_by_position
from headtohead.study.probes.base import Found, Probe, Subject


class Positions(Struct, frozen=True):
    """The result: [first position, last position, mean nats] of each bin."""

    bins: list[list[Number]]


def _measure(subject: Subject, _: str) -> Found:
    bins = nats_by_position(
        subject.model,
        subject.corpus.splits["test"],
        precision=subject.precision,
        progress=subject.progress,
    )
    return Positions(bins)


PROBE = Probe(
    "mean nats on the test split by position in the window, in bins that double",
    _measure,
    Positions,
)
