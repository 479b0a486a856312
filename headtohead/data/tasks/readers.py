"""Read the rows of a task's files: JSON lines, tab-separated columns, SQuAD format; errors name the file and row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from headtohead.common.errors import DamagedFile, UserError
from headtohead.data.text import Progress, read_bytes, read_json_lines, silent

Row = dict[str, Any]
Reader = Callable[[Path], Iterator[Row]]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Kind(Generic[Found]):
    """A task read from files: its description, its files by key, their format, and what it reads from a row."""

    about: str
    files: dict[str, str]
    rows: Reader
    read: Callable[[str, Row], Iterable[Found]]
    """Called with a file's key and a row of that file."""
    classes: tuple[str, ...] = ()
    metric: str = "accuracy"

    def found(
        self, paths: Mapping[str, Path], rows: Reader | None = None, progress: Progress = silent
    ) -> Iterator[Found]:
        """Yield what is read from every row of the files; `rows` replaces their format."""
        for key, path in paths.items():
            location = str(path)
            try:
                for number, row in enumerate((rows or self.rows)(path), 1):
                    location = f"{path}, row {number}"
                    if number % 1000 == 0:
                        progress(f"reading {path.name}, {number:,} rows", 0.0)
                    yield from self.read(key, row)
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise DamagedFile(f"damaged file {location}: {error}") from None
            except KeyError as error:
                raise UserError(f"{location}: no field {error}") from None
            except (TypeError, ValueError, IndexError, AttributeError) as error:
                raise UserError(f"{location}: {error}") from None


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the object on each line."""
    return read_json_lines(path)


def table_rows(*columns: str) -> Reader:
    """Return a reader of tab-separated lines without quoting; without `columns` the first line is the header."""

    def read(path: Path) -> Iterator[Row]:
        lines = read_bytes(path).decode("utf-8-sig").rstrip("\n").split("\n")
        names = list(columns) or lines[0].rstrip("\r").split("\t")
        for number, line in enumerate(lines if columns else lines[1:], 1 if columns else 2):
            values = line.rstrip("\r").split("\t")
            if len(values) != len(names):
                raise UserError(f"{path}, line {number}: {len(values)} columns, expected {len(names)}")
            yield dict(zip(names, values, strict=True))

    return read


def squad_rows(path: Path) -> Iterator[Row]:
    """Yield a row per question: title, context, question, and answers with their start offsets."""
    for article in json.loads(read_bytes(path))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = question["answers"]
                yield {
                    "title": article["title"],
                    "context": paragraph["context"],
                    "question": question["question"],
                    "answers": {name: [row[name] for row in answers] for name in ("text", "answer_start")},
                }
