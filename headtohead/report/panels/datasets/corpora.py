"""Corpus statistics, and each arm's difference against the coherence dial."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import altair as alt

from headtohead.common.errors import UserError
from headtohead.data.coherence import parse_dial
from headtohead.evaluation.corpus_stats import statistics_head, statistics_row
from headtohead.report.charts import Chart, Row, legend
from headtohead.report.panels.base import Figure, Table, View


def figure(views: Sequence[View]) -> Figure | None:
    """Return the statistics of a study's corpora."""
    found = views[0].manifest.statistics if views else {}
    if not found:
        return None
    words = (
        "Train splits. Unigram and bigram: entropy of a byte, alone and given the previous one. Repetition: share of a "
        "window's words that occurred earlier in it. Overlap: words shared by the halves of a window, and by the halves of two "
        "random windows (far). Domain bits: information of a window about the domain of its text, and its maximum."
    )
    rows = dial_rows(views)
    if rows:
        words += (
            " Chart: the same pieces of text ordered from mixed (0) to coherent (1), for training and testing"
        )
        words += f" ({rows[0]['rest']})." if len(views) > len(found) else "."
    table = Table(
        ("corpus", *statistics_head()), [(label, *statistics_row(row)) for label, row in found.items()]
    )
    chart = against_dial(rows, views[0].scale) if rows else None
    return Figure("Corpus statistics.", words, chart, table=table)


def dial_rows(views: Sequence[View]) -> list[Row]:
    """Return each arm's difference by dial setting, if a study has two or more settings of one mixture."""
    rows: list[Row] = []
    for view in views:
        try:
            dial = parse_dial(view.contest.corpus)
        except UserError:
            continue
        contest = view.contest
        rest = dataclasses.replace(contest, corpus="", corpus_label="").title
        rows += [
            {
                "arm": row.label,
                "dial": dial.setting,
                "difference": row.difference,
                "low": row.ci_low if row.ci_low is not None else row.difference,
                "high": row.ci_high if row.ci_high is not None else row.difference,
                "verdict": row.verdict,
                "group": repr((dial.piece, dial.sources, rest)),
                "rest": rest,
            }
            for row in view.verdicts
            if row.difference is not None
        ]
    # Show one mixture, size, context, branch and pair of rules; lines of several would overlap.
    rows = [row for row in rows if row["group"] == rows[0]["group"]]
    return rows if len({row["dial"] for row in rows}) > 1 else []


def against_dial(rows: list[Row], scale: alt.Scale) -> Chart:
    """Return the difference from the baseline against the dial, with an interval at each setting."""
    data = alt.Chart(alt.Data(values=rows))
    x = alt.X(
        "dial:Q",
        title="coherence dial: 0 mixed, 1 coherent",
        scale=alt.Scale(domain=[0, 1], padding=12),
        axis=alt.Axis(grid=False, values=sorted({row["dial"] for row in rows})),
    )
    title = ["difference in bits per byte", "(below 0 is better)"]
    y = alt.Y("difference:Q", title=title, scale=alt.Scale(nice=True))
    color = alt.Color("arm:N", scale=scale, legend=legend())
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("dial:Q"), alt.Tooltip("verdict:N")]
    tips += [alt.Tooltip(f"{name}:Q", format="+.4f") for name in ("difference", "low", "high")]
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[4, 3], color="#888")
    layers = [
        zero.encode(y="zero:Q"),
        data.mark_rule(strokeWidth=2).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color),
        data.mark_line(strokeWidth=2).encode(x=x, y=y, color=color),
        data.mark_point(filled=True, size=70, opacity=1).encode(x=x, y=y, color=color, tooltip=tips),
    ]
    return alt.layer(*layers).properties(width="container", height=280)
