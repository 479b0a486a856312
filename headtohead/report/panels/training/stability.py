"""Training stability and sample efficiency."""

from __future__ import annotations

import altair as alt

from headtohead.common.text import counted
from headtohead.report.charts import Chart, Row, dots, rule
from headtohead.report.panels.base import Figure, Table, View, interval, number
from headtohead.study.judge.stability import Stability, contest_stability
from headtohead.study.store.run_store import Store

_HEAD = (
    *("arm", "diverged", "95 % interval", "spikes per run", "gradient tail"),
    *("reached", "tokens to target", "interval"),
)


def figure(view: View) -> Figure | None:
    """Return divergence, spikes, gradient tails and tokens to the baseline's final loss."""
    found = contest_stability(Store(view.path), view.manifest, view.contest, view.results)
    if not any(row.runs for row in found):
        return None
    baseline = view.manifest.baseline
    words = (
        f"Tokens to target: tokens needed to reach the final training loss of {baseline}, relative to "
        f"{baseline}, with the 95 % interval over paired seeds; below 1 is faster. "
        "Gradient tail: 99th percentile of the gradient norm over its median."
    )
    head, lines = list(_HEAD), [_line(row) for row in found]
    if any(row.rate_rise is not None for row in found):
        seeds = counted(view.manifest.rates(view.contest)[0].seeds, "seed")
        words += (
            f" Rate sensitivity: cost on valid of the worse neighbor of the tuned learning rate, {seeds}."
        )
        head.append("rate sensitivity")
        lines = [(*line, number(row.rate_rise, "+.4f")) for line, row in zip(lines, found, strict=True)]
    rows = [
        {"arm": row.label, "mean": row.tokens_ratio}
        | {"low": row.tokens_ratio_low, "high": row.tokens_ratio_high}
        for row in found
        if row.tokens_ratio is not None and row.label != baseline
    ]
    chart = tokens_to_target(rows, view) if rows else None
    return Figure("Stability and sample efficiency.", words, chart, table=Table(head, lines))


def _line(row: Stability) -> tuple[str, ...]:
    return (
        row.label,
        f"{row.diverged}/{row.runs}",
        interval(row.diverged_low, row.diverged_high, ".0%"),
        number(row.spikes, ".2f"),
        number(row.gradient_tail, ".2f"),
        f"{row.reached}/{row.pairs}",
        number(row.tokens_ratio, ".3f"),
        interval(row.tokens_ratio_low, row.tokens_ratio_high, ".3f"),
    )


def tokens_to_target(rows: list[Row], view: View) -> Chart:
    """Return the ratio of tokens to target of each arm, with its interval."""
    # An interval over two seeds can span decades; the axis is limited to a factor of eight.
    low = max(1 / 8, min(min(row["low"] or 1.0, row["mean"]) for row in rows) * 0.95)
    high = min(8.0, max(max(row["high"] or 1.0, row["mean"]) for row in rows) * 1.05)
    scale = alt.Scale(type="log", domain=[min(low, 0.9), max(high, 1.1)], nice=False, clamp=True)
    axis = alt.Axis(format=".3~g", tickCount=6, grid=False, labelOverlap=True)
    title = [f"tokens to the final loss of {view.manifest.baseline}", "relative to it (left is faster)"]
    style: Row = {"scale": scale, "axis": axis, "form": ".3f", "under": [rule(1, scale=scale)]}
    return dots(rows, [], view.ordered(rows), view.color(), title, **style, height=34, bold=True)
