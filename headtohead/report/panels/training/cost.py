"""Score against cost, with the Pareto front."""

from __future__ import annotations

import json
import statistics

import altair as alt

from headtohead.report.charts import AXIS, Chart, Row, at_axis_rows, switched
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.study.probes.decode import HEADLINE
from headtohead.study.store.manifest import Measure


def figure(view: View) -> Figure | None:
    """Return quality against cost."""
    means, seeds = cost_rows(view.arms, view.measure)
    if not means:
        return None
    words = (
        f"Large dots are means, small dots single seeds; {_GOOD[view.measure.better]} score at low cost is better. Dashed: Pareto front of the "
        "means; it ignores seed noise, so check the verdicts. Arms without a cache, or without timed decoding, are left out "
        "of the respective axis."
    )
    return Figure("Quality against cost.", words, quality_against_cost(means, seeds, view.scale, view.unit))


_GOOD = {"lower": "low", "higher": "high"}


def cost_rows(
    arms: list[ArmFacts],
    measure: Measure = Measure(),  # noqa: B008  a frozen value
) -> tuple[list[Row], list[Row]]:
    """Return score and costs per arm with a finished run, and per finished run.

    `front NAME` is whether the arm is on the Pareto front of score and that cost.
    """
    means, seeds = [], []
    worth = 1 if measure.better == "lower" else -1
    for arm in arms:
        scores = {seed: score.values[measure.name] for seed, score in arm.finished().items()}
        if not scores or not arm.record:
            continue
        costs = {
            "parameters": arm.record["parameters"],
            "flops": arm.record["flops_per_token"],
            "cache": arm.record.get("cache_bytes_per_token"),
            "rate": arm.mean_cost("tokens_per_second"),
            "decode": _decode_rate(arm),
        }
        means.append({"arm": arm.label, "value": statistics.fmean(scores.values()), **costs})
        seeds += [{"arm": arm.label, "seed": seed, "value": value, **costs} for seed, value in scores.items()]
    for name in COST_AXES:
        sign = -1 if name in _FAST else 1
        points = [(sign * row[name], worth * row["value"]) for row in means if row[name] is not None]
        for row in means:
            row[f"front {name}"] = row[name] is not None and not any(
                cost <= sign * row[name]
                and value <= worth * row["value"]
                and (cost, value) != (sign * row[name], worth * row["value"])
                for cost, value in points
            )
    return means, seeds


COST_AXES = {
    "parameters": ("parameters", "parameters (left is cheaper)"),
    "flops": ("FLOPs/token", "forward FLOPs per token (left is cheaper)"),
    "cache": ("cache bytes/token", "cache bytes per token (left is cheaper)"),
    "rate": ("tokens/s", "training tokens per second (right is faster)"),
    "decode": ("decode tokens/s", f"decode tokens per second, {HEADLINE} window (right is faster)"),
}
"""By name of a row's value: button label and axis title."""
_FAST = ("rate", "decode")
"""Speeds: higher is better."""


def _decode_rate(arm: ArmFacts) -> float | None:
    rates = [row["headline"] for rows in arm.found("decode").values() for row in rows]
    return statistics.fmean(rates) if rates else None


def quality_against_cost(
    rows: list[Row], seeds: list[Row], scale: alt.Scale, unit: str = "bits per byte"
) -> Chart:
    """Return score against cost for each arm and seed, with the Pareto front.

    The parameter `axis` selects the cost: parameters, FLOPs or cache bytes per token, training or decoding speed.
    """
    known = {name: [row[name] for row in rows if row[name] is not None] for name in COST_AXES}
    names = [name for name, values in known.items() if values]
    # Start with a cost that differs between arms.
    first = next((name for name in names if max(known[name]) > 1.05 * min(known[name])), names[0])
    axis = alt.param(name=AXIS, value=first)
    ends = {name: _ends(known[name]) for name in names}
    low, high = (
        alt.ExprRef(f"({json.dumps({name: end[side] for name, end in ends.items()})})[{AXIS}]")
        for side in (0, 1)
    )
    x = alt.X(
        "x:Q",
        title=None,
        scale=alt.Scale(domain=[low, high], nice=False, zero=False),
        axis=alt.Axis(format="~s", grid=False, labelOverlap=True, tickCount=6),
    )
    y = alt.Y("value:Q", title=f"{unit} on test", scale=alt.Scale(zero=False, nice=True, padding=14))
    color = alt.Color("arm:N", scale=scale, legend=None)
    means, dots = at_axis_rows("means"), at_axis_rows("seeds")
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("value:Q", format=".4f")]
    tips += [alt.Tooltip(f"{name}:Q", title=COST_AXES[name][0], format=",.4~s") for name in names]
    seed_tips = [alt.Tooltip("arm:N"), alt.Tooltip("seed:O"), alt.Tooltip("value:Q", format=".4f")]
    middle = f"({low.expr} + {high.expr}) / 2"
    layers = [
        means.transform_filter(f"datum['front ' + {AXIS}]")
        .mark_line(
            strokeDash=[5, 4],
            color="#888",
            interpolate=alt.ExprRef(
                f"indexof({json.dumps(_FAST)}, {AXIS}) >= 0 ? 'step-before' : 'step-after'"
            ),
        )
        .encode(x=x, y=y),
        dots.mark_circle(size=26, opacity=0.4).encode(x=x, y=y, color=color, tooltip=seed_tips),
        means.mark_point(filled=True, size=130, opacity=1).encode(x=x, y=y, color=color, tooltip=tips),
        means.transform_filter(f"datum.x <= {middle}")
        .mark_text(align="left", dx=5, dy=-14, fontSize=12, limit=170)
        .encode(x=x, y=y, text="arm:N", color=color),
        means.transform_filter(f"datum.x > {middle}")
        .mark_text(align="right", dx=-5, dy=-14, fontSize=12, limit=170)
        .encode(x=x, y=y, text="arm:N", color=color),
    ]
    axes = {name: COST_AXES[name] for name in names}
    return switched(layers, axes, axis, {"means": rows, "seeds": seeds}, height=320)


def _ends(values: list[float]) -> tuple[float, float]:
    """Return the limits of a cost axis: at least 20 % wide, so that nearly equal costs look equal."""
    room = max(0.08 * (max(values) - min(values)), 0.1 * max(values) - 0.5 * (max(values) - min(values)))
    return max(0.0, min(values) - room), max(values) + max(room, 1e-9)
