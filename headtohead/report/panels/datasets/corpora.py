"""Corpus statistics, and each arm's difference against the coherence dial."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import altair as alt

from headtohead.common.errors import UserError
from headtohead.data.coherence import parse_dial
from headtohead.evaluation.corpus_stats import statistics_head, statistics_row
from headtohead.report.charts import Chart, Row, legend, lines, rule, tips
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
    chart = against_dial(rows, views[0]) if rows else None
    return Figure("Corpus statistics.", words, chart, table=table)


def dial_rows(views: Sequence[View]) -> list[Row]:
    """Return each arm's difference by dial setting, if a study has two or more settings of one mixture."""
    rows: list[Row] = []
    for view in views:
        try:
            dial = parse_dial(view.contest.corpus)
        except UserError:
            continue
        rest = dataclasses.replace(view.contest, corpus="", corpus_label="").title
        here = {"dial": dial.setting, "group": repr((dial.piece, dial.sources, rest)), "rest": rest}
        for row in view.verdicts:
            if row.difference is not None:
                low, high = (row.difference if end is None else end for end in (row.ci_low, row.ci_high))
                about = {"arm": row.label, "verdict": row.verdict}
                rows.append(here | about | {"difference": row.difference, "low": low, "high": high})
    # Show one mixture, size, context, branch and pair of rules; lines of several would overlap.
    rows = [row for row in rows if row["group"] == rows[0]["group"]]
    return rows if len({row["dial"] for row in rows}) > 1 else []


def against_dial(rows: list[Row], view: View) -> Chart:
    """Return the difference from the baseline against the dial, with an interval at each setting."""
    settings = alt.Axis(grid=False, values=sorted({row["dial"] for row in rows}))
    scale = alt.Scale(domain=[0, 1], padding=12)
    x = alt.X("dial:Q", title="coherence dial: 0 mixed, 1 coherent", scale=scale, axis=settings)
    title = ["difference in bits per byte", "(below 0 is better)"]
    y = alt.Y("difference:Q", title=title, scale=alt.Scale(nice=True))
    hover = tips("arm", "dial", "verdict", difference="+.4f", low="+.4f", high="+.4f")
    color = view.color(legend(lines=True))
    return lines(rows, x, y, color, hover, bars=True, points=70, under=[rule(0, "y")])
