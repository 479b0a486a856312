"""Means over seeds of the numbers of probes that have no chart of their own."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headtohead.report.panels.base import Figure, Table, View
from headtohead.study.probes import Found, number_at
from headtohead.study.probes.copies import DEEP, Copies
from headtohead.study.probes.phases import Phases
from headtohead.study.probes.projections import Projections


@dataclass(frozen=True)
class Means:
    """The numbers of a probe that are shown for each arm."""

    form: type[Found]
    """The type of the probe's result."""
    title: str
    words: str
    columns: Mapping[str, str]
    """Heading of each number, by its path in the result."""


MEANS = {
    "phases": Means(
        Phases,
        "Phases.",
        "The order parameter is 1 if the phases of a window agree, that of random phases is the column chance. Coupling is how strongly a "
        "token is pulled, 0 to 1; overshoots is the share of updates that go beyond the phase that they are pulled to. Gate entropy is 1 if all "
        "gates are equal.",
        {
            "mean.order": "order parameter",
            "chance": "chance",
            "mean.pull": "coupling",
            "mean.overshoots": "overshoots",
            "mean.gate_entropy": "gate entropy",
        },
    ),
    "projections": Means(
        Projections,
        "Trained projections.",
        "Cosine of the weights of two projections, flattened per head, and effective rank of one as a share of the width. Layers with tied projections are left out.",
        {
            "mean.weights.kv": "cosine K, V",
            "mean.weights.qk": "cosine Q, K",
            "mean.weights.qv": "cosine Q, V",
            "mean.rank_share.q": "rank Q",
            "mean.rank_share.k": "rank K",
            "mean.rank_share.v": "rank V",
        },
    ),
    "copies": Means(
        Copies,
        "Copying.",
        f"Mean loss in nats per token on held-out windows, of tokens that continue an earlier match of {DEEP} or more tokens and of all others.",
        {"copied": "after a match", "new": "others"},
    ),
}


def figure(name: str, view: View) -> Figure | None:
    """Return the means of a probe for each arm, if it was run."""
    means = MEANS[name]
    found = {arm.label: [row for rows in arm.found(means.form).values() for row in rows] for arm in view.arms}
    rows = [
        (label, *(_cell([number_at(row, path) for row in taken]) for path in means.columns))
        for label, taken in found.items()
        if taken
    ]
    if not rows:
        return None
    words = f"{means.words} Mean over seeds, plus or minus their standard deviation."
    return Figure(means.title, words, table=Table(("arm", *means.columns.values()), rows))


def _cell(numbers: Sequence[float | None]) -> str:
    known = [number for number in numbers if number is not None]
    if not known:
        return "–"
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    return f"{statistics.fmean(known):.3f} ± {spread:.3f}" if spread else f"{known[0]:.3f}"
