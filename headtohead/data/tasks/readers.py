"""Read the rows of a task's files: JSON lines, tab-separated columns, SQuAD format; errors name the file and row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from headtohead.common.errors import DamagedFile, UserError
from headtohead.data.text import Progress, kind_of, read_bytes, read_json_lines, silent

Row = dict[str, Any]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Kind(Generic[Found]):
    """A task read from files: its description, its files by key, and what it reads from a row of one."""

    about: str
    files: dict[str, str]
    read: Callable[[str, Row], Iterable[Found]]
    """Called with a file's key and a row of that file."""
    classes: tuple[str, ...] = ()
    metric: str = "accuracy"
    columns: tuple[str, ...] = ()
    """Names of the columns of a table without a header."""

    def read_all(self, paths: Mapping[str, Path], progress: Progress = silent) -> Iterator[Found]:
        """Yield what is read from every row of the files; errors name the file and row."""
        for key, path in paths.items():
            location = str(path)
            try:
                for number, row in enumerate(_rows(path, self.columns), 1):
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


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of a file in the format that its name says."""
    if kind_of(path) == ".jsonl":
        return read_json_lines(path)
    return _squad_rows(path) if kind_of(path) == ".json" else _table_rows(path, columns)


def _table_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """Yield tab-separated lines without quoting; without `columns` the first line is the header."""
    lines = enumerate(read_bytes(path).decode("utf-8-sig").rstrip("\n").split("\n"), 1)
    names = columns or next(lines)[1].rstrip("\r").split("\t")
    for number, line in lines:
        values = line.rstrip("\r").split("\t")
        if len(values) != len(names):
            raise UserError(f"{path}, line {number}: {len(values)} columns, expected {len(names)}")
        yield dict(zip(names, values, strict=True))


def _squad_rows(path: Path) -> Iterator[Row]:
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
