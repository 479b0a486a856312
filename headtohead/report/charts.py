"""Charts as Vega-Lite definitions: one definition serves the page and the picture files."""

from __future__ import annotations

import json
from typing import Any

import altair as alt

from headtohead.study.verdict import METRIC, Verdict, metric_words

Row = dict[str, Any]
Chart = alt.LayerChart | alt.FacetChart
# Okabe and Ito's colours, told apart by every kind of eye; the baseline is grey.
BASELINE = "#7f7f7f"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#A6761D")
AXIS = "axis"
"""The parameter that says which of a chart's x axes is shown."""
CURVE_AXES = {
    "tokens": ("tokens", "tokens trained on"),
    "flops": ("FLOPs", "training FLOPs (three times forward)"),
    "seconds": ("seconds", "seconds of training, mean over seeds"),
}
COST_AXES = {
    "parameters": ("parameters", "parameters (left is cheaper)"),
    "flops": ("FLOPs/token", "forward FLOPs per token (left is cheaper)"),
    "cache": ("cache bytes/token", "cache bytes per token (left is cheaper)"),
    "rate": ("tokens/s", "training tokens per second (right is faster)"),
}
"""By the name of a row's value: what a button says, and the title of the axis."""
# A phone's width; without a page around it a chart has no container, and is not narrow.
_NARROW = "containerSize()[0] < 500"
VERDICTS = {"better": "#009E73", "worse": "#D55E00", "equivalent": "#0072B2", "undecided": "#8a8a8a"}


def theme(ink: str, line: str, font: str) -> Row:
    """Return the look of a chart: colours of words and lines, and the font."""
    axis = {"labelColor": ink, "titleColor": ink, "gridColor": line, "domainColor": line, "tickColor": line}
    plain = {"fontWeight": "normal", "fontSize": 12}
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "axis": axis | {"titleFontWeight": "normal", "labelFontSize": 12, "titleFontSize": 12},
        "legend": {"labelColor": ink, "titleColor": ink, "labelFontSize": 13},
        "text": {"color": ink},
        "title": {"color": ink} | plain,
    }


def colours(labels: list[str], baseline: str) -> alt.Scale:
    """Return one colour per arm, the same in every chart."""
    others = [label for label in labels if label != baseline]
    shades = {label: PALETTE[place % len(PALETTE)] for place, label in enumerate(others)} | {
        baseline: BASELINE
    }
    return alt.Scale(domain=labels, range=[shades[label] for label in labels])


def forest(verdicts: list[Verdict]) -> Chart:
    """Return each arm's difference to the baseline: interval, mean, every seed, and the margin."""
    order = [row.label for row in verdicts]
    rows = [
        {
            "arm": row.label,
            "difference": row.difference,
            "low": row.ci_low,
            "high": row.ci_high,
            "verdict": row.verdict,
            "words": f"{row.difference:+{'.3f' if row.metric == METRIC else '.3g'}}",
        }
        for row in verdicts
        if row.difference is not None
    ]
    seeds = [
        {"arm": row.label, "difference": mine - theirs, "seed": seed}
        for row in verdicts
        for seed, mine, theirs in zip(row.seeds, row.values, row.baseline_values, strict=True)
    ]
    y = alt.Y(
        "arm:N",
        sort=order,
        title=None,
        axis=_arm_axis(),
    )
    side = "left" if verdicts[0].better == "lower" else "right"
    unit = metric_words(verdicts[0].metric)
    title = [f"difference to {verdicts[0].baseline_label}", f"in {unit} ({side} is better)"]
    x = alt.X("difference:Q", title=title, scale=alt.Scale(nice=True))
    colour = alt.Color(
        "verdict:N",
        scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())),
        legend=alt.Legend(title=None, orient="top", columns=alt.ExprRef(f"{_NARROW} ? 2 : 4")),
    )
    margin = verdicts[0].margin
    band = alt.Chart(alt.Data(values=[{"low": -margin, "high": margin}])).mark_rect(
        opacity=0.18, color="#0072B2"
    )
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[4, 3], color="#888")
    data = alt.Data(values=rows)
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("verdict:N")]
    tips += [alt.Tooltip(f"{name}:Q", format="+.4f") for name in ("difference", "low", "high")]
    layers = [
        band.encode(x=alt.X("low:Q"), x2="high:Q"),
        zero.encode(x="zero:Q"),
        alt.Chart(alt.Data(values=seeds))
        .mark_tick(thickness=1.5, size=14, opacity=0.45, color="#888")
        .encode(x=x, y=y, tooltip=["arm:N", "seed:O", alt.Tooltip("difference:Q", format="+.4f")]),
        alt.Chart(data)
        .mark_rule(strokeWidth=3)
        .encode(x=alt.X("low:Q"), x2="high:Q", y=y, color=colour, tooltip=tips),
        alt.Chart(data)
        .mark_point(filled=True, size=110, opacity=1)
        .encode(x=x, y=y, color=colour, tooltip=tips),
        alt.Chart(data).mark_text(dy=-13, fontSize=12).encode(x=x, y=y, text="words:N", color=colour),
    ]
    return alt.layer(*layers).properties(width="container", height=46 * len(order))


