"""Score of every seed."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt

from headtohead.report.charts import Chart, Row, arm_axis
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
    title = f"{view.unit} on test ({view.side} is better)"
    return Figure("Scores by seed.", words, seed_values(rows, view.labels, view.scale, title, lines))


def seed_rows(arms: list[ArmFacts], metric: str = METRIC) -> list[Row]:
    """Return the test score of every finished run."""
    return [
        {"arm": arm.label, "seed": seed, "value": score.values[metric]}
        for arm in arms
        for seed, score in arm.finished().items()
    ]


def seed_values(
    rows: list[Row],
    order: list[str],
    scale: alt.Scale,
    title: str = "bits per byte on test (left is better)",
    references: Mapping[str, float] | None = None,
) -> Chart:
    """Return the test score of every seed, each arm's mean, and reference lines if given."""
    data = alt.Data(values=rows)
    y = alt.Y(
        "arm:N",
        sort=order,
        title=None,
        axis=arm_axis(),
    )
    x = alt.X("value:Q", title=title, scale=alt.Scale(zero=False, nice=True))
    color = alt.Color("arm:N", scale=scale, legend=None)
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("seed:O"), alt.Tooltip("value:Q", format=".4f")]
    dots = alt.Chart(data).mark_circle(size=80, opacity=0.75).encode(x=x, y=y, color=color, tooltip=tips)
    means = (
        alt.Chart(data).mark_tick(thickness=2.5, size=26).encode(x=alt.X("mean(value):Q"), y=y, color=color)
    )
    layers = [dots, means]
    if references:
        named = [{"value": value, "words": f"{name} {value:.3f}"} for name, value in references.items()]
        base = alt.Chart(alt.Data(values=named)).encode(x=alt.X("value:Q"))
        layers.append(base.mark_rule(strokeDash=[2, 3], color="#999").encode(tooltip=["words:N"]))
    return alt.layer(*layers).properties(width="container", height=36 * len(order))
