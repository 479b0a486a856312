"""Get a source: download its parts, unpack them into the data directory, compare them with the recorded content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from headtohead.common.errors import UserError
from headtohead.common.files import replacing
from headtohead.common.numbers import short_bytes
from headtohead.data.get.download import LOCK, DownloadFailed, download
from headtohead.data.get.recorded import same_as_recorded
from headtohead.data.get.sources import Remote, Source
from headtohead.data.get.unpack import DAMAGED, Downloads, Piece
from headtohead.data.text import Progress

DOWNLOADS = "downloads"
"""The folder of the data directory with downloads that are not unpacked yet; it is the place for files got by hand."""
_PROGRESS_EVERY = 2**22
_MAX_EXPANSION = 100
"""Bytes written for a byte downloaded, beyond a first GiB; compressed text is below 10."""


@dataclass(frozen=True)
class Stored:
    """A file that was written."""

    path: Path
    size: int
    sha256: str
    same: bool | None
    """Whether it is the file that results were recorded on; None if none were."""


def fetch(source: Source, folder: Path, parts: int, progress: Progress) -> list[Stored]:
    """Download `parts` parts of a source (0: its default) and write its files; nothing is written if one fails."""
    count = parts or source.default_parts or len(source.parts)
    paths = [_download(part, folder, progress) for part in source.parts[:count]]
    downloads = Downloads(paths)
    try:
        found = _write(source, folder, downloads, progress)
    except _Damaged as error:
        part = paths[downloads.index]
        part.unlink(missing_ok=True)
        raise UserError(
            f"damaged download {part.name}: {error}; it was deleted, run the command again"
        ) from None
    for path in paths:
        path.unlink()
    _remove_empty(folder / DOWNLOADS)
    return found


class _Damaged(Exception):
    """A download that cannot be unpacked, or has other content than expected."""


def _download(part: Remote, folder: Path, progress: Progress) -> Path:
    path = folder / DOWNLOADS / part.name
    try:
        download(part.urls, path, part.sha256, progress)
    except DownloadFailed as error:
        raise UserError(
            f"{error}; the same command continues, or download {part.urls[0]} by hand to {path} and run it again"
        ) from None
    return path


def _write(source: Source, folder: Path, downloads: Downloads, progress: Progress) -> list[Stored]:
    sizes = dict.fromkeys(source.files, 0)
    digests = {file: sha256() for file in source.files}
    written = shown = 0
    for file in source.files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        streams = {file: stack.enter_context(replacing(folder / file)) for file in source.files}
        for file, piece in _unpacked(source, downloads):
            streams[file].write(piece)
            digests[file].update(piece)
            sizes[file] += len(piece)
            written += len(piece)
            if written - shown >= _PROGRESS_EVERY:
                shown = written
                if written > _MAX_EXPANSION * sum(downloads.sizes) + 2**30:
                    raise _Damaged(f"it unpacks to more than {written:,} bytes")
                progress(f"unpacking {file}, {short_bytes(written)}", downloads.share())
        found = [
            Stored(folder / file, size, digest := digests[file].hexdigest(), same_as_recorded(file, digest))
            for file, size in sizes.items()
        ]
        for one in found:
            if not one.size:
                raise _Damaged(f"it has no content for {one.path.name}")
            if source.exact and one.same is False:
                raise _Damaged(f"{one.path.name} has the checksum {one.sha256[:12]}..., not the expected one")
    return found


def _unpacked(source: Source, downloads: Downloads) -> Iterator[Piece]:
    """Yield the pieces of a source's files; errors of a damaged download are raised as such."""
    try:
        yield from source.unpack(iter(downloads))
    except DAMAGED as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from None


def _remove_empty(folder: Path) -> None:
    """Remove the folder of downloads if only its lock is left."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK}:
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()
