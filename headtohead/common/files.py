"""Files: reading regular files up to a size limit, atomic writes (temporary name, fsync, rename), JSON, checksums."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headtohead.common.errors import DamagedFile, MissingFile, UnreadableFile

MAX_BYTES = 64 * 2**20
"""The default size limit of a file that is read into memory."""


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` atomically: after a crash the file has either the old or the new content."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite(value: Any) -> Any:
    """Return `value` with every NaN and infinity replaced by None, which JSON writes as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write `value` as JSON, atomically. NaN and infinity become null. `indent=None` is four times faster."""
    write_atomic(path, json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False) + "\n")


def append(path: Path, content: bytes, sync: bool = False) -> None:
    """Append to a regular file, usually in a single write; a pipe, device or link raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    new = sync and not path.exists()
    descriptor = os.open(path, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        while content:
            content = content[os.write(descriptor, content) :]
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if new:
        sync_directory(path.parent)


def open_regular(path: Path, links: bool = False) -> io.BufferedReader:
    """Open a regular file for reading; raise UnreadableFile for a pipe, a device or a directory, without waiting for it.

    Files of a study and of the cache are never links: one raises DamagedFile. `links` follows them, for a user's files.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFile(f"no such file: {path}") from None
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise _rejected(path, "a symbolic link", links) from None
        if error.errno == errno.ENXIO:  # a socket
            raise _rejected(path, "not a regular file", links) from None
        raise UnreadableFile(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _rejected(path, "not a regular file", links)
    return os.fdopen(descriptor, "rb")


def _rejected(path: Path, reason: str, links: bool) -> UnreadableFile:
    """Return the error for a file that is not read: of a study or cache, or, with `links`, of the user."""
    return (
        UnreadableFile(f"cannot read {path}: {reason}")
        if links
        else DamagedFile(f"damaged file {path}: {reason}")
    )


def read_file(path: Path, limit: int = MAX_BYTES, links: bool = False) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; `links` as in `open_regular`."""
    with open_regular(path, links) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise _rejected(path, f"{size:,} bytes; the limit is {limit:,}", links)
        try:
            # No more than `size`: a file that grows meanwhile, such as a log, is read up to where it ended.
            return stream.read(size)
        except OSError as error:
            raise UnreadableFile(f"cannot read {path}: {error.strerror}") from None


def read_text(path: Path, limit: int = MAX_BYTES, links: bool = False) -> str:
    """Return the content of a UTF-8 file; otherwise as `read_file`."""
    try:
        return read_file(path, limit, links).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _rejected(path, f"not UTF-8 text ({error.reason} at byte {error.start})", links) from None


def read_json(
    path: Path, parse: Callable[[bytes], Any] = json.loads, limit: int = MAX_BYTES, links: bool = False
) -> Any:
    """Return the JSON in `path`. Errors for a missing, damaged or oversized file name it."""
    try:
        return parse(read_file(path, limit, links))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"damaged file {path}: {error}") from None


def canonical_json(value: Any) -> str:
    """Return `value` as canonical JSON (sorted keys, no spaces), for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: bytes | str) -> str:
    """Return the sha256 of `value` in hex."""
    return hashlib.sha256(value.encode("utf-8") if isinstance(value, str) else value).hexdigest()


def digest_file(path: Path, links: bool = False) -> str:
    """Return the sha256 of a regular file's bytes in hex; `links` as in `open_regular`."""
    with open_regular(path, links) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
