"""Charts as Vega-Lite definitions: one definition serves the page and the picture files."""

from __future__ import annotations

from typing import Any

import altair as alt

from headtohead.study.verdict import METRIC, Verdict, metric_words

Row = dict[str, Any]
Chart = alt.LayerChart | alt.FacetChart
# Okabe and Ito's colours, told apart by every kind of eye; the baseline is grey.
BASELINE = "#7f7f7f"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#A6761D")
VERDICTS = {"better": "#009E73", "worse": "#D55E00", "equivalent": "#0072B2", "undecided": "#8a8a8a"}


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
        axis=alt.Axis(labelFontSize=13, labelLimit=220, domain=False, ticks=False),
    )
    side = "left" if verdicts[0].better == "lower" else "right"
    unit = metric_words(verdicts[0].metric)
    title = f"difference to {verdicts[0].baseline_label} in {unit} ({side} is better)"
    x = alt.X("difference:Q", title=title, scale=alt.Scale(nice=True))
    colour = alt.Color(
        "verdict:N",
        scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())),
        legend=alt.Legend(title=None, orient="top"),
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
    """Return training loss against tokens: the mean over seeds, the band of all seeds, and the reference lines."""
    data = alt.Data(values=rows)
    pick = alt.selection_point(fields=["arm"], bind="legend")
    shade = alt.condition(pick, alt.value(1.0), alt.value(0.12))
    x = alt.X("tokens:Q", title="tokens trained on", axis=alt.Axis(format="~s", grid=False))
    top = max([row["high"] for row in rows] + list(references.values()), default=8.0)
    floor = min([row["low"] for row in rows] + list(references.values()), default=1.0)
    y_scale = alt.Scale(type="log", domain=[floor * 0.97, top * 1.02], nice=False)
    ticks = [
        tick
        for tick in (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12)
        if floor * 0.97 <= tick <= top * 1.02
    ]
    y = alt.Y("mean:Q", title="bits per byte", scale=y_scale, axis=alt.Axis(values=ticks, format="~g"))
    colour = alt.Color(
        "arm:N",
        scale=scale,
        legend=alt.Legend(
            title=None,
            orient="top",
            symbolType="stroke",
            symbolStrokeWidth=3,
            symbolOpacity=1,
            labelLimit=240,
            columns=5,
        ),
    )
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("tokens:Q", format=",")]
    tips += [alt.Tooltip(f"{name}:Q", format=".4f") for name in ("mean", "low", "high")]
    lines = [{"value": value, "words": f"{name} {value:.2f}"} for name, value in references.items()]
    base = alt.Chart(alt.Data(values=lines))
    layers = [
        base.mark_rule(strokeDash=[2, 3], color="#999").encode(y=alt.Y("value:Q", scale=y_scale)),
        base.mark_text(align="right", baseline="bottom", dx=-4, dy=-2, color="#888", fontSize=11).encode(
            x=alt.value("width"), y=alt.Y("value:Q", scale=y_scale), text="words:N"
        ),
        alt.Chart(data)
        .mark_area(opacity=0.16)
        .encode(
            x=x,
            y=alt.Y("low:Q", scale=y_scale),
            y2="high:Q",
            color=colour,
            opacity=alt.condition(pick, alt.value(0.16), alt.value(0.02)),
        ),
        alt.Chart(data)
        .mark_line(strokeWidth=2)
        .encode(x=x, y=y, color=colour, opacity=shade, tooltip=tips)
        .add_params(pick),
    ]
    return alt.layer(*layers).properties(width="container", height=340)


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
        axis=alt.Axis(labelFontSize=13, labelLimit=220, domain=False, ticks=False),
    )
    x = alt.X("value:Q", title=title, scale=alt.Scale(zero=False, nice=True))
    colour = alt.Color("arm:N", scale=scale, legend=None)
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("seed:O"), alt.Tooltip("value:Q", format=".4f")]
    dots = alt.Chart(data).mark_circle(size=80, opacity=0.75).encode(x=x, y=y, color=colour, tooltip=tips)
    means = (
        alt.Chart(data).mark_tick(thickness=2.5, size=26).encode(x=alt.X("mean(value):Q"), y=y, color=colour)
    )
    return alt.layer(dots, means).properties(width="container", height=36 * len(order))
