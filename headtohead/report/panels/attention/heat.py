"""Examples by attention on relevant tokens and probability of the correct answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import altair as alt

from headtohead.report.charts import Chart, Row, header_size, named, tips
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.attention.explain import EXPLANATIONS, found_by_seed
from headtohead.report.panels.base import Figure, View

_GRID = "common"
_SIDE = 190


def figure(view: View) -> Figure | None:
    """Return the heat maps, if the probe found relevant tokens and attention maps."""
    rows, name = heat_rows(view.arms)
    if not rows:
        return None
    words = (
        f"Test examples of all seeds by share of attention on relevant tokens ({EXPLANATIONS[name]}, x) and probability of the "
        "correct answer (y), in percent of examples. Top right: correct with attention on relevant tokens. Top left: correct "
        "without it."
    )
    shown = {row["arm"] for row in rows}
    if absent := [arm.label for arm in view.arms if found_by_seed(arm) and arm.label not in shown]:
        words += f" Without attention map: {', '.join(absent)}."
    return Figure("Attention and correctness.", words, heat_maps(rows, view.labels), "Hover for the counts.")


def heat_rows(arms: Sequence[ArmFacts]) -> tuple[list[Row], str]:
    """Return one row per arm and cell, summed over seeds, of the first explanation any arm has; and its name."""
    for name in ("rollout", "layer_mean"):
        rows = [row for arm in arms for row in _cells(arm, name)]
        if rows:
            return rows, name
    return [], ""


def _cells(arm: ArmFacts, name: str) -> list[Row]:
    found = [
        row.explanations[name].heat_maps for row in found_by_seed(arm).values() if name in row.explanations
    ]
    maps = [grids[_GRID] for grids in found if _GRID in grids]
    # Stored grids may differ in shape; only equal ones can be summed.
    sides = {(tuple(one.edges), *(len(line) for line in one.counts)) for one in maps}
    if len(sides) != 1 or any(count != len(maps[0].edges) - 1 for count in next(iter(sides))[1:]):
        return []
    edges = list(pairwise(maps[0].edges))
    total = sum(sum(map(sum, one.counts)) for one in maps)
    if len(maps[0].counts) != len(edges) or not total:
        return []
    rows = []
    for column, mass in enumerate(edges):
        for other, right in enumerate(edges):
            count = sum(one.counts[column][other] for one in maps)
            words = f"{100 * count / total:.0f}" if count else ""
            place = {"arm": arm.label, "mass": _between(*mass), "right": _between(*right)}
            rows.append(place | {"examples": count, "share": count / total, "words": words})
    return rows


def _between(low: float, high: float) -> str:
    return f"{100 * low:.0f}–{100 * high:.0f}"


def heat_maps(rows: list[Row], labels: Sequence[str]) -> Chart:
    """Return one map per arm, all on one scale."""
    columns = list(dict.fromkeys(row["mass"] for row in rows))
    plain = alt.Axis(labelAngle=0, domain=False, ticks=False, labelFontSize=11)
    x = alt.X("mass:N", sort=columns, title="attention on relevant tokens, %", axis=plain)
    y = alt.Y("right:N", sort=columns[::-1], title="probability of the correct answer, %", axis=plain)
    base = named("cells")
    shade = alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0.04, 1]), legend=None)
    hover = tips("arm", "mass", "right", "examples", share=".1%")
    cells = base.mark_rect(color="#1f8ae0", stroke="#8886", strokeWidth=0.5)
    cells = cells.encode(x=x, y=y, opacity=shade, tooltip=hover)
    text = base.mark_text(fontSize=12).encode(x=x, y=y, text="words:N")
    header = alt.Header(
        title=None, labelFontSize=header_size(labels), labelFontWeight="normal", labelLimit=_SIDE
    )
    chart = (
        alt.layer(cells, text)
        .properties(width=_SIDE, height=_SIDE)
        .facet(facet=alt.Facet("arm:N", sort=list(labels), header=header), columns=3, spacing=14)
    )
    chart.datasets = {"cells": rows}
    return chart
