"""Training loss over tokens, FLOPs or seconds."""

from __future__ import annotations

import math
import statistics

import altair as alt

from headtohead.report.charts import AXIS, Chart, Row, at_axis_rows, legend, switched
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.study.store.manifest import METRIC


def figure(view: View) -> Figure | None:
    """Return the learning curves."""
    if not (rows := curve_rows(view.arms)):
        return None
    words = "Training loss, mean over seeds; the band spans all seeds."
    if view.measure.name == METRIC:
        words += " Dotted: references without a model (uniform, byte unigrams, byte bigrams, xz)."
        chart = learning_curves(rows, view.references, view.scale)
    else:
        chart = learning_curves(rows, {}, view.scale, "bits per target")
    return Figure("Learning curves.", words, chart, "Click labels to select arms, double-click to show all.")


def curve_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return mean, lowest and highest training loss over seeds, about 80 points per arm.

    Each point has tokens, training FLOPs and seconds, so that a chart can use any of them as x axis.
    """
    rows = []
    for arm in arms:
        per_byte = _tokens_per_byte(arm)
        binned: dict[int, dict[int, list[float]]] = {}
        clock: dict[int, dict[int, float]] = {}
        last = max((row["step"] for curve in arm.curves.values() for row in curve), default=0)
        width = max(1, math.ceil(last / _CURVE_POINTS))
        tokens = {row["step"]: row.get("tokens") for curve in arm.curves.values() for row in curve}
        for seed, curve in arm.curves.items():
            for row in curve:
                bin_ = -(-row["step"] // width)
                binned.setdefault(bin_, {}).setdefault(seed, []).append(row["nats"] / math.log(2) * per_byte)
                if row.get("seconds") is not None:
                    clock.setdefault(bin_, {})[seed] = row["seconds"]
        for bin_, seeds in sorted(binned.items()):
            means = [statistics.fmean(values) for values in seeds.values()]
            seconds = clock.get(bin_, {})
            step = min(bin_ * width, last)
            count = tokens.get(step) or step * arm.record["training"]["batch"]
            rows.append(
                {
                    "arm": arm.label,
                    "tokens": count,
                    "flops": _BACKWARD * arm.record["flops_per_token"] * count,
                    "seconds": statistics.fmean(seconds.values()) if len(seconds) == len(seeds) else None,
                    "mean": statistics.fmean(means),
                    "low": min(means),
                    "high": max(means),
                    "seeds": len(means),
                }
            )
    return rows


_CURVE_POINTS = 80
_LEAST = 1e-4


_BACKWARD = 3
"""Ratio of training to forward FLOPs: backward needs two products for each one of forward."""


def _tokens_per_byte(arm: ArmFacts) -> float:
    """Return tokens per byte on the test split, which converts bits per token to bits per byte."""
    for score in arm.finished().values():
        return 1.0 if score.of_task else score.values["tokens"] / score.values["bytes"]
    return 1.0


CURVE_AXES = {
    "tokens": ("tokens", "tokens trained on"),
    "flops": ("FLOPs", "training FLOPs (three times forward)"),
    "seconds": ("seconds", "seconds of training, mean over seeds"),
}


def learning_curves(
    rows: list[Row], references: dict[str, float], scale: alt.Scale, unit: str = "bits per byte"
) -> Chart:
    """Return training loss: mean over seeds, band of all seeds, and reference lines.

    The parameter `axis` selects the x axis: tokens, FLOPs or seconds.
    """
    names = [name for name in CURVE_AXES if any(row[name] is not None for row in rows)]
    axis = alt.param(name=AXIS, value=names[0])
    pick = alt.selection_point(name="arms", fields=["arm"], bind="legend", toggle="true")
    near = alt.selection_point(name="near", nearest=True, on="pointermove", clear="pointerout", empty=False)
    data = at_axis_rows("points")
    x = alt.X("x:Q", title=None, axis=alt.Axis(format="~s", grid=False, labelOverlap=True))
    # The loss of a task can reach zero, which a logarithmic axis cannot show.
    rows = [row | {name: max(row[name], _LEAST) for name in ("mean", "low", "high")} for row in rows]
    top = max([row["high"] for row in rows] + list(references.values()), default=8.0)
    floor = min([row["low"] for row in rows] + list(references.values()), default=1.0)
    y_scale = alt.Scale(type="log", domain=[floor * 0.97, top * 1.02], nice=False)
    ticks = [
        tick
        for tick in (1e-4, 1e-3, 0.01, 0.1, 0.3, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12)
        if floor * 0.97 <= tick <= top * 1.02
    ]
    y = alt.Y("mean:Q", title=unit, scale=y_scale, axis=alt.Axis(values=ticks, format="~g"))
    color = alt.Color("arm:N", scale=scale, legend=legend())
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("tokens:Q", format=","), alt.Tooltip("flops:Q", format=".3s")]
    tips += [alt.Tooltip("seconds:Q", format=".1f")]
    tips += [alt.Tooltip(f"{name}:Q", format=".4f") for name in ("mean", "low", "high")]
    lines = [{"value": value, "words": f"{name} {value:.2f}"} for name, value in references.items()]
    base = alt.Chart(alt.Data(values=lines))
    layers = [
        base.mark_rule(strokeDash=[2, 3], color="#999").encode(y=alt.Y("value:Q", scale=y_scale)),
        base.mark_text(align="right", baseline="bottom", dx=-4, dy=-2, color="#888", fontSize=11).encode(
            x=alt.value("width"), y=alt.Y("value:Q", scale=y_scale), text="words:N"
        ),
        data.mark_area(opacity=0.16).encode(
            x=x,
            y=alt.Y("low:Q", scale=y_scale),
            y2="high:Q",
            color=color,
            opacity=alt.condition(pick, alt.value(0.16), alt.value(0)),
        ),
        data.mark_line(strokeWidth=2)
        .encode(
            x=x, y=y, color=color, opacity=alt.condition(pick, alt.value(1.0), alt.value(0.07)), tooltip=tips
        )
        .add_params(pick),
        data.mark_point(filled=True, size=70)
        .encode(x=x, y=y, color=color, tooltip=tips, opacity=alt.condition(near, alt.value(1), alt.value(0)))
        .add_params(near),
    ]
    axes = {name: CURVE_AXES[name] for name in names}
    return switched(layers, axes, axis, {"points": rows}, height=340)
