"""Read a .tar.gz or .tar.xz file from an untrusted source once, from start to end, in constant memory.

The limits hold for the unpacked bytes, the compression ratio, the number of members and the size of a header. Links,
devices, directories and sparse files are rejected, and so is a name that occurs twice. The checksums of gzip and xz are
verified, because the file is read to its end.
"""

from __future__ import annotations

import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

MAX_BYTES = 4 * 2**30
MAX_MEMBERS = 100_000
MAX_HEADER = 2**16
"""Bytes of one header; tarfile reads a header of any claimed size into memory."""
MAX_RATIO = 1000
"""Unpacked over packed bytes. Exports have 3 to 12, and some hundred if all runs have the same tokenizer."""
_ANY_RATIO_BYTES = 256 * 2**20
"""Archives below this unpacked size may have any ratio."""
_MAX_DICTIONARY = 128 * 2**20
"""Memory limit of xz, whose strongest preset takes 65 MiB."""
_PACKED_BYTES = 4096
"""Bytes decompressed at once: at most 30 MB unpacked."""

# tarfile raises these for malformed numbers, texts and chains of headers.
_MALFORMED = (ValueError, OverflowError, IndexError, RecursionError)
DAMAGE = (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, *_MALFORMED)
"""The errors of an archive that is damaged or exceeds a limit."""


class TarStream(io.RawIOBase):
    """The unpacked bytes of an archive as the file object that tarfile reads; it can only move forward."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._packed_size = os.fstat(file.fileno()).st_size
        self._chunks = _unpacked(file)
        self._chunk, self._start = b"", 0
        self._position = self._unpacked_size = 0
        self._last = b""

    def members(self) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
        """Yield each member and its content, which must be read before the next one; raise one of `DAMAGE`."""
        names: set[str] = set()
        with tarfile.open(fileobj=self, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it keeps every header
                if archive.pax_headers:
                    raise tarfile.ReadError("a header for all members")
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
                    raise tarfile.ReadError(f"{member.name[:80]!a} is not a regular file")
                if member.name in names:
                    raise tarfile.ReadError(f"{member.name[:80]!a} occurs twice")
                names.add(member.name)
                if len(names) > MAX_MEMBERS:
                    raise tarfile.ReadError(f"more than {MAX_MEMBERS:,} files")
                content = archive.extractfile(member)
                assert content is not None
                yield member, content
        # tarfile takes a damaged header after the first one for the end of the archive.
        if self._last != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("damaged header, or truncated")
        while self._next_chunk():
            pass

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, fewer at the end."""
        if not 0 <= size <= MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        parts = []
        while size > 0 and (self._start < len(self._chunk) or self._next_chunk()):
            part = self._chunk[self._start : self._start + size]
            self._start += len(part)
            size -= len(part)
            parts.append(part)
        self._last = b"".join(parts)
        self._position += len(self._last)
        return self._last

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Skip to a position; return it."""
        position = offset + (self._position if whence == os.SEEK_CUR else 0)
        if position < self._position:
            raise tarfile.ReadError("a header of negative size")
        while self._position < position and self.read(min(MAX_HEADER, position - self._position)):
            pass
        return self._position

    def _next_chunk(self) -> bool:
        """Unpack more bytes; return False at the end."""
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        self._chunk, self._start = chunk, 0
        self._unpacked_size += len(chunk)
        if self._unpacked_size > MAX_BYTES:
            raise tarfile.ReadError(f"more than {MAX_BYTES:,} bytes unpacked")
        if self._unpacked_size > max(_ANY_RATIO_BYTES, MAX_RATIO * self._packed_size):
            raise tarfile.ReadError(f"more than {MAX_RATIO:,} times its size unpacked")
        return True


def _unpacked(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield the unpacked bytes of a gzip or xz file; raise if it is truncated or a checksum does not match."""
    gzip = file.peek(2)[:2] == b"\x1f\x8b"
    stream = _decompressor(gzip)
    while packed := file.read(_PACKED_BYTES):
        while packed:
            if stream.eof:  # zeros may follow, or another stream
                packed = packed.lstrip(b"\0")
                if not packed:
                    break
                stream = _decompressor(gzip)
            if chunk := stream.decompress(packed):
                yield chunk
            packed = stream.unused_data
    if not stream.eof:
        raise EOFError("truncated")


def _decompressor(gzip: bool) -> Any:
    return zlib.decompressobj(wbits=31) if gzip else lzma.LZMADecompressor(lzma.FORMAT_XZ, _MAX_DICTIONARY)
