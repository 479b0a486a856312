"""Difference from the baseline, with 95 % intervals."""

from __future__ import annotations

import altair as alt

from headtohead.report.charts import Chart, dots, rule, verdict_color
from headtohead.report.panels.base import Figure, View
from headtohead.study.judge.verdict import Verdict
from headtohead.study.store.manifest import METRIC, metric_label


def figure(view: View) -> Figure | None:
    """Return each arm's difference from the baseline."""
    if all(row.difference is None for row in view.verdicts):
        return None
    words = "Bars are 95 % intervals over paired seeds, ticks single seeds"
    if margin := view.verdicts[0].margin:
        words += f", the blue band the equivalence margin (±{margin})"
    return Figure("Difference from the baseline.", f"{words}.", forest(view.verdicts))


def forest(verdicts: list[Verdict]) -> Chart:
    """Return each arm's difference from the baseline: interval, mean, every seed, and the margin."""
    first = verdicts[0]
    form = ".3f" if first.metric == METRIC else ".3g"
    means = [
        {"arm": row.label, "verdict": row.verdict, "words": f"{row.difference:+{form}}"}
        | {"mean": row.difference, "low": row.ci_low, "high": row.ci_high}
        for row in verdicts
        if row.difference is not None
    ]
    seeds = [
        {"arm": row.label, "value": mine - theirs, "seed": seed}
        for row in verdicts
        for seed, mine, theirs in zip(row.seeds, row.values, row.baseline_values, strict=True)
    ]
    side = "left" if first.better == "lower" else "right"
    title = [f"difference from {first.baseline_label}", f"in {metric_label(first.metric)} ({side} is better)"]
    margin = alt.Chart(alt.Data(values=[{"low": -first.margin, "high": first.margin}]))
    band = margin.mark_rect(opacity=0.18, color="#0072B2").encode(x="low:Q", x2="high:Q")
    return dots(
        means,
        seeds,
        [row.label for row in verdicts],
        verdict_color(),
        title,
        about=("arm", "verdict"),
        form="+.4f",
        scale=alt.Scale(nice=True),
        under=[band, rule(0)],
        height=46,
        bold=True,
    )
