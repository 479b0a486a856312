"""Training loss over tokens, FLOPs or seconds."""

from __future__ import annotations

import math
import statistics

import altair as alt

from headtohead.report.charts import Chart, Choice, Row, legend, lines, references, tips
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.study.store.manifest import METRIC

_CURVE_POINTS = 80
_LEAST = 1e-4
_BACKWARD = 3
"""Ratio of training to forward FLOPs: backward needs two products for each one of forward."""
_TICKS = (1e-4, 1e-3, 0.01, 0.1, 0.3, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12)
CURVE_AXES = {
    "tokens": ("tokens", "tokens trained on"),
    "flops": ("FLOPs", "training FLOPs (three times forward)"),
    "seconds": ("seconds", "seconds of training, mean over seeds"),
}
"""By name of a row's value: button label and axis title."""


def figure(view: View) -> Figure | None:
    """Return the learning curves."""
    if not (rows := curve_rows(view.arms)):
        return None
    words = "Training loss, mean over seeds; the band spans all seeds."
    if view.measure.name == METRIC:
        words += " Dotted: references without a model (uniform, byte unigrams, byte bigrams, xz)."
        chart = learning_curves(rows, view.references, view, "bits per byte")
    else:
        chart = learning_curves(rows, {}, view, "bits per target")
    return Figure("Learning curves.", words, chart, "Click labels to select arms, double-click to show all.")


def curve_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return mean, lowest and highest training loss over seeds, about 80 points per arm.

    Each point has tokens, training FLOPs and seconds, so that a chart can use any of them as x axis.
    """
    rows = []
    for arm in arms:
        per_byte = arm.tokens_per_byte()
        binned: dict[int, dict[int, list[float]]] = {}
        clock: dict[int, dict[int, float]] = {}
        last = max((row.step for curve in arm.curves.values() for row in curve), default=0)
        width = max(1, math.ceil(last / _CURVE_POINTS))
        tokens = {row.step: row.tokens for curve in arm.curves.values() for row in curve}
        for seed, curve in arm.curves.items():
            for row in curve:
                assert row.nats is not None
                bin_ = -(-row.step // width)
                binned.setdefault(bin_, {}).setdefault(seed, []).append(row.nats / math.log(2) * per_byte)
                if row.seconds is not None:
                    clock.setdefault(bin_, {})[seed] = row.seconds
        for bin_, seeds in sorted(binned.items()):
            assert arm.spec is not None
            means = [statistics.fmean(values) for values in seeds.values()]
            seconds = clock.get(bin_, {})
            step = min(bin_ * width, last)
            count = tokens.get(step) or step * arm.spec.training.batch
            rows.append(
                {
                    "arm": arm.label,
                    "tokens": count,
                    "flops": _BACKWARD * arm.spec.flops_per_token * count,
                    "seconds": statistics.fmean(seconds.values()) if len(seconds) == len(seeds) else None,
                    "mean": statistics.fmean(means),
                    "low": min(means),
                    "high": max(means),
                }
            )
    return rows


def learning_curves(rows: list[Row], known: dict[str, float], view: View, unit: str) -> Chart:
    """Return training loss over tokens, FLOPs or seconds: mean over seeds, band of all seeds, and reference lines."""
    # The loss of a task can reach zero, which a logarithmic axis cannot show.
    rows = [row | {name: max(row[name], _LEAST) for name in ("mean", "low", "high")} for row in rows]
    low = 0.97 * min(row["low"] for row in rows + [{"low": value} for value in known.values()])
    high = 1.02 * max(row["high"] for row in rows + [{"high": value} for value in known.values()])
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    ticks = alt.Axis(values=[tick for tick in _TICKS if low <= tick <= high], format="~g")
    x = alt.X("x:Q", title=None, axis=alt.Axis(format="~s", grid=False, labelOverlap=True))
    y = alt.Y("mean:Q", title=unit, scale=scale, axis=ticks)
    base = references(known, ".2f").encode(y=alt.Y("value:Q", scale=scale))
    label = base.mark_text(align="right", baseline="bottom", dx=-4, dy=-2, color="#888", fontSize=11)
    under = [
        base.mark_rule(strokeDash=[2, 3], color="#999"),
        label.encode(x=alt.value("width"), text="words:N"),
    ]
    choice = Choice({name: axis for name, axis in CURVE_AXES.items() if any(row[name] for row in rows)})
    numbers = {"tokens": ",", "flops": ".3s", "seconds": ".1f", "mean": ".4f", "low": ".4f", "high": ".4f"}
    style: Row = {"under": under, "band": 0.16, "points": 70, "height": 340}
    color = view.color(legend(lines=True))
    return lines(rows, x, y, color, tips("arm", **numbers), choice=choice, pick=True, **style)
