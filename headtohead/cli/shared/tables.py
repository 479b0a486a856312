"""Prints tables."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headtohead.common.numbers import number as number
from headtohead.common.terminal import is_terminal, printable, say, write

Row = TypeVar("Row")
_MAX_LAID_OUT = 200
_LEAST_TEXT = 12
"""Characters that a column of text keeps on a narrow terminal, where longer text is wrapped."""
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


def width() -> int:
    """Return the columns that output may fill: those of the terminal, or 200 where there is none."""
    return Console().width if is_terminal(sys.stdout) else 200


def say_wrapped(text: str) -> None:
    """Print a line that may be longer than the terminal is wide; further lines are indented."""
    plain = printable(text, keep="")
    say("\n".join(textwrap.wrap(plain, min(width(), 120), subsequent_indent="  ", break_on_hyphens=False)))


def entry(name: str, text: str, column: int, wide: int) -> str:
    """Return a name with text about it, wrapped from `column` on; a longer name has a line of its own."""
    spelled = f"  {name}"
    lines = textwrap.wrap(text, wide - column, break_on_hyphens=False) or [""]
    if len(spelled) >= column:
        lines = ["", *lines]
    return "\n".join(
        [f"{spelled.ljust(column)}{lines[0]}".rstrip(), *(" " * column + line for line in lines[1:])]
    )


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()
) -> None:
    """Print rows under columns; those named in `right` are aligned right. Text is shown as it is, never as markup."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    if len(cells) > _MAX_LAID_OUT:
        _print_plainly(title, columns, cells, right)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    heads = [_cell(column) for column in columns]
    numeric = [column in right for column in columns]
    gaps = 2 * (len(heads) - 1)
    widths = _widths(heads, cells, numeric, width() - gaps)
    for head, wide, is_number in zip(heads, widths, numeric, strict=True):
        table.add_column(Text(head), justify="right" if is_number else "left", width=wide, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell, style=COLORS.get(cell, "")) for cell in row))
    # A table that cannot be made narrow enough is cut nowhere: the terminal breaks its lines.
    console = _Console(width=max(width(), sum(widths) + gaps), highlight=False)
    with console.capture() as laid_out:
        console.print(table)
    say()
    if title:
        say_wrapped(title)
    write("".join(f"{line.rstrip()}\n" for line in laid_out.get().splitlines()))


def _widths(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool], room: int
) -> list[int]:
    """Return the widths of columns that fit into `room`, as far as headings and text can be wrapped.

    Numbers are never wrapped, and a column of text keeps up to `_LEAST_TEXT` characters.
    """
    columns = range(len(heads))
    longest = [max((cell_len(row[index]) for row in rows), default=0) for index in columns]
    widths = [max(cell_len(head), most) for head, most in zip(heads, longest, strict=True)]
    least = [
        max(_longest_word(head), most if is_number else min(most, _LEAST_TEXT))
        for head, most, is_number in zip(heads, longest, numeric, strict=True)
    ]
    while sum(widths) > room and (spare := [index for index in columns if widths[index] > least[index]]):
        # A heading is wrapped before a cell is.
        widest = max(spare, key=lambda index: (widths[index] > longest[index], widths[index]))
        widths[widest] -= 1
    return widths


def _longest_word(text: str) -> int:
    """Return the width of the longest word of a text."""
    return max(map(cell_len, text.split()), default=0)


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
