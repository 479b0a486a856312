"""Options and tables that the benchmark commands share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from headtohead.cli.shared.options import flag, seconds_of, switched
from headtohead.cli.shared.tables import number, print_table
from headtohead.common.numbers import parse_count, parse_duration
from headtohead.common.progress import progress_bar
from headtohead.common.terminal import say, say_json

Row = dict[str, Any]
Cell = Callable[[Row], object]

# Options given as text: the argument of the benchmark, and its value.
_PARSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "batch": ("batch", lambda text: parse_count(text, "--batch")),
    "cached": ("cached", lambda text: parse_count(text, "--cached")),
    "new": ("new", lambda text: parse_count(text, "--new")),
    "context": ("contexts", lambda texts: [parse_count(text, "--context") for text in texts]),
    "compile": ("compile", switched),
    "longest": ("longest", parse_duration),
    "time_limit": ("seconds", seconds_of),
}


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options.

    Args:
        device: where to run
        out: file that keeps every row; rows found there are not measured again (default: none)
        quiet: print no progress
    """

    device: Annotated[str, flag("auto|cpu|cuda")] = "auto"
    out: Annotated[Path | None, flag("FILE")] = None
    quiet: bool = False

    def measure(self, name: str, benchmark: Callable[..., Row], *without: str) -> Row:
        """Run a benchmark with these options, except `quiet` and those in `without`; return its document."""
        given: Row = {}
        for field in dataclasses.fields(self):
            if field.name not in ("quiet", *without):
                key, parse = _PARSED.get(field.name, (field.name, lambda value: value))
                given[key] = parse(getattr(self, field.name))
        with progress_bar(f"bench {name}", self.quiet) as progress:
            return benchmark(**given, progress=progress)


@dataclass(frozen=True)
class KernelOptions(BenchOptions):
    """Options.

    Args:
        device: where to run; sizes are small on CPU
    """


def cell(key: str, form: str | Callable[[Any], str] = "") -> Cell:
    """Return a column: a value of the row in that form, or a dash where the row has none."""

    def shown(row: Row) -> str:
        value = row.get(key)
        return form(value) if callable(form) and value is not None else number(value, str(form))

    return shown


def milliseconds(key: str) -> Cell:
    """Return a column of seconds as milliseconds."""
    return cell(key, lambda seconds: f"{1e3 * seconds:.4f}")


def show(title: str, columns: Mapping[str, Cell], rows: Iterable[Row], left: Iterable[str] = ()) -> None:
    """Print a table; all columns but the first and those in `left` are aligned right."""
    first, *others = columns
    right = [name for name in others if name not in left]
    print_table(title, [first, *others], [[form(row) for form in columns.values()] for row in rows], right)


def whole(document: Row, *needed: str) -> list[Row]:
    """Return the rows that have every needed column; print how many older rows are left out."""
    rows: list[Row] = document["rows"]
    known = [row for row in rows if all(name in row for name in needed)]
    if old := len(rows) - len(known):
        say(f"{old} of {len(rows)} rows have an older format and are not shown")
    return known


def where(document: Row) -> str:
    """Return the device, kernels and torch of a document."""
    return f"{document['device']}, {document['kernels']} kernels, torch {document['torch']}"


def end(document: Row) -> int:
    """Print the copy bandwidth, if it was measured, and the document as the last line; return the exit code."""
    if "copy_bytes_per_second" in document:
        say(f"copy {document['copy_bytes_per_second'] / 1e12:.2f} TB/s, read and written")
    say_json(document)
    return 0


def show_profile(name: str, found: Row) -> None:
    """Print the kernels of one step by kind, then the longest."""
    kinds = ", ".join(f"{kind} {spent:.2f}" for kind, spent in found["kinds"].items())
    say(f"kernels of one step of {name}, {found['milliseconds']:.2f} ms: {kinds}")
    columns = {"kernel": cell("name"), "ms": cell("milliseconds", ".3f"), "calls": cell("calls", "g")}
    show("", columns, found["kernels"][:20])
