"""Read the rows of a task's files: JSON lines, tab-separated columns, SQuAD format; errors name the file and row."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headtohead.common.errors import DamagedFile, UserError
from headtohead.data.corpora import Progress, _silent
from headtohead.data.text import read_bytes, read_json_lines

Row = dict[str, Any]
Reader = Callable[[Path], Iterator[Row]]


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
                yield {
                    "title": article["title"],
                    "context": paragraph["context"],
                    "question": question["question"],
                    "answers": {
                        "text": [answer["text"] for answer in question["answers"]],
                        "answer_start": [answer["answer_start"] for answer in question["answers"]],
                    },
                }


class Rows:
    """Rows by file, each read once; tracks the current row, so that errors can name it."""

    def __init__(self, rows: dict[str, tuple[Path, Iterable[Row]]], progress: Progress = _silent) -> None:
        self._rows, self._progress = rows, progress
        self.location = ""

    def __getitem__(self, key: str) -> Iterator[Row]:
        path, rows = self._rows[key]
        self.location = str(path)
        for number, row in enumerate(rows, 1):
            self.location = f"{path}, row {number}"
            if number % 1000 == 0:
                self._progress(f"reading {path.name}, {number:,} rows", 0.0)
            yield row

    def all(self) -> Iterator[Row]:
        """Yield the rows of every file."""
        for key in self._rows:
            yield from self[key]

    @contextmanager
    def locate_errors(self) -> Iterator[None]:
        """Convert the exception of a damaged row into a one-line error that names the row."""
        try:
            yield
        except UserError:
            raise
        except (lzma.LZMAError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DamagedFile(f"damaged file {self.location}: {error}") from None
        except KeyError as error:
            raise UserError(f"{self.location}: no field {error}") from None
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(f"{self.location}: {error}") from None
