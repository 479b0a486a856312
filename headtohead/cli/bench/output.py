"""Tables that several benchmarks print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headtohead.cli.shared.tables import number, print_table
from headtohead.common.terminal import say, say_json


def whole(document: dict[str, Any], *needed: str) -> list[dict[str, Any]]:
    """Return the rows that have every needed column; print how many older rows are left out."""
    rows: list[dict[str, Any]] = document["rows"]
    known = [row for row in rows if all(name in row for name in needed)]
    if old := len(rows) - len(known):
        say(f"{old} of {len(rows)} rows have an older format and are not shown")
    return known


def show(
    document: dict[str, Any], columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: Sequence[str]
) -> int:
    """Print a benchmark's table, then the whole document as the last line."""
    where = f"{document['device']}, {document['kernels']} kernels, torch {document['torch']}"
    print_table(where, columns, rows, right=right)
    say(f"copy {document['copy_bytes_per_second'] / 1e12:.2f} TB/s, read and written")
    say_json(document)
    return 0


def show_profile(name: str, found: dict[str, Any]) -> None:
    """Print the kernels of one step by kind, then the longest."""
    kinds = ", ".join(f"{kind} {spent:.2f}" for kind, spent in found["kinds"].items())
    say(f"kernels of one step of {name}, {found['milliseconds']:.2f} ms: {kinds}")
    kernels = [
        (kernel["name"], f"{kernel['milliseconds']:.3f}", f"{kernel['calls']:g}")
        for kernel in found["kernels"][:20]
    ]
    print_table("", ("kernel", "ms", "calls"), kernels, right=("ms", "calls"))


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds with four decimals, or a dash."""
    return number(None if seconds is None else 1e3 * seconds, ".4f")


def ratio(found: float | None) -> str:
    """Return a ratio such as 1.25x, or a dash."""
    return "–" if found is None else f"{found:.2f}x"
