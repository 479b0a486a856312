"""Arm x training corpus x evaluation corpus: the difference from the baseline in each cell."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from headtohead.report.charts import NARROW, Chart, Row, arm_axis
from headtohead.report.panels.base import Figure, Table, View
from headtohead.report.panels.verdicts.forest import VERDICTS
from headtohead.study.judge.transfer_matrix import Cell, places, short_labels

_FAINT = 0.2
_LONG = 24
"""Number of cells above which the table is folded."""
_MANY = 6
"""Number of columns from which labels are rotated."""


def figure(views: Sequence[View]) -> Figure | None:
    """Return the matrix of a study whose runs were evaluated on other corpora."""
    cells = views[0].analysis.matrix if views and views[0].analysis is not None else []
    if not cells:
        return None
    words = (
        "Rows: arm and training corpus. Columns: test split. Numbers: difference from the baseline trained on the same corpus, "
        "in bits per byte, with the 95 % interval over paired seeds. Color: verdict (Holm over the arms of a cell), stronger "
        "for larger decided differences. All cells are exploratory."
    )
    return Figure("Cross-corpus evaluation.", words, heat_map(matrix_rows(cells)), table=_table(cells))


def matrix_rows(cells: Sequence[Cell]) -> list[Row]:
    """Return one row per cell with a difference, for the chart."""
    short = short_labels(cells)
    words = places(cells)
    known = [abs(cell.verdict.difference) for cell in cells if cell.verdict.difference is not None]
    largest = max(known, default=0.0) or 1.0
    rows = []
    for cell in sorted(cells, key=lambda cell: _order(cells, cell)):
        row = cell.verdict
        if row.difference is None:
            continue
        place = f", {words[cell.contest]}" if words[cell.contest] else ""
        rows.append(
            {
                "arm": f"{row.label} ← {short[cell.trained]}{place}",
                "evaluated": short[cell.evaluated],
                "difference": row.difference,
                "low": row.ci_low,
                "high": row.ci_high,
                "verdict": row.verdict,
                "strength": _FAINT
                if row.verdict == "undecided"
                else _FAINT + 0.6 * abs(row.difference) / largest,
                "words": f"{row.difference:+.4f}",
                "interval": "" if row.ci_low is None else f"{row.ci_low:+.3f} to {row.ci_high:+.3f}",
            }
        )
    return rows


def _order(cells: Sequence[Cell], cell: Cell) -> tuple[int, int]:
    """Return a sort key: by arm, then by corpus in the study's order."""
    labels = [other.verdict.label for other in cells]
    return labels.index(cell.verdict.label), cells.index(cell)


def heat_map(rows: list[Row], title: str = "tested on", seeds: Sequence[Row] = ()) -> Chart:
    """Return the cells as a heat map: rows are arm and training corpus, columns evaluation corpora.

    `seeds` are dots at the bottom of a cell; `place` is the x position from -1 to 1.
    """
    order = list(dict.fromkeys(row["arm"] for row in rows))
    columns = list(dict.fromkeys(row["evaluated"] for row in rows))
    data = alt.Chart(alt.Data(values=rows))
    x = alt.X(
        "evaluated:N",
        sort=columns,
        title=title,
        scale=alt.Scale(paddingInner=0.02),
        axis=alt.Axis(
            orient="top",
            labelAngle=0 if len(columns) < _MANY else -25,
            labelLimit=200,
            domain=False,
            ticks=False,
        ),
    )
    names = arm_axis()
    names.labelExpr = "split(datum.label, ' ← ')"  # two lines: arm and training corpus
    names.labelOffset = -8
    names.labelLimit = alt.ExprRef(f"{NARROW} ? 120 : 320")
    y = alt.Y("arm:N", sort=order, title=None, axis=names, scale=alt.Scale(paddingInner=0.04))
    color = alt.Color(
        "verdict:N",
        scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())),
        legend=alt.Legend(title=None, orient="bottom", columns=alt.ExprRef(f"{NARROW} ? 2 : 4")),
    )
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("evaluated:N", title=title), alt.Tooltip("verdict:N")]
    tips += [alt.Tooltip(f"{name}:Q", format="+.4f") for name in ("difference", "low", "high")]
    strength = alt.Opacity("strength:Q", scale=None)
    layers = [
        data.mark_rect().encode(x=x, y=y, color=color, opacity=strength, tooltip=tips),
        data.mark_text(dy=-6, fontSize=13).encode(x=x, y=y, text="words:N"),
        data.mark_text(dy=9, fontSize=alt.ExprRef(f"{NARROW} ? 8 : 10")).encode(x=x, y=y, text="interval:N"),
    ]
    if seeds:
        across = alt.ExprRef(f"datum.place * 0.4 * width / {len(columns)}")
        dots = alt.Chart(alt.Data(values=list(seeds))).mark_circle(
            size=22, opacity=0.6, color="#555", xOffset=across, yOffset=21
        )
        about = ["arm:N", "seed:O", alt.Tooltip("difference:Q", format="+.4f")]
        layers.append(dots.encode(x=x, y=y, tooltip=about))
    return alt.layer(*layers).properties(width="container", height=(62 if seeds else 44) * len(order))


def _table(cells: Sequence[Cell]) -> Table:
    words = places(cells)
    several = any(words.values())
    head = [
        "arm",
        "trained on",
        *(["contest"] if several else []),
        "tested on",
        "verdict",
        "bits per byte",
        "baseline",
        "difference",
        "95 % interval",
        "p (Holm)",
    ]
    short = short_labels(cells)
    rows = [
        (
            cell.verdict.label,
            short[cell.trained],
            *([words[cell.contest]] if several else []),
            short[cell.evaluated],
            cell.verdict.verdict,
            _number(cell.verdict.mean, ".4f"),
            _number(cell.verdict.baseline_mean, ".4f"),
            _number(cell.verdict.difference, "+.4f"),
            "–"
            if cell.verdict.ci_low is None
            else f"{cell.verdict.ci_low:+.4f} to {cell.verdict.ci_high:+.4f}",
            _number(cell.verdict.p_holm, ".3g"),
        )
        for cell in sorted(cells, key=lambda cell: _order(cells, cell))
    ]
    folded = f"Table of all {len(rows)} cells" if len(rows) > _LONG else ""
    return Table(head, rows, left=5 if several else 4, folded=folded)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
