"""Arm x task: verdicts of a study with several tasks."""

from __future__ import annotations

from collections.abc import Sequence

from headtohead.report.charts import VERDICTS, Row, verdict_cell, verdict_grid
from headtohead.report.panels.base import Chip, Figure, Table, View
from headtohead.study.judge.verdict import Verdict


def figure(views: Sequence[View]) -> Figure | None:
    """Return the matrix of verdicts of a study with several tasks."""
    columns = _columns(views)
    cells = [(name, row) for name, view in columns.items() for row in view.verdicts]
    if len(columns) < 2 or all(row.difference is None for _, row in cells):
        return None
    units = {view.unit for view in columns.values()}
    judged = f" ({units.pop()})" if len(units) == 1 else " with its metric"
    words = (
        f"Columns: tasks{judged}. Numbers: difference from {views[0].manifest.baseline} (above 0 is better), with the 95 % "
        "interval over paired seeds. Color: verdict, stronger for larger decided differences within a task. Dots: single seeds, "
        "with 0 in the middle of the cell."
    )
    chart = verdict_grid(win_rows(cells), "task", seed_rows(cells))
    return Figure("Verdicts by task.", words, chart, table=_table(cells, list(columns)))


def _columns(views: Sequence[View]) -> dict[str, View]:
    """Return the contests of tasks by distinguishing label, with the metric if it differs between tasks."""
    tasks = [view for view in views if view.contest.corpus_label in view.manifest.measures]
    if len({view.contest.corpus_label for view in tasks}) < 2:
        return {}
    places = [view.contest.place for view in tasks]
    differing = [key for key in places[0] if len({place[key] for place in places}) > 1]
    several = len({view.measure.name for view in tasks}) > 1
    names = [", ".join(filter(None, (place[key] for key in differing))) for place in places]
    return {
        f"{name} ({view.unit})" if several else name: view for name, view in zip(names, tasks, strict=True)
    }


def win_rows(cells: Sequence[tuple[str, Verdict]]) -> list[Row]:
    """Return one row per cell with a difference, for the chart; arms are in the study's order."""
    order = list(dict.fromkeys(row.label for _, row in cells))
    rows = []
    for name, row in sorted(cells, key=lambda cell: order.index(cell[1].label)):
        largest = max(abs(other.difference or 0.0) for column, other in cells if column == name) or 1.0
        if row.difference is not None:
            rows.append(verdict_cell(row.label, name, row, largest))
    return rows


def seed_rows(cells: Sequence[tuple[str, Verdict]]) -> list[Row]:
    """Return one row per arm, task and seed, positioned in the cell by its difference, on one scale per task."""
    rows: list[Row] = [
        {"arm": row.label, "evaluated": name, "seed": seed, "difference": mine - theirs}
        for name, row in cells
        for seed, mine, theirs in zip(row.seeds, row.values, row.baseline_values, strict=True)
    ]
    for name in {row["evaluated"] for row in rows}:
        column = [row for row in rows if row["evaluated"] == name]
        largest = max(abs(row["difference"]) for row in column) or 1.0
        for row in column:
            row["place"] = row["difference"] / largest
    return rows


def _table(cells: Sequence[tuple[str, Verdict]], columns: list[str]) -> Table:
    """Return the verdict of each arm by task, and the counts of each verdict."""
    rows: list[list[str | Chip]] = []
    for label in dict.fromkeys(row.label for _, row in cells):
        found = {name: row for name, row in cells if row.label == label}
        chips: list[str | Chip] = [
            Chip(found[name].verdict, found[name].verdict) if name in found else "–" for name in columns
        ]
        counts = [str(sum(row.verdict == verdict for row in found.values())) for verdict in VERDICTS]
        rows.append([label, *chips, *counts])
    return Table(("arm", *columns, *VERDICTS), rows, left=1 + len(columns))
