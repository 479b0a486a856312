"""Read documents from files: plain text, JSON lines, directories; .gz and .xz."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headtohead.common.errors import UserError
from headtohead.common.files import open_regular

TEXT_SUFFIXES = (
    ".txt",
    ".text",
    ".md",
    ".rst",
    ".py",
    ".tex",
    ".html",
    ".xml",
    ".csv",
    ".tsv",
    ".c",
    ".h",
    ".js",
)
_PACKED = (".gz", ".xz")


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a regular file for reading, decompressing .gz and .xz; raise an error that names a damaged archive."""
    with open_regular(path, links=True) as file:
        try:
            if path.suffix == ".gz":
                with gzip.open(file) as unpacked:
                    yield unpacked
            elif path.suffix == ".xz":
                with lzma.open(file) as unpacked:
                    yield unpacked
            else:
                yield file
        except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise UserError(f"damaged file {path}: {error}") from None


def read_bytes(path: Path) -> bytes:
    """Return a file's decompressed content."""
    with open_bytes(path) as stream:
        return stream.read()


def kind_of(path: Path) -> str:
    """Return the suffix of a file without compression: `.jsonl`, `.txt`, ..."""
    return Path(path.stem).suffix if path.suffix in _PACKED else path.suffix


def read_json_lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the object on each line; raise an error that names a damaged line."""
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise UserError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}, line {number}: expected an object with a text field, got {type(row).__name__}"
                )
            yield row


def file_documents(path: Path) -> list[tuple[str, bytes]]:
    """Return (name, text) of every document in a file or directory."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _is_text_name(file))
        if not files:
            raise UserError(
                f"no text files in {path} (looked for .jsonl, {', '.join(TEXT_SUFFIXES[:6])}, ...)"
            )
        return [document for file in files for document in file_documents(file)]
    if not path.is_file():
        raise UserError(f"no such file or directory: {path}")
    if kind_of(path) in (".jsonl", ".ndjson"):
        documents = []
        for number, row in enumerate(read_json_lines(path), 1):
            text = row.get("text")
            if not isinstance(text, str):
                raise UserError(
                    f"{path}, document {number}: no text field (fields: {', '.join(map(str, row)) or 'none'})"
                )
            try:
                documents.append((f"{path.name}:{number}", text.encode("utf-8")))
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{path}, document {number}: {text[error.start : error.end]!a} is a lone surrogate, not valid "
                    "UTF-8; remove it"
                ) from None
        return documents
    content = read_bytes(path)
    if b"\0" in content[:65536]:
        raise UserError(f"{path} looks like a binary file, not text (it contains zero bytes)")
    return [(path.name, content)]


def _is_text_name(path: Path) -> bool:
    return kind_of(path) in (*TEXT_SUFFIXES, ".jsonl", ".ndjson") and not path.name.startswith(".")
