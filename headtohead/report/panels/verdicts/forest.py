"""Difference from the baseline, with 95 % intervals."""

from __future__ import annotations

import altair as alt

from headtohead.report.charts import NARROW, Chart, arm_axis
from headtohead.report.panels.base import Figure, View
from headtohead.study.judge.verdict import Verdict
from headtohead.study.store.manifest import METRIC, metric_label

VERDICTS = {"better": "#009E73", "worse": "#D55E00", "equivalent": "#0072B2", "undecided": "#8a8a8a"}


def figure(view: View) -> Figure | None:
    """Return each arm's difference from the baseline."""
    if all(row.difference is None for row in view.verdicts):
        return None
    words = "Bars are 95 % intervals over paired seeds, ticks single seeds"
    if margin := view.verdicts[0].margin:
        words += f", the blue band the equivalence margin (±{margin})"
    words += "."
    return Figure("Difference from the baseline.", words, forest(view.verdicts))


def forest(verdicts: list[Verdict]) -> Chart:
    """Return each arm's difference from the baseline: interval, mean, every seed, and the margin."""
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
        axis=arm_axis(),
    )
    side = "left" if verdicts[0].better == "lower" else "right"
    unit = metric_label(verdicts[0].metric)
    title = [f"difference from {verdicts[0].baseline_label}", f"in {unit} ({side} is better)"]
    x = alt.X("difference:Q", title=title, scale=alt.Scale(nice=True))
    color = alt.Color(
        "verdict:N",
        scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())),
        legend=alt.Legend(title=None, orient="top", columns=alt.ExprRef(f"{NARROW} ? 2 : 4")),
    )
    margin = verdicts[0].margin
    band = alt.Chart(alt.Data(values=[{"low": -margin, "high": margin}])).mark_rect(
        opacity=0.18, color="#0072B2"
    )
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[4, 3], color="#888")
    data = alt.Data(values=rows)
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("verdict:N")]
    tips += [alt.Tooltip(f"{name}:Q", format="+.4f") for name in ("difference", "low", "high")]
    # An arm without an interval (one seed, or no spread) has no rule; Vega warns about a layer without numbers.
    intervals = alt.Data(values=[row for row in rows if row["low"] is not None])
    layers = [
        band.encode(x=alt.X("low:Q"), x2="high:Q"),
        zero.encode(x="zero:Q"),
        alt.Chart(alt.Data(values=seeds))
        .mark_tick(thickness=1.5, size=14, opacity=0.45, color="#888")
        .encode(x=x, y=y, tooltip=["arm:N", "seed:O", alt.Tooltip("difference:Q", format="+.4f")]),
        *(
            [
                alt.Chart(intervals)
                .mark_rule(strokeWidth=3)
                .encode(x=alt.X("low:Q"), x2="high:Q", y=y, color=color, tooltip=tips)
            ]
            if intervals.values
            else []
        ),
        alt.Chart(data)
        .mark_point(filled=True, size=110, opacity=1)
        .encode(x=x, y=y, color=color, tooltip=tips),
        alt.Chart(data).mark_text(dy=-13, fontSize=12).encode(x=x, y=y, text="words:N", color=color),
    ]
    return alt.layer(*layers).properties(width="container", height=46 * len(order))
