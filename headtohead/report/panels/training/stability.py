"""Training stability and sample efficiency."""

from __future__ import annotations

from typing import Any

import altair as alt

from headtohead.report.charts import Chart, Row, arm_axis
from headtohead.report.panels.base import Figure, Table, View
from headtohead.study.judge.stability import Stability, contest_stability
from headtohead.study.store.run_store import Store


def figure(view: View) -> Figure | None:
    """Return divergence, spikes, gradient tails and tokens to the baseline's final loss."""
    results = {
        run: arm.results[seed]
        for arm in view.arms
        for seed, run in view.manifest.runs(view.contest, arm.label).items()
        if seed in arm.results
    }
    rows = contest_stability(Store(view.path), view.manifest, view.contest, results)
    if not any(row.runs for row in rows):
        return None
    words = (
        f"Tokens to target: tokens needed to reach the final training loss of {view.manifest.baseline}, relative to "
        f"{view.manifest.baseline}, with the 95 % interval over paired seeds; below 1 is faster. "
        "Gradient tail: 99th percentile of the gradient norm over its median."
    )
    tuned = any(row.rate_rise is not None for row in rows)
    if tuned:
        words += (
            " Rate sensitivity: cost on valid of the worse neighbor of the tuned learning rate, one seed."
        )
    head = (
        "arm",
        "diverged",
        "95 % interval",
        "spikes per run",
        "gradient tail",
        "reached",
        "tokens to target",
        "interval",
    )
    table = Table((*head, *(("rate sensitivity",) if tuned else ())), [_line(row, tuned) for row in rows])
    known = [
        {
            "arm": row.label,
            "ratio": row.tokens_ratio,
            "low": row.tokens_ratio_low,
            "high": row.tokens_ratio_high,
        }
        for row in rows
        if row.tokens_ratio is not None and row.label != view.manifest.baseline
    ]
    chart = tokens_to_target(known, view) if known else None
    return Figure("Stability and sample efficiency.", words, chart, table=table)


def _line(row: Stability, tuned: bool) -> tuple[str, ...]:
    low, high = row.tokens_ratio_low, row.tokens_ratio_high
    line = (
        row.label,
        f"{row.diverged}/{row.runs}",
        "–" if row.diverged_low is None else f"{row.diverged_low:.0%} to {row.diverged_high:.0%}",
        "–" if row.spikes is None else f"{row.spikes:.2f}",
        "–" if row.gradient_tail is None else f"{row.gradient_tail:.2f}",
        f"{row.reached}/{row.pairs}",
        "–" if row.tokens_ratio is None else f"{row.tokens_ratio:.3f}",
        "–" if low is None else f"{low:.3f} to {high:.3f}",
    )
    return (*line, *(("–" if row.rate_rise is None else f"{row.rate_rise:+.4f}",) if tuned else ()))


def tokens_to_target(rows: list[Row], view: View) -> Chart:
    """Return the ratio of tokens to target of each arm, with its interval."""
    order = [label for label in view.labels if any(row["arm"] == label for row in rows)]
    y = alt.Y("arm:N", sort=order, title=None, axis=arm_axis())
    # An interval over two seeds can span decades; the axis is limited to a factor of eight.
    low = max(1 / 8, min(min(row["low"] or 1.0, row["ratio"]) for row in rows) * 0.95)
    high = min(8.0, max(max(row["high"] or 1.0, row["ratio"]) for row in rows) * 1.05)
    scale = alt.Scale(type="log", domain=[min(low, 0.9), max(high, 1.1)], nice=False, clamp=True)
    x = alt.X(
        "ratio:Q",
        title=[f"tokens to the final loss of {view.manifest.baseline}", "relative to it (left is faster)"],
        scale=scale,
        axis=alt.Axis(format=".3~g", tickCount=6, grid=False, labelOverlap=True),
    )
    color = alt.Color("arm:N", scale=view.scale, legend=None)
    tips: list[Any] = [
        "arm:N",
        *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("ratio", "low", "high")),
    ]
    one = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(strokeDash=[4, 3], color="#888")
    data = alt.Chart(alt.Data(values=rows))
    layers = [
        one.encode(x=alt.X("one:Q", scale=scale)),
        data.transform_filter("isValid(datum.low)")
        .mark_rule(strokeWidth=3)
        .encode(x=alt.X("low:Q", scale=scale), x2="high:Q", y=y, color=color, tooltip=tips),
        data.mark_point(filled=True, size=110, opacity=1).encode(x=x, y=y, color=color, tooltip=tips),
    ]
    return alt.layer(*layers).properties(width="container", height=34 * len(order))
