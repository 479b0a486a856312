"""Score of every seed."""

from __future__ import annotations

from collections.abc import Mapping

from headtohead.report.charts import Chart, Row, dots, references
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.study.store.manifest import METRIC


def figure(view: View) -> Figure | None:
    """Return the score of every finished run."""
    if not (rows := seed_rows(view.arms, view.measure.name)):
        return None
    words = "One dot per run on the test split; the bar is the mean."
    lines = {} if view.measure.name == METRIC else view.references
    if lines:
        known = ", ".join(f"{name} {value:.3f}" for name, value in lines.items())
        words += f" Dotted: references without a model, by guessing or by the most frequent answer ({known})."
    return Figure("Scores by seed.", words, seed_values(rows, view, f"{view.unit} on test", lines))


def seed_rows(arms: list[ArmFacts], metric: str = METRIC) -> list[Row]:
    """Return the test score of every finished run."""
    return [
        {"arm": arm.label, "seed": seed, "value": value}
        for arm in arms
        for seed, value in arm.scores(metric).items()
    ]


def seed_values(rows: list[Row], view: View, title: str, known: Mapping[str, float]) -> Chart:
    """Return the score of every seed, each arm's mean, and reference lines if any are known."""
    marks = references(known, ".3f").mark_rule(strokeDash=[2, 3], color="#999")
    under = [marks.encode(x="value:Q", tooltip="words:N")] if known else []
    return dots([], rows, view.labels, view.color(), f"{title} ({view.side} is better)", under=under)
