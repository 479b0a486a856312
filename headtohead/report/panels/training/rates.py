"""Learning-rate tuning."""

from __future__ import annotations

import altair as alt

from headtohead.common.text import counted
from headtohead.report.charts import Row, legend, lines, named, tips
from headtohead.report.panels.base import Figure, View


def figure(view: View) -> Figure | None:
    """Return each arm's score on valid against the learning rate, if rates were tuned; the selected rate is filled."""
    rates = [rate for rate in view.manifest.rates(view.contest) if rate.score is not None]
    if not rates:
        return None
    rows: list[Row] = [
        {"arm": rate.label, "lr": rate.lr, "value": rate.score, "chosen": rate.chosen} for rate in rates
    ]
    tried = alt.Axis(values=sorted({row["lr"] for row in rows}), format=".2~g", labelOverlap=True)
    x = alt.X("lr:Q", title="learning rate", scale=alt.Scale(type="log", nice=False, padding=20), axis=tried)
    y = alt.Y("value:Q", title=f"{view.unit} on valid", scale=alt.Scale(zero=False, nice=True))
    color, hover = view.color(legend()), tips("arm", "chosen", lr=".2g", value=".4f")
    filled = named("points").transform_filter("datum.chosen").mark_point(filled=True, size=130, opacity=1)
    chosen = filled.encode(x=x, y=y, color=color, tooltip=hover)
    chart = lines(rows, x, y, color, hover, points=60, filled=False, over=[chosen])
    seeds = counted(rates[0].seeds, "seed")
    words = f"Same grid for all arms, {seeds}, scored on valid; each arm is then trained at its filled point."
    return Figure("Learning-rate tuning.", words, chart)
