"""Prints tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headtohead.common.numbers import number as number
from headtohead.common.terminal import is_terminal, printable, say, write

Row = TypeVar("Row")
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


class _Console(Console):
    """A console that leaves a reader who is gone to `main`."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled; rich would exit with code 1."""
        raise


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()
) -> None:
    """Print rows under columns; those named in `right` are aligned right. Text is shown as it is, never as markup."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    if len(cells) > _MAX_LAID_OUT:
        _print_plainly(title, columns, cells, right)
        return
    console = _Console(width=None if is_terminal(sys.stdout) else 200, highlight=False)
    table = Table(
        title=Text(printable(title)) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in columns:
        numeric = column in right
        table.add_column(
            Text(_cell(column)), justify="right" if numeric else "left", no_wrap=numeric, overflow="fold"
        )
    for row in cells:
        table.add_row(*(Text(cell, style=COLORS.get(cell, "")) for cell in row))
    with console.capture() as laid_out:
        console.print(table)
    write(laid_out.get())


def print_rows(
    title: str, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], object]], text: Sequence[str] = ()
) -> None:
    """Print a table of objects; a column is its heading and the cell of an object. `text` names columns without numbers."""
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    print_table(title, [*columns], cells, right=[name for name in columns if name not in text])


def _print_plainly(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> None:
    """Print a long table in columns of the widest cell: laying out ten thousand rows would take seconds."""
    cells = [[_cell(column) for column in columns], *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [">" if column in right else "<" for column in columns]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    say("\n".join([title, *(form.format(*row).rstrip() for row in cells)]))


def _cell(value: object) -> str:
    """Return a cell as one line without control characters."""
    return printable(str(value), keep="")
