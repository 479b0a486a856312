"""Turn downloads into the files of the data directory, as a stream: nothing is held in memory but one document.

An archive is never extracted to disk: only the named members are read, up to a size limit, and no content is executed.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from headtohead.data.text import SPLITS, hashed_split

Piece = tuple[str, bytes]
"""A file of the data directory, and bytes to append to it."""
Unpack = Callable[[Iterator[IO[bytes]]], Iterator[Piece]]
"""Yields the content of files, given the downloads as open streams."""
_CHUNK = 2**20
_MAX_DOCUMENT = 2**28


class Downloads:
    """The downloaded parts of a source, opened one after the other; knows how much of them has been read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.sizes = [path.stat().st_size for path in paths]
        self.index = 0
        self.stream: IO[bytes] | None = None

    def __iter__(self) -> Iterator[IO[bytes]]:
        for index, path in enumerate(self.paths):
            with open(path, "rb") as stream:
                self.index, self.stream = index, stream
                yield stream

    def share(self) -> float:
        """Return the share of all bytes that has been read."""
        here = self.stream.seek(0, os.SEEK_CUR) if self.stream and not self.stream.closed else 0
        return min(1.0, (sum(self.sizes[: self.index]) + here) / max(1, sum(self.sizes)))


def verbatim(*files: str) -> Unpack:
    """Every download is a file as it is."""

    def unpack(downloads: Iterator[IO[bytes]]) -> Iterator[Piece]:
        for file, stream in zip(files, downloads, strict=True):
            yield from ((file, chunk) for chunk in _chunks(stream))

    return unpack


def zipped(members: dict[str, str]) -> Unpack:
    """Every file is a member of the downloaded zip archive."""

    def unpack(downloads: Iterator[IO[bytes]]) -> Iterator[Piece]:
        with zipfile.ZipFile(next(downloads)) as archive:
            for file, member in members.items():
                with archive.open(member) as stream:
                    yield from ((file, chunk) for chunk in _chunks(stream))

    return unpack


def first_lines(unpack: Unpack, source: str, head: str, size: int) -> Unpack:
    """Also store the whole lines in the first `size` bytes of a file as another file."""

    def both(downloads: Iterator[IO[bytes]]) -> Iterator[Piece]:
        left = size
        for file, chunk in unpack(downloads):
            yield file, chunk
            if file == source and left > 0:
                part = chunk[:left]
                left -= len(part)
                yield head, part if left > 0 else part[: part.rfind(b"\n") + 1]

    return both


def json_rows(pattern: str, *fields: str) -> Unpack:
    """Documents are the given fields of JSON lines, plain or gzip, joined by line ends; split by a hash of the text."""

    def unpack(downloads: Iterator[IO[bytes]]) -> Iterator[Piece]:
        for stream in downloads:
            lines = gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == b"\x1f\x8b" else stream  # type: ignore[attr-defined]
            while line := lines.readline(_MAX_DOCUMENT):
                if line.strip():
                    row = json.loads(line)
                    yield from stored(pattern, "\n".join(str(row[field]) for field in fields))

    return unpack


def text_archives(pattern: str) -> Unpack:
    """Documents are the .txt members of .xz archives that are members of the downloaded tar archives."""

    def unpack(downloads: Iterator[IO[bytes]]) -> Iterator[Piece]:
        for stream in downloads:
            for _, packed in _members(stream, "r|", ".xz"):
                for _, text in _members(packed, "r|xz", ".txt"):
                    content = text.read(_MAX_DOCUMENT).decode("utf-8", "replace").strip()
                    yield from stored(pattern, content)

    return unpack


def _members(stream: IO[bytes], mode: Any, suffix: str) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for member in archive:
            if member.isreg() and member.name.endswith(suffix):
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content


def stored(pattern: str, text: str) -> Iterator[Piece]:
    """Yield a document as a line of its split: half a percent each are held out; a blank text is left out."""
    if text.strip():
        split = hashed_split(text.encode("utf-8", "replace"), 0.005, 0.005)
        yield pattern.format(split), _line({"text": text})


def split_files(pattern: str) -> tuple[str, ...]:
    """Return the files of the splits."""
    return tuple(pattern.format(split) for split in SPLITS)


def hatexplain(file: str) -> Unpack:
    """The posts of dataset.json with their split in post_id_divisions.json, one JSON object per line."""

    def unpack(downloads: Iterator[IO[bytes]]) -> Iterator[Piece]:
        posts = json.loads(next(downloads).read(_MAX_DOCUMENT))
        divisions = json.loads(next(downloads).read(_MAX_DOCUMENT))
        splits = {post: split for split, members in divisions.items() for post in members}
        for name, post in posts.items():
            row = {
                "post_id": name,
                "split": splits.get(name, "none"),
                "labels": [one["label"] for one in post["annotators"]],
                "targets": [one["target"] for one in post["annotators"]],
                "tokens": post["post_tokens"],
                "rationales": post["rationales"],
            }
            yield file, _line(row)

    return unpack


def side_by_side(file: str, header: str) -> Unpack:
    """Line n of every download, joined by tabs, below a header."""

    def unpack(downloads: Iterator[IO[bytes]]) -> Iterator[Piece]:
        columns = [stream.read(_MAX_DOCUMENT).decode("utf-8").splitlines() for stream in downloads]
        yield file, header.encode() + b"\n"
        for row in zip(*columns, strict=True):
            yield file, "\t".join(row).encode() + b"\n"

    return unpack


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: stream.read(_CHUNK), b"")


DAMAGED = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError),
    *(KeyError, TypeError, ValueError, AttributeError, RuntimeError),
)
"""What unpacking a damaged or unexpected download raises."""
