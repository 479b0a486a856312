"""Probe `positions`: loss by position in the window."""

from __future__ import annotations

from headtohead.evaluation.loss import nats_by_position
from headtohead.study.probes.base import Found, Probe, Subject


def _measure(subject: Subject, _: str) -> Found:
    bins = nats_by_position(
        subject.model,
        subject.corpus.splits["test"],
        precision=subject.precision,
        progress=subject.progress,
    )
    return {"bins": bins}


PROBE = Probe(
    "mean nats on the test split by position in the window, in bins that double",
    _measure,
    {"bins": [[float]]},
)
