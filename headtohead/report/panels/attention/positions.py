"""Loss by position in the window."""

from __future__ import annotations

import math
import statistics

import altair as alt

from headtohead.report.charts import Row, legend, lines, tips
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.study.probes.positions import Positions


def figure(view: View) -> Figure | None:
    """Return mean loss by position, if the probe was run."""
    if not (rows := position_rows(view.arms)):
        return None
    words = (
        "Bits per token on the test split by position in the window, mean over seeds; the band spans all seeds. A curve that "
        "keeps falling to the right shows use of distant context."
    )
    axis = alt.Axis(format="~s", grid=False, labelOverlap=True)
    scale = alt.Scale(type="log", nice=False)
    x = alt.X("position:Q", title="position in the window", scale=scale, axis=axis)
    y = alt.Y("mean:Q", title="bits per token", scale=alt.Scale(zero=False, nice=True))
    hover = tips("arm", "positions", mean=".4f", low=".4f", high=".4f")
    chart = lines(rows, x, y, view.color(legend(lines=True)), hover, band=0.16, points=45, height=300)
    return Figure("Loss by position.", words, chart)


def position_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return mean, lowest and highest bits per token over seeds, by bin of positions."""
    rows = []
    for arm in arms:
        bins: dict[tuple[int, int], list[float]] = {}
        for (found,) in arm.found(Positions).values():
            for first, last, nats in found.bins:
                bins.setdefault((int(first), int(last)), []).append(nats / math.log(2))
        for (first, last), values in sorted(bins.items()):
            place = f"{first}" if first == last else f"{first} to {last}"
            row = {"arm": arm.label, "position": math.sqrt(first * last), "positions": place}
            rows.append(row | {"mean": statistics.fmean(values), "low": min(values), "high": max(values)})
    return rows
