"""Learning-rate tuning."""

from __future__ import annotations

import altair as alt

from headtohead.report.charts import Row, legend, lines, named, tips
from headtohead.report.panels.base import Figure, View
from headtohead.study.store.manifest import Contest, Manifest


def figure(view: View) -> Figure | None:
    """Return each arm's score on valid against the learning rate, if rates were tuned; the selected rate is filled."""
    if not (rows := rate_rows(view.manifest, view.contest)):
        return None
    tried = alt.Axis(values=sorted({row["lr"] for row in rows}), format=".2~g", labelOverlap=True)
    x = alt.X("lr:Q", title="learning rate", scale=alt.Scale(type="log", nice=False, padding=20), axis=tried)
    y = alt.Y("value:Q", title=f"{view.unit} on valid", scale=alt.Scale(zero=False, nice=True))
    color, hover = view.color(legend()), tips("arm", "chosen", lr=".2g", value=".4f")
    filled = named("points").transform_filter("datum.chosen").mark_point(filled=True, size=130, opacity=1)
    chosen = filled.encode(x=x, y=y, color=color, tooltip=hover)
    chart = lines(rows, x, y, color, hover, points=60, filled=False, over=[chosen])
    words = "Same grid for all arms, one seed, scored on valid; each arm is then trained at its filled point."
    return Figure("Learning-rate tuning.", words, chart)


def rate_rows(manifest: Manifest, contest: Contest) -> list[Row]:
    """Return each arm's score on valid by learning rate; rates that failed to train are left out."""
    place = (contest.corpus, contest.size, contest.context, contest.shape)
    return [
        {"arm": row.label, "lr": row.lr, "value": row.score, "chosen": row.chosen}
        for row in manifest.tuning
        if (row.corpus, row.size, row.context, row.shape) == place and row.score is not None
    ]
