"""The one table printer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

COLOURS = {"better": "green", "worse": "red", "equivalent": "blue", "undecided": "bright_black"}


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()
) -> None:
    """Print rows under columns; those named in `right` are aligned right. Text is shown as it is, never as markup."""
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
        table.add_row(*(Text(str(cell), style=COLOURS.get(str(cell), "")) for cell in row))
    console.print(table)


def number(value: float | None, form: str) -> str:
    """Return a number in that form, or a dash where it is not defined."""
    return "–" if value is None else format(value, form)