def learning_curves(rows: list[Row], references: dict[str, float], scale: alt.Scale) -> Chart:
    """Return training loss: the mean over seeds, the band of all seeds, and the reference lines.

    The x axis is tokens, FLOPs or seconds: the parameter `axis` says which.
    """
    names = [name for name in CURVE_AXES if any(row[name] is not None for row in rows)]
    axis = alt.param(name=AXIS, value=names[0])
    pick = alt.selection_point(name="arms", fields=["arm"], bind="legend", toggle="true")
    near = alt.selection_point(name="near", nearest=True, on="pointermove", clear="pointerout", empty=False)
    data = _at_axis("points")
    x = alt.X("x:Q", title=None, axis=alt.Axis(format="~s", grid=False, labelOverlap=True))
    top = max([row["high"] for row in rows] + list(references.values()), default=8.0)
    floor = min([row["low"] for row in rows] + list(references.values()), default=1.0)
    y_scale = alt.Scale(type="log", domain=[floor * 0.97, top * 1.02], nice=False)
    ticks = [
        tick
        for tick in (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12)
        if floor * 0.97 <= tick <= top * 1.02
    ]
    y = alt.Y("mean:Q", title="bits per byte", scale=y_scale, axis=alt.Axis(values=ticks, format="~g"))
    colour = alt.Color("arm:N", scale=scale, legend=_legend())
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
            color=colour,
            opacity=alt.condition(pick, alt.value(0.16), alt.value(0)),
        ),
        data.mark_line(strokeWidth=2)
        .encode(
            x=x, y=y, color=colour, opacity=alt.condition(pick, alt.value(1.0), alt.value(0.07)), tooltip=tips
        )
        .add_params(pick),
        data.mark_point(filled=True, size=70)
        .encode(x=x, y=y, color=colour, tooltip=tips, opacity=alt.condition(near, alt.value(1), alt.value(0)))
        .add_params(near),
    ]
    axes = {name: CURVE_AXES[name] for name in names}
    return _switched(layers, axes, axis, {"points": rows}, height=340)


def quality_against_cost(rows: list[Row], seeds: list[Row], scale: alt.Scale) -> Chart:
    """Return each arm's score against what it costs, every seed, and the front of arms that none beats in both.

    The cost is parameters, FLOPs or cache bytes per token, or training speed: the parameter `axis` says which.
    """
    known = {name: [row[name] for row in rows if row[name] is not None] for name in COST_AXES}
    names = [name for name, values in known.items() if values]
    # A cost that is equal for all arms has little to show: begin with one that is not.
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
    y = alt.Y("value:Q", title="bits per byte on test", scale=alt.Scale(zero=False, nice=True, padding=14))
    colour = alt.Color("arm:N", scale=scale, legend=None)
    means, dots = _at_axis("means"), _at_axis("seeds")
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("value:Q", format=".4f")]
    tips += [alt.Tooltip(f"{name}:Q", title=COST_AXES[name][0], format=",.4~s") for name in names]
    seed_tips = [alt.Tooltip("arm:N"), alt.Tooltip("seed:O"), alt.Tooltip("value:Q", format=".4f")]
    middle = f"({low.expr} + {high.expr}) / 2"
    layers = [
        means.transform_filter(f"datum['front ' + {AXIS}]")
        .mark_line(
            strokeDash=[5, 4],
            color="#888",
            interpolate=alt.ExprRef(f"{AXIS} == 'rate' ? 'step-before' : 'step-after'"),
        )
        .encode(x=x, y=y),
        dots.mark_circle(size=26, opacity=0.4).encode(x=x, y=y, color=colour, tooltip=seed_tips),
        means.mark_point(filled=True, size=130, opacity=1).encode(x=x, y=y, color=colour, tooltip=tips),
        means.transform_filter(f"datum.x <= {middle}")
        .mark_text(align="left", dx=5, dy=-14, fontSize=12, limit=170)
        .encode(x=x, y=y, text="arm:N", color=colour),
        means.transform_filter(f"datum.x > {middle}")
        .mark_text(align="right", dx=-5, dy=-14, fontSize=12, limit=170)
        .encode(x=x, y=y, text="arm:N", color=colour),
    ]
    axes = {name: COST_AXES[name] for name in names}
    return _switched(layers, axes, axis, {"means": rows, "seeds": seeds}, height=320)


def _ends(values: list[float]) -> tuple[float, float]:
    """Return the ends of a cost axis: at least a fifth wide, so that costs that are all but equal look equal."""
    room = max(0.08 * (max(values) - min(values)), 0.1 * max(values) - 0.5 * (max(values) - min(values)))
    return max(0.0, min(values) - room), max(values) + max(room, 1e-9)


def _at_axis(name: str) -> alt.Chart:
    """Return a chart of the named rows with the chosen cost or clock as their x; rows without it are left out."""
    rows = alt.Chart(alt.NamedData(name)).transform_calculate(x=f"datum[{AXIS}]")
    return rows.transform_filter("isValid(datum.x)")


