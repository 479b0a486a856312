"""Arm x training corpus x evaluation corpus: the difference from the baseline in each cell."""

from __future__ import annotations

from collections.abc import Sequence

from headtohead.report.charts import Row, verdict_cell, verdict_grid
from headtohead.report.panels.base import Figure, Table, View, interval, number
from headtohead.study.judge.transfer_matrix import Cell, places, short_labels

_LONG = 24
"""Number of cells above which the table is folded."""


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
    chart = verdict_grid(matrix_rows(cells), "tested on")
    return Figure("Cross-corpus evaluation.", words, chart, table=_table(cells))


def matrix_rows(cells: Sequence[Cell]) -> list[Row]:
    """Return one row per cell with a difference, for the chart."""
    short, words = short_labels(cells), places(cells)
    known = [abs(cell.verdict.difference) for cell in cells if cell.verdict.difference is not None]
    largest = max(known, default=0.0) or 1.0
    rows = []
    for cell in _by_arm(cells):
        place = f", {words[cell.contest]}" if words[cell.contest] else ""
        arm = f"{cell.verdict.label} ← {short[cell.trained]}{place}"
        if cell.verdict.difference is not None:
            rows.append(verdict_cell(arm, short[cell.evaluated], cell.verdict, largest))
    return rows


def _by_arm(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells by arm; those of an arm in the study's order of corpora."""
    labels = list(dict.fromkeys(cell.verdict.label for cell in cells))
    return sorted(cells, key=lambda cell: labels.index(cell.verdict.label))


def _table(cells: Sequence[Cell]) -> Table:
    short, words = short_labels(cells), places(cells)
    several = any(words.values())
    rows = []
    for cell in _by_arm(cells):
        row = cell.verdict
        place = [words[cell.contest]] if several else []
        about = (row.label, short[cell.trained], *place, short[cell.evaluated], row.verdict)
        means = (number(row.mean, ".4f"), number(row.baseline_mean, ".4f"), number(row.difference, "+.4f"))
        rows.append((*about, *means, interval(row.ci_low, row.ci_high, "+.4f"), number(row.p_holm, ".3g")))
    head = ("arm", "trained on", *(["contest"] if several else []), "tested on", "verdict")
    numbers = ("bits per byte", "baseline", "difference", "95 % interval", "p (Holm)")
    folded = f"Table of all {len(rows)} cells" if len(rows) > _LONG else ""
    return Table((*head, *numbers), rows, left=len(head), folded=folded)
