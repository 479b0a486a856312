"""Learning-rate tuning."""

from __future__ import annotations

import altair as alt

from headtohead.report.charts import Chart, Row
from headtohead.report.panels.base import Figure, View
from headtohead.study.store.manifest import Contest, Manifest


def figure(view: View) -> Figure | None:
    """Return score against learning rate, if rates were tuned."""
    if not (rows := rate_rows(view.manifest, view.contest)):
        return None
    words = "Same grid for all arms, one seed, scored on valid; each arm is then trained at its filled point."
    return Figure("Learning-rate tuning.", words, learning_rates(rows, view.scale, view.unit))


def rate_rows(manifest: Manifest, contest: Contest) -> list[Row]:
    """Return each arm's score on valid by learning rate; rates that failed to train are left out."""
    place = (contest.corpus, contest.size, contest.context, contest.shape)
    return [
        {"arm": row.label, "lr": row.lr, "value": row.score, "chosen": row.chosen}
        for row in manifest.tuning
        if (row.corpus, row.size, row.context, row.shape) == place and row.score is not None
    ]


def learning_rates(rows: list[Row], scale: alt.Scale, unit: str = "bits per byte") -> Chart:
    """Return each arm's score on valid against the learning rate; the selected rate is filled."""
    data = alt.Chart(alt.Data(values=rows))
    tried = alt.Axis(values=sorted({row["lr"] for row in rows}), format=".2~g", labelOverlap=True)
    x = alt.X("lr:Q", title="learning rate", scale=alt.Scale(type="log", nice=False, padding=20), axis=tried)
    y = alt.Y("value:Q", title=f"{unit} on valid", scale=alt.Scale(zero=False, nice=True))
    color = alt.Color("arm:N", scale=scale, legend=alt.Legend(title=None, orient="top", columns=3))
    tips = [
        alt.Tooltip("arm:N"),
        alt.Tooltip("lr:Q", format=".2g"),
        alt.Tooltip("value:Q", format=".4f"),
        "chosen:N",
    ]
    layers = [
        data.mark_line(strokeWidth=2).encode(x=x, y=y, color=color),
        data.mark_point(size=60).encode(x=x, y=y, color=color, tooltip=tips),
        data.transform_filter("datum.chosen")
        .mark_point(filled=True, size=130, opacity=1)
        .encode(x=x, y=y, color=color, tooltip=tips),
    ]
    return alt.layer(*layers).properties(width="container", height=280)