def _switched(
    layers: list[alt.Chart],
    axes: dict[str, tuple[str, str]],
    axis: alt.Parameter,
    rows: dict[str, list[Row]],
    height: int,
) -> Chart:
    """Return the layers as one chart whose x axis is chosen by a parameter; `usermeta` lists the choices."""
    # The title of an axis cannot follow a parameter; the title of a chart, set below it, can.
    titles = json.dumps({name: title for name, (_, title) in axes.items()})
    words = alt.TitleParams(
        alt.ExprRef(f"({titles})[{AXIS}]"), orient="bottom", anchor="middle", frame="group"
    )
    choices = {name: short for name, (short, _) in axes.items()}
    chart = alt.layer(*layers).add_params(axis)
    chart = chart.properties(width="container", height=height, title=words, usermeta={"axes": choices})
    chart.datasets = (
        rows  # last, and by name: altair copies a chart with its rows at every step of its making
    )
    return chart


def _legend() -> alt.Legend:
    return alt.Legend(
        title=None,
        orient="top",
        symbolType="stroke",
        symbolStrokeWidth=3,
        symbolOpacity=1,
        labelLimit=alt.ExprRef(f"{_NARROW} ? 120 : 240"),
        columns=alt.ExprRef(f"{_NARROW} ? 2 : containerSize()[0] >= 900 ? 4 : 3"),
    )


def _arm_axis() -> alt.Axis:
    return alt.Axis(
        labelFontSize=13, labelLimit=alt.ExprRef(f"{_NARROW} ? 120 : 220"), domain=False, ticks=False
    )


def learning_rates(rows: list[Row], scale: alt.Scale) -> Chart:
    """Return what each arm scored on valid at every learning rate of its tuning; the chosen one is filled."""
    data = alt.Chart(alt.Data(values=rows))
    x = alt.X("lr:Q", title="learning rate", scale=alt.Scale(type="log", nice=False, padding=20))
    y = alt.Y("value:Q", title="bits per byte on valid", scale=alt.Scale(zero=False, nice=True))
    colour = alt.Color("arm:N", scale=scale, legend=alt.Legend(title=None, orient="top", columns=3))
    tips = [
        alt.Tooltip("arm:N"),
        alt.Tooltip("lr:Q", format=".2g"),
        alt.Tooltip("value:Q", format=".4f"),
        "chosen:N",
    ]
    layers = [
        data.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        data.mark_point(size=60).encode(x=x, y=y, color=colour, tooltip=tips),
        data.transform_filter("datum.chosen")
        .mark_point(filled=True, size=130, opacity=1)
        .encode(x=x, y=y, color=colour, tooltip=tips),
    ]
    return alt.layer(*layers).properties(width="container", height=280)


def circuit_ratios(rows: list[Row], scale: alt.Scale) -> Chart:
    """Return the ratio of circuits' learning rates to the run's over training; a dash tells an arm's rules apart."""
    wide = alt.Scale(type="log" if min(row["ratio"] for row in rows) > 0 else "linear", nice=True)
    x = alt.X("tokens:Q", title="tokens trained on", axis=alt.Axis(format="~s", grid=False))
    y = alt.Y("ratio:Q", title="ratio to the run's learning rate", scale=wide)
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("rule:N"), alt.Tooltip("decay:N", title="lr x decay")]
    tips += [alt.Tooltip("tokens:Q", format=","), alt.Tooltip("ratio:Q", format=".4~g")]
    rules = alt.Legend(title=None, orient="bottom", direction="vertical", labelLimit=600, symbolType="stroke")
    line = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(strokeWidth=2)
        .encode(
            x=x,
            y=y,
            color=alt.Color("arm:N", scale=scale, legend=_legend()),
            strokeDash=alt.StrokeDash("rule:N", legend=rules),
            tooltip=tips,
        )
    )
    one = (
        alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(strokeDash=[4, 3], color="#888").encode(y="one:Q")
    )
    return alt.layer(one, line).properties(width="container", height=200)


def seed_values(
    rows: list[Row],
    order: list[str],
    scale: alt.Scale,
    title: str = "bits per byte on test (left is better)",
) -> Chart:
    """Return the test score of every seed, with each arm's mean."""
    data = alt.Data(values=rows)
    y = alt.Y(
        "arm:N",
        sort=order,
        title=None,
        axis=_arm_axis(),
    )
    x = alt.X("value:Q", title=title, scale=alt.Scale(zero=False, nice=True))
    colour = alt.Color("arm:N", scale=scale, legend=None)
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("seed:O"), alt.Tooltip("value:Q", format=".4f")]
    dots = alt.Chart(data).mark_circle(size=80, opacity=0.75).encode(x=x, y=y, color=colour, tooltip=tips)
    means = (
        alt.Chart(data).mark_tick(thickness=2.5, size=26).encode(x=alt.X("mean(value):Q"), y=y, color=colour)
    )
    return alt.layer(dots, means).properties(width="container", height=36 * len(order))
