"""Score against cost, with the Pareto front."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping
from typing import Any

import altair as alt

from headtohead.report.charts import AXIS, NARROW, Chart, Choice, Row, layered, named, tips
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.study.probes.decode import HEADLINE, DecodeSpeed
from headtohead.study.store.manifest import Measure

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
_WIDTH, _HEIGHT = 300, 200
"""Points across the narrowest chart, and down from the best to the worst score, with room for rounded axes."""
_LABEL, _LETTER, _LINE = 150, 5, 15
"""Points of the longest name, of one of its letters, and of a line of text."""
_GOOD = {"lower": "low", "higher": "high"}


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
    return Figure("Quality against cost.", words, quality_against_cost(means, seeds, view))


def cost_rows(
    arms: list[ArmFacts],
    measure: Measure = Measure(),  # noqa: B008  a frozen value
) -> tuple[list[Row], list[Row]]:
    """Return score and costs per arm with a finished run, and per finished run.

    `front NAME` is whether the arm is on the Pareto front of score and that cost.
    """
    means: list[Row] = []
    seeds: list[Row] = []
    worth = 1 if measure.better == "lower" else -1
    for arm in arms:
        scores = arm.scores(measure.name)
        if not scores or arm.spec is None:
            continue
        costs = {
            "parameters": arm.spec.parameters,
            "flops": arm.spec.flops_per_token,
            "cache": arm.spec.cache_bytes_per_token,
            "rate": arm.mean_cost("tokens_per_second"),
            "decode": _decode_rate(arm),
        }
        means.append({"arm": arm.label, "value": statistics.fmean(scores.values()), **costs})
        seeds += [{"arm": arm.label, "seed": seed, "value": value, **costs} for seed, value in scores.items()]
    for name in COST_AXES:
        sign = -1 if name in _FAST else 1
        points = [(sign * row[name], worth * row["value"]) for row in means if row[name] is not None]
        for row in means:
            own = None if row[name] is None else (sign * row[name], worth * row["value"])
            row[f"front {name}"] = own is not None and not any(
                point != own and point[0] <= own[0] and point[1] <= own[1] for point in points
            )
    return means, seeds


def _decode_rate(arm: ArmFacts) -> float | None:
    rates = [row.headline for rows in arm.found(DecodeSpeed).values() for row in rows]
    return statistics.fmean(rates) if rates else None


def quality_against_cost(rows: list[Row], seeds: list[Row], view: View) -> Chart:
    """Return score against cost for each arm and seed, with the Pareto front; buttons select the cost."""
    known = {name: [row[name] for row in rows if row[name] is not None] for name in COST_AXES}
    known = {name: values for name, values in known.items() if values}
    # Start with a cost that differs between arms.
    first = next((name for name, values in known.items() if max(values) > 1.05 * min(values)), "")
    choice = Choice({name: COST_AXES[name] for name in known}, first=first)
    ends = {name: _ends(values) for name, values in known.items()}
    low, high = (choice.by_name({name: end[side] for name, end in ends.items()}) for side in (0, 1))
    axis = alt.Axis(format="~s", grid=False, labelOverlap=True, tickCount=6)
    place = {
        "x": alt.X("x:Q", title=None, scale=alt.Scale(domain=[low, high], nice=False, zero=False), axis=axis),
        "y": alt.Y(
            "value:Q", title=f"{view.unit} on test", scale=alt.Scale(zero=False, nice=True, padding=14)
        ),
    }
    color = view.color()
    means = named("means", choice)
    circle = named("seeds", choice).mark_circle(size=26, opacity=0.4)
    hover = tips("arm", value=".4f")
    hover += [alt.Tooltip(f"{name}:Q", title=COST_AXES[name][0], format=",.4~s") for name in known]
    speed = f"indexof({json.dumps(_FAST)}, {AXIS}) >= 0"
    step = alt.ExprRef(f"{speed} ? 'step-before' : 'step-after'")
    front = means.transform_filter(f"datum['front ' + {AXIS}]")
    layers = [
        front.mark_line(strokeDash=[5, 4], color="#888", interpolate=step).encode(**place),
        circle.encode(color=color, tooltip=tips("arm", "seed", value=".4f"), **place),
        means.mark_point(filled=True, size=130, opacity=1).encode(color=color, tooltip=hover, **place),
    ]
    label_rows(rows, seeds, ends)
    side: Any
    for side, shift in (("left", 5), ("right", -5)):
        here = means.transform_filter(f"datum['side ' + {AXIS}] == '{side}'")
        below = alt.ExprRef(f"datum['dy ' + {AXIS}]")
        size, limit = (alt.ExprRef(f"{NARROW} ? {small} : {large}") for small, large in ((9, 12), (160, 240)))
        text = here.mark_text(align=side, dx=shift, dy=below, fontSize=size, limit=limit)
        layers.append(text.encode(text="arm:N", **place))
    return layered(layers, {"means": rows, "seeds": seeds}, 320, choice)


def label_rows(means: list[Row], seeds: list[Row], ends: Mapping[str, tuple[float, float]]) -> None:
    """Set on which side of its dot and how far below it each arm's name is written, by cost: no two names overlap.

    A name for which there is no free place is left out; the dot shows it on hover. Distances are those of a phone.
    """
    values = [row["value"] for row in seeds]
    per_unit = _HEIGHT / ((max(values) - min(values)) or 1.0)
    for name, (low, high) in ends.items():
        taken: list[tuple[float, float, float]] = []
        for row in sorted((row for row in means if row[name] is not None), key=lambda row: row["value"]):
            x = _WIDTH * (row[name] - low) / ((high - low) or 1.0)
            long = min(_LABEL, _LETTER * len(row["arm"]))
            sides = ("left", "right") if x <= _WIDTH / 2 else ("right", "left")
            for side, dy in itertools.product(sides, (-14, 14)):
                start, y = x if side == "left" else x - long, dy - per_unit * row["value"]
                free = all(
                    start >= end or start + long <= begin or abs(y - at) > _LINE for begin, end, at in taken
                )
                if free and start >= 0 and start + long <= _WIDTH:
                    row |= {f"side {name}": side, f"dy {name}": dy}
                    taken.append((start, start + long, y))
                    break


def _ends(values: list[float]) -> tuple[float, float]:
    """Return the limits of a cost axis: at least 20 % wide, so that nearly equal costs look equal."""
    room = max(0.08 * (max(values) - min(values)), 0.1 * max(values) - 0.5 * (max(values) - min(values)))
    return max(0.0, min(values) - room), max(values) + max(room, 1e-9)
