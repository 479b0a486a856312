"""Download a file over HTTP: a partial file is resumed, the size and the checksum are verified, then it is renamed."""

from __future__ import annotations

import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from headtohead.common import VERSION
from headtohead.common.errors import UserError
from headtohead.common.files import digest_file, naming, sync_directory, write_atomic
from headtohead.common.numbers import short_bytes
from headtohead.data.text import Progress

LOCK = ".lock"
"""The file in the folder of downloads that a running download locks."""
_CHUNK = 2**18
_ATTEMPTS = 3
_PAUSE = 2.0
"""Seconds before a broken connection is tried again."""
_TIMEOUT = 60.0


class DownloadFailed(UserError):
    """A download that failed at every address. The message names the address and the cause."""


def download(urls: Sequence[str], path: Path, sha256: str, progress: Progress) -> None:
    """Download the first address that works to `path`, unless the file is there; until it is complete it is `path`.part.

    Raises DownloadFailed. What arrived is kept for the next call, unless its checksum is wrong.
    """
    if path.is_file():
        if sha256 and (found := digest_file(path, links=True)) != sha256:
            raise UserError(f"{path} has the checksum {found[:12]}... instead of {sha256[:12]}...; remove it")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    failure = ""
    for url in urls:
        for attempt in range(_ATTEMPTS):
            try:
                with _lock(path), naming(path):
                    return _once(url, path, sha256, progress)
            except _Broken as error:
                failure = f"cannot download {url}: {error}"
                if attempt + 1 < _ATTEMPTS and error.again:
                    time.sleep(_PAUSE)
                else:
                    break
    raise DownloadFailed(failure)


class _Broken(Exception):
    """One failed attempt."""

    def __init__(self, reason: str, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again
        """Whether the same address may work if it is tried again."""


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of a download: two processes would write into the same part."""
    lock = FileLock(path.parent / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"another download into {path.parent} is running; wait until it ends") from None
    try:
        yield
    finally:
        lock.release()


def _once(url: str, path: Path, sha256: str, progress: Progress) -> None:
    part, mark = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.version")
    version = _version(part, mark, url)
    have = part.stat().st_size if version or (sha256 and part.is_file()) else 0
    request = urllib.request.Request(
        url, headers={"User-Agent": f"headtohead/{VERSION}", "Accept-Encoding": "identity"}
    )
    if have:
        request.add_header("Range", f"bytes={have}-")
        if version:
            request.add_header("If-Range", version)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            if response.status != 206 or _first_byte(response) != have:
                have = 0
            resumed, total = have > 0, _total(response, have)
            write_atomic(mark, f"{url}\n{_strong(response)}\n")
            with open(part, "ab" if have else "wb") as stream:
                have = _receive(response, stream, have, total, path.name, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the part is longer than the file
            part.unlink(missing_ok=True)
            raise _Broken("the part on disk did not fit and was deleted", again=True) from None
        raise _Broken(f"HTTP {error.code} {error.reason}", again=error.code >= 500) from None
    except urllib.error.URLError as error:
        raise _Broken(str(getattr(error.reason, "strerror", None) or error.reason)) from None
    except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        raise _Broken(f"the connection broke ({type(error).__name__})", again=True) from None
    if total is not None and have != total:
        raise _Broken(f"the connection broke after {have:,} of {total:,} bytes", again=True)
    if sha256 and (found := digest_file(part)) != sha256:
        part.unlink()
        message = f"checksum {found[:12]}... instead of {sha256[:12]}...; the download was deleted"
        raise _Broken(message, again=resumed)  # the part may have been the wrong one
    os.replace(part, path)
    mark.unlink(missing_ok=True)
    sync_directory(path.parent)


def _version(part: Path, mark: Path, url: str) -> str:
    """Return the version (ETag) of the partial file if it is from this address, or an empty string."""
    try:
        source, version = mark.read_text(encoding="utf-8").split("\n")[:2]
    except (OSError, ValueError):
        return ""
    return version if part.is_file() and source == url else ""


def _strong(response: http.client.HTTPResponse) -> str:
    """Return the ETag of a response if it identifies the bytes."""
    tag = response.headers.get("ETag", "")
    return "" if tag.startswith("W/") or "\n" in tag else tag


def _first_byte(response: http.client.HTTPResponse) -> int:
    """Return the position of the first byte of a partial response, or -1 if it is not stated."""
    start = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else -1


def _total(response: http.client.HTTPResponse, have: int) -> int | None:
    """Return the size of the whole file, or None if the server does not state it."""
    length = response.headers.get("Content-Length", "")
    return have + int(length) if length.isdigit() else None


def _receive(
    response: http.client.HTTPResponse,
    stream: BinaryIO,
    have: int,
    total: int | None,
    name: str,
    progress: Progress,
) -> int:
    """Append the response to a file; return the size of the file."""
    while chunk := response.read(_CHUNK):
        stream.write(chunk)
        have += len(chunk)
        of = f" of {short_bytes(total)}" if total else ""
        progress(f"downloading {name}, {short_bytes(have)}{of}", have / total if total else 0.0)
    return have
