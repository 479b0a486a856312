"""Atomic file writes (temporary name, fsync, rename), JSON and checksums."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headtohead.common.errors import DamagedFile, MissingFile, UnreadableFile

_MAX_BYTES = 256 * 2**20


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


def read_json(path: Path, parse: Callable[[bytes], Any] = json.loads) -> Any:
    """Return the JSON in `path`. Errors for a missing, damaged or oversized file name it."""
    try:
        with open(path, "rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > _MAX_BYTES:
                raise DamagedFile(f"damaged file {path}: {size:,} bytes")
            return parse(stream.readall())
    except FileNotFoundError:
        raise MissingFile(f"no such file: {path}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"damaged file {path}: {error}") from None
    except OSError as error:
        raise UnreadableFile(f"cannot read {path}: {error.strerror}") from None


def canonical_json(value: Any) -> str:
    """Return `value` as canonical JSON (sorted keys, no spaces), for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: bytes | str) -> str:
    """Return the sha256 of `value` in hex."""
    return hashlib.sha256(value.encode("utf-8") if isinstance(value, str) else value).hexdigest()


def digest_file(path: Path) -> str:
    """Return the sha256 of a file's bytes in hex."""
    with open(path, "rb") as stream:
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
    value = json.loads(content)
    match = _CHECKSUM.fullmatch(content[-_CHECKSUM_LENGTH:])
    if match:
        if digest(content[:-_CHECKSUM_LENGTH])[:16].encode() != match[1]:
            raise ValueError("checksum mismatch")
    elif isinstance(value, dict) and "checksum" in value:
        raise ValueError("the checksum is not the last member")
    return value
