"""Rows out of a task's files: JSON lines, tab-separated columns, the SQuAD format; a damaged one is named with its place."""

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
    """Return a reader of tab-separated lines without quoting; without names of columns the first line gives them."""

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
    """Yield a row per question: title, context, question and its answers, each with where it starts."""
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


class Places:
    """Rows by file, each walked once; knows which row is being read, so that a mistake in it can be named."""

    def __init__(self, rows: dict[str, tuple[Path, Iterable[Row]]], progress: Progress = _silent) -> None:
        self._rows, self._progress = rows, progress
        self.words = ""

    def __getitem__(self, key: str) -> Iterator[Row]:
        path, rows = self._rows[key]
        self.words = str(path)
        for number, row in enumerate(rows, 1):
            self.words = f"{path}, row {number}"
            if number % 1000 == 0:
                self._progress(f"reading {path.name}, {number:,} rows", 0.0)
            yield row

    def all(self) -> Iterator[Row]:
        """Yield the rows of every file."""
        for key in self._rows:
            yield from self[key]

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Turn whatever a damaged row raises into one line that names it."""
        try:
            yield
        except UserError:
            raise
        except (lzma.LZMAError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DamagedFile(f"damaged file {self.words}: {error}") from None
        except KeyError as error:
            raise UserError(f"{self.words}: no field {error}") from None
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(f"{self.words}: {error}") from None
