"""Files: reading regular files up to a size limit, atomic writes (temporary name, fsync, rename), JSON, checksums."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headtohead.common.errors import DamagedFile, MissingFile, UnreadableFile, UserError

MAX_BYTES = 64 * 2**20
"""The default size limit of a file that is read into memory."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise errors of the operating system again with `path` as their file: a full disk names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from None


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` atomically: after a crash the file has either the old or the new content.

    A symbolic link is replaced, not followed; a directory, a device or a pipe is an error and stays.
    """
    with replacing(path) as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` at the end."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with naming(path):
        _check_replaceable(path)
        try:
            with open(temporary, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def _check_replaceable(path: Path) -> None:
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise OSError(errno.EINVAL, "not a regular file; it is not replaced")


def write_output(path: Path, content: bytes | str) -> None:
    """Write `content` to a path that the user gave as output, as `open_output` does."""
    with open_output(path) as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def open_output(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream to a path that the user gave as output.

    A regular file is replaced atomically, behind a symbolic link too; a device or a pipe, such as /dev/stdout, is
    written to. Not for files of a study: a link in a study of another author may name any file.
    """
    if (target := output_target(path)) is not None:
        with replacing(target) as stream:
            yield stream
        return
    # A second descriptor of a redirected standard output would write at a position of its own.
    ours = _is_stdout(path)
    if ours:
        sys.stdout.flush()
    with naming(path), open(1 if ours else path, "wb", closefd=not ours) as stream:
        yield stream


def output_target(path: Path) -> Path | None:
    """Return the file that output to `path` replaces, or None for a device, a pipe or standard output."""
    with naming(path):
        try:
            found = path.stat()
        except FileNotFoundError:
            return Path(os.path.realpath(path))
    if stat.S_ISDIR(found.st_mode):
        raise UserError(f"cannot write to {path}: it is a directory")
    return path.resolve() if stat.S_ISREG(found.st_mode) and not _is_stdout(path) else None


def _is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:  # standard output is closed
        return False


def open_to_append(root: Path, *names: str) -> BinaryIO:
    """Open the file `names` below `root` for appending; directories below `root` are created.

    No component below `root` may be a symbolic link or a pipe: a study of another author could name any file that way.
    """
    path = root
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names[:-1]:
            path = path / name
            with naming(path), suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            inner = _open_unlinked(path, os.O_RDONLY | os.O_DIRECTORY, folder)
            os.close(folder)
            folder = inner
        flags = (
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        )  # O_NONBLOCK: a pipe without a reader fails
        descriptor = _open_unlinked(path / names[-1], flags, folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path / names[-1]))
    return open(descriptor, "ab")


def _open_unlinked(path: Path, flags: int, folder: int) -> int:
    try:
        return os.open(path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder)
    except OSError as error:
        message = "symbolic links are not followed here" if path.is_symlink() else error.strerror
        raise OSError(error.errno, message, str(path)) from None


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
    write_atomic(path, json_text(value, indent))


def json_text(value: Any, indent: int | None = 1) -> str:
    """Return `value` as JSON that ends with a newline. NaN and infinity become null."""
    return json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


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


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text, as json.loads does, three times faster."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return json.loads(content)  # which accepts NaN, and whose errors name the line


def read_json(
    path: Path, parse: Callable[[bytes], Any] = parse_json, limit: int = MAX_BYTES, links: bool = False
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


def with_checksum(value: Mapping[str, Any]) -> str:
    """Return `value` as JSON text, one line per member; the last member is the checksum of the text before it.

    A checksum in `value` is replaced, NaN and infinity become null.
    """
    lines = (
        f" {json.dumps(key)}: {json.dumps(item, ensure_ascii=False, allow_nan=False)}"
        for key, item in finite(value).items()
        if key != "checksum"
    )
    body = "{\n" + ",\n".join(lines)
    return f'{body},\n "checksum": "{digest(body)[:16]}"\n}}\n'


_CHECKSUM = re.compile(rb',\n "checksum": "([0-9a-f]{16})"\n}\n')
_CHECKSUM_LENGTH = len(',\n "checksum": ""\n}\n') + 16


def verify_checksum(content: bytes) -> Any:
    """Return the value of a JSON text with checksum; raise ValueError on a mismatch.

    A text without a checksum is accepted.
    """
    value = parse_json(content)
    match = _CHECKSUM.fullmatch(content[-_CHECKSUM_LENGTH:])
    if match:
        if digest(content[:-_CHECKSUM_LENGTH])[:16].encode() != match[1]:
            raise ValueError("checksum mismatch")
    elif isinstance(value, dict) and "checksum" in value:
        raise ValueError("the checksum is not the last member")
    return value
