"""Indicators of attention maps by layer."""

from __future__ import annotations

import altair as alt

from headtohead.report.charts import Chart, Choice, Row, legend, lines, named, tips
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.study.probes import Unavailable
from headtohead.study.probes.indicators import Indicators

INDICATORS = {
    "sink": ("first token", "weight on the first token (sink)"),
    "entropy": ("entropy", "entropy of the map, nats summed over queries (higher is more spread)"),
    "concentration": ("concentration", "concentration: square root of the sum of squared weights"),
    "head_diversity": ("head diversity", "head diversity: standard deviation of a weight over heads"),
    "local_0": ("self", "weight of a token on itself"),
    "local_1": ("1 back", "weight on the previous token"),
    "local_2": ("2 back", "weight two tokens back"),
    "local_3": ("3 back", "weight three tokens back"),
    "log_largest_score": ("largest score", "log of the largest |score| before the softmax"),
}
"""By name of a value: button label and chart title."""


def figure(view: View) -> Figure | None:
    """Return the indicators per layer, if the probe was run."""
    rows, missing, windows = indicator_rows(view.arms)
    if not rows:
        return None
    words = f"Over {windows} held-out windows; small dots are seeds, lines join their means."
    if any(row["signed"] for row in rows):
        words += " Diamonds: signed map, shown by absolute value."
    if missing:
        words += f" Without attention map: {', '.join(missing)}."
    return Figure("Attention indicators by layer.", words, indicators_by_layer(rows, view))


def indicator_rows(arms: list[ArmFacts]) -> tuple[list[Row], list[str], int]:
    """Return one row per arm, seed and layer; labels of the layers without a map; the number of windows."""
    rows: list[Row] = []
    missing: dict[str, None] = {}
    windows = 0
    for arm in arms:
        for seed, found in arm.found(Indicators).items():
            windows = max(windows, *(row.windows for row in found))
            for layer in found[-1].layers:
                if layer.values is None:
                    missing[f"{arm.label} layer {layer.layer} ({layer.mechanism})"] = None
                    continue
                about = {"arm": arm.label, "seed": seed, "layer": layer.layer, "signed": layer.signed}
                rows.append(about | {name: layer.values.get(name) for name in INDICATORS})
        if any(isinstance(row, Unavailable) for row in arm.probes.get("indicators", {}).values()):
            missing[arm.label] = None
    return rows, list(missing), windows


def indicators_by_layer(rows: list[Row], view: View) -> Chart:
    """Return one indicator against the layer; buttons select it."""
    known = {name: words for name, words in INDICATORS.items() if any(row[name] is not None for row in rows)}
    count = max(row["layer"] for row in rows)
    # Arms are offset at each layer, so that their seeds do not overlap.
    middle, step = (len(view.labels) - 1) / 2, 0.3 / len(view.labels)
    rows = [row | {"place": row["layer"] + (view.labels.index(row["arm"]) - middle) * step} for row in rows]
    layers = alt.Axis(values=list(range(1, count + 1)), format="d", grid=False, labelOverlap=True)
    scale = alt.Scale(domain=[0.7, count + 0.3], nice=False)
    x = alt.X("place:Q", title="layer", scale=scale, axis=layers)
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False, nice=True, padding=8))
    mean, color = alt.Y("mean(value):Q", title=None), view.color(legend(lines=True))
    choice = Choice(known, into="value")
    data = named("points", choice)
    seeds = data.mark_point(filled=True, opacity=0.75).encode(
        x=x,
        y=y,
        color=color,
        shape=alt.condition("datum.signed", alt.value("diamond"), alt.value("circle")),
        size=alt.condition("datum.signed", alt.value(70), alt.value(34)),
        tooltip=tips("arm", "layer", "seed", "signed", value=".4~g"),
    )
    tick = data.mark_tick(orient="horizontal", thickness=2.5, width=14).encode(x=x, y=mean, color=color)
    return lines(rows, x, mean, color, (), over=[tick, seeds], height=260, choice=choice)
