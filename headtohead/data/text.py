"""Read the files of corpora and tasks: plain text, JSON lines, directories; .gz and .xz."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headtohead.common.errors import UserError
from headtohead.common.files import digest, open_regular

Array = np.ndarray[Any, Any]
Progress = Callable[[str, float], None]
"""Called with a message and the fraction that is done."""
SPLITS = ("train", "valid", "test")
TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".py", ".tex", ".html"),
    *(".xml", ".csv", ".tsv", ".c", ".h", ".js"),
)
_UNPACK: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open}
_LINES = (".jsonl", ".ndjson")
_CHUNK = 2**20
_IN_MEMORY = 64 * 2**20
"""A larger plain file is read in parts."""
MAX_TEXT = 2**30
"""Bytes of text that are read into memory: the limit of a .gz or .xz file, of JSON lines and of a directory."""


def silent(message: str, share: float) -> None:
    """Show no progress."""


def hashed_split(key: bytes | str, valid: float, test: float) -> str:
    """Return the split of a text by its hash, so that equal texts share a split."""
    share = int(digest(key)[:8], 16) / 2**32
    return "test" if share < test else "valid" if share < test + valid else "train"


class FileText:
    """A part of a plain text file that is read when it is used. Like bytes it has a length and slices, which are bytes."""

    def __init__(self, path: Path, start: int, stop: int) -> None:
        self.path, self.start, self.stop = path, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        with open_regular(self.path, links=True) as stream:
            stream.seek(self.start + start)
            content = stream.read(max(0, stop - start))
        if len(content) < stop - start:
            raise UserError(f"{self.path} became shorter while it was read")
        return content


Text = bytes | FileText
"""The text of a document."""


def part_of_text(text: Text, start: int, stop: int) -> Text:
    """Return a part of a text without reading it."""
    if isinstance(text, FileText):
        return FileText(text.path, text.start + start, text.start + stop)
    return text[start:stop]


def chunks(text: Text) -> Iterator[bytes]:
    """Yield a text in chunks of a megabyte; an empty text is one empty chunk."""
    for start in range(0, max(1, len(text)), _CHUNK):
        yield text[start : start + _CHUNK]


def is_blank(text: Text) -> bool:
    """Return whether a text is empty or white space."""
    return not any(chunk.strip() for chunk in chunks(text))


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a regular file for reading, decompressing .gz and .xz; raise an error that names a damaged archive."""
    with open_regular(path, links=True) as file:
        try:
            with _UNPACK[path.suffix](file) if path.suffix in _UNPACK else file as stream:
                yield stream
        except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise UserError(f"damaged file {path}: {error}") from None


def read_bytes(path: Path) -> bytes:
    """Return a file's decompressed content, of at most `MAX_TEXT` bytes."""
    parts, size = [], 0
    with open_bytes(path) as stream:
        while part := stream.read(_CHUNK):
            parts.append(part)
            size += len(part)
            check_text_size(path, size)
    return b"".join(parts)


def check_text_size(path: Path, size: int) -> None:
    """Raise if a text is too large to be read into memory."""
    if size > MAX_TEXT:
        raise UserError(
            f"{path} has more than {MAX_TEXT:,} bytes of text; give it as one plain .txt or .jsonl file, which is read in parts"
        )


def kind_of(path: Path) -> str:
    """Return the suffix of a file without compression: `.jsonl`, `.txt`, ..."""
    return Path(path.stem).suffix if path.suffix in _UNPACK else path.suffix


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object on each line; raise an error that names a damaged line."""
    with open_bytes(path) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_TEXT), b""), 1):
            if not line.strip():
                continue
            yield parse_json_line(path, number, line)


def parse_json_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the object on a line; raise an error that names the line."""
    try:
        row = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}, line {number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
    return row


def are_large_lines(path: Path) -> bool:
    """Return whether a file is plain JSON lines that are too large to be read at once."""
    return path.is_file() and path.suffix in _LINES and path.stat().st_size > _IN_MEMORY


def row_text(path: Path, number: int, row: dict[str, Any]) -> bytes:
    """Return the text field of a row of a user's JSON lines; raise an error that names the document."""
    text = row.get("text")
    if not isinstance(text, str):
        fields = ", ".join(row) or "none"
        raise UserError(f"{path}, document {number}: no text field (fields: {fields})")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = ascii(text[error.start : error.end])
        message = f"{path}, document {number}: {bad} is a lone surrogate, not valid UTF-8; remove it"
        raise UserError(message) from None


def large_text(path: Path) -> FileText | None:
    """Return the text of a plain file that is too large to be read at once, or None for any other file."""
    if not path.is_file() or path.suffix in _UNPACK or kind_of(path) in _LINES:
        return None
    size = path.stat().st_size
    if size <= _IN_MEMORY:
        return None
    text = FileText(path, 0, size)
    _check_text(path, text[:65536])
    return text


def _check_text(path: Path, start: bytes) -> None:
    if b"\0" in start:
        raise UserError(f"{path} looks like a binary file, not text (it contains zero bytes)")


def file_documents(path: Path) -> list[tuple[str, bytes]]:
    """Return (name, text) of every document in a file or directory."""
    if path.is_dir():
        names = (*TEXT_SUFFIXES, *_LINES)
        files = [file for file in path.rglob("*") if kind_of(file) in names and not file.name.startswith(".")]
        files = sorted(file for file in files if file.is_file())
        if not files:
            looked = ", ".join(TEXT_SUFFIXES[:6])
            raise UserError(f"no text files in {path} (looked for .jsonl, {looked}, ...)")
        found = []
        for file in files:
            found += file_documents(file)
            check_text_size(path, sum(len(text) for _, text in found))
        return found
    if kind_of(path) in _LINES:
        documents, size = [], 0
        for number, row in enumerate(read_json_lines(path), 1):
            documents.append((f"{path.name}:{number}", row_text(path, number, row)))
            size += len(documents[-1][1])
            check_text_size(path, size)
        return documents
    content = read_bytes(path)
    _check_text(path, content[:65536])
    return [(path.name, content)]
