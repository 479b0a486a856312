"""Documents of a large JSON-lines file, read when they are used: memory holds their positions, not their text."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from headtohead.common.files import open_regular
from headtohead.data.text import MAX_TEXT, Progress, Text, parse_json_line, silent

TextOf = Callable[[int, dict[str, Any]], bytes]
"""Returns the text of a row, given its number and the row."""
_PROGRESS_EVERY = 10_000


class StoredLines(Sequence[tuple[str, Text]]):
    """(name, text) of documents of one file; 24 bytes of memory each."""

    def __init__(self, path: Path, label: str, text_of: TextOf) -> None:
        self.path, self.label, self.text_of = path, label, text_of
        self.numbers, self.starts, self.lengths = array("Q"), array("Q"), array("Q")
        """Of each document: the number of its row, its offset in the file, and the bytes of its text."""

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> tuple[str, Text]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, Text]]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, Text] | list[tuple[str, Text]]:
        indices = range(len(self))[index]
        return list(self._read(indices)) if isinstance(indices, range) else next(self._read([indices]))

    def __iter__(self) -> Iterator[tuple[str, Text]]:
        return self._read(range(len(self)))

    def _read(self, indices: Sequence[int]) -> Iterator[tuple[str, bytes]]:
        with open_regular(self.path, links=True) as stream:
            for index in indices:
                stream.seek(self.starts[index])
                number = self.numbers[index]
                row = parse_json_line(self.path, number, stream.readline(MAX_TEXT))
                yield f"{self.label}:{number}", self.text_of(number, row)


def index_lines(
    path: Path,
    label: str,
    text_of: TextOf,
    split_of: Callable[[bytes], str | None],
    progress: Progress = silent,
) -> dict[str, StoredLines]:
    """Return the documents of a plain JSON-lines file by split; `split_of` a text is None if it is left out."""
    found: dict[str, StoredLines] = {}
    size = max(1, path.stat().st_size)
    number = start = 0
    with open_regular(path, links=True) as stream:
        while line := stream.readline(MAX_TEXT):
            if line.strip():
                number += 1
                text = text_of(number, parse_json_line(path, number, line))
                if (split := split_of(text)) is not None:
                    lines = found.setdefault(split, StoredLines(path, label, text_of))
                    lines.numbers.append(number)
                    lines.starts.append(start)
                    lines.lengths.append(len(text))
                if number % _PROGRESS_EVERY == 0:
                    progress(f"reading {path.name}", start / size)
            start += len(line)
    return found


def text_lengths(documents: Sequence[tuple[str, Text]]) -> Sequence[int]:
    """Return the bytes of each document, without reading documents that are stored."""
    if isinstance(documents, StoredLines):
        return documents.lengths
    return [len(text) for _, text in documents]
