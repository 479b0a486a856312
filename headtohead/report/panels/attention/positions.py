"""Loss by position in the window."""

from __future__ import annotations

import math
import statistics

import altair as alt

from headtohead.report.charts import Chart, Row, legend
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View


def figure(view: View) -> Figure | None:
    """Return mean loss by position, if the probe was run."""
    if not (rows := position_rows(view.arms)):
        return None
    words = (
        "Bits per token on the test split by position in the window, mean over seeds; the band spans all seeds. A curve that "
        "keeps falling to the right shows use of distant context."
    )
    return Figure("Loss by position.", words, loss_by_position(rows, view.scale))


def position_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return mean, lowest and highest bits per token over seeds, by bin of positions."""
    rows = []
    for arm in arms:
        bins: dict[tuple[int, int], list[float]] = {}
        for found in arm.probes.get("positions", {}).values():
            for first, last, nats in found["bins"]:
                bins.setdefault((int(first), int(last)), []).append(nats / math.log(2))
        rows += [
            {
                "arm": arm.label,
                "position": math.sqrt(first * last),
                "place": f"{first}" if first == last else f"{first} to {last}",
                "mean": statistics.fmean(values),
                "low": min(values),
                "high": max(values),
            }
            for (first, last), values in sorted(bins.items())
        ]
    return rows


def loss_by_position(rows: list[Row], scale: alt.Scale) -> Chart:
    """Return loss against position, one line and band per arm."""
    data = alt.Chart(alt.Data(values=rows))
    x = alt.X(
        "position:Q",
        title="position in the window",
        scale=alt.Scale(type="log", nice=False),
        axis=alt.Axis(format="~s", grid=False, labelOverlap=True),
    )
    y = alt.Y("mean:Q", title="bits per token", scale=alt.Scale(zero=False, nice=True))
    color = alt.Color("arm:N", scale=scale, legend=legend())
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("place:N", title="positions")]
    tips += [alt.Tooltip(f"{name}:Q", format=".4f") for name in ("mean", "low", "high")]
    layers = [
        data.mark_area(opacity=0.16).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color),
        data.mark_line(strokeWidth=2).encode(x=x, y=y, color=color),
        data.mark_point(filled=True, size=45, opacity=1).encode(x=x, y=y, color=color, tooltip=tips),
    ]
    return alt.layer(*layers).properties(width="container", height=300)
