"""Prints tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_MAX_LAID_OUT = 200
COLORS = {
    "better": "green",
    "worse": "red",
    "equivalent": "blue",
    "undecided": "bright_black",
    "supported": "green",
    "contradicted": "red",
    "open": "bright_black",
}


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()
) -> None:
    """Print rows under columns; those named in `right` are aligned right. Text is shown as it is, never as markup."""
    rows = list(rows)
    if len(rows) > _MAX_LAID_OUT:
        _print_plainly(title, columns, rows, right)
        return
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    table = Table(
        title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        numeric = column in right
        table.add_column(
            Text(column), justify="right" if numeric else "left", no_wrap=numeric, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(str(cell), style=COLORS.get(str(cell), "")) for cell in row))
    console.print(table)


def _print_plainly(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str]
) -> None:
    """Print a long table in columns of the widest cell: laying out ten thousand rows would take seconds."""
    cells = [tuple(columns), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [">" if column in right else "<" for column in columns]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    print(title, *(form.format(*row).rstrip() for row in cells), sep="\n")


def number(value: float | None, form: str) -> str:
    """Return a number in that form, or a dash where it is not defined."""
    return "–" if value is None else format(value, form)
