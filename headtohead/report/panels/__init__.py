"""Panels of a report, one file each; register a new panel here.

A panel's `figure` takes one contest, or all contests of the study, and returns a `Figure`, or None without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headtohead.report.panels.attention import explain, heat, indicators, maps, means, positions, skip
from headtohead.report.panels.base import Chip, Figure, Table, View
from headtohead.report.panels.datasets import corpora, matrix, tasks
from headtohead.report.panels.training import circuits, cost, curves, rates, stability
from headtohead.report.panels.verdicts import claims, forest, ratios, seeds, trends, wins
from headtohead.study.judge.trends import OVER

CONTEST: dict[str, Callable[[View], Figure | None]] = {
    "forest": forest.figure,
    "curves": curves.figure,
    "cost": cost.figure,
    "rates": rates.figure,
    "ratios": ratios.figure,
    "circuits": circuits.figure,
    "seeds": seeds.figure,
    "positions": positions.figure,
    "tasks": tasks.figure,
    "explain": explain.figure,
    "heat": heat.figure,
    "indicators": indicators.figure,
    "maps": maps.figure,
    "skip": skip.figure,
    **{name: partial(means.figure, name) for name in means.MEANS},
    "stability": stability.figure,
}
"""Drawn for each contest, in this order; the first is above the verdict table."""
STUDY: dict[str, Callable[[Sequence[View]], Figure | None]] = {
    "claims": claims.figure,
    **{f"gap-{over.replace('_', '-')}": partial(trends.figure, over) for over in OVER},
    "wins": wins.figure,
    "matrix": matrix.figure,
    "corpora": corpora.figure,
}
"""Drawn once per study, from all contests."""

__all__ = ["CONTEST", "STUDY", "Chip", "Figure", "Table", "View"]
