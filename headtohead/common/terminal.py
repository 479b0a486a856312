"""Printing of text that may come from files of others: control characters are escaped, no character raises."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any, TextIO

from headtohead.common.files import finite

# C0 and C1 controls, direction marks and overrides, line separators, lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "\n\t") -> str:
    """Return `text` with its control characters as escapes such as \\x1b, except those in `keep`."""

    def escape(match: re.Match[str]) -> str:
        letter = match[0]
        if letter in keep:
            return letter
        return f"\\x{ord(letter):02x}" if ord(letter) < 256 else f"\\u{ord(letter):04x}"

    return _UNSAFE.sub(escape, text)


def say(text: object = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text, control characters escaped, on standard output or `file`."""
    write(printable(str(text)) + end, file, flush)


def say_json(value: Any, indent: int | None = None) -> None:
    """Print `value` as one JSON document in ASCII."""
    write(json.dumps(finite(value), indent=indent, allow_nan=False) + "\n")


def write(text: str, file: TextIO | None = None, flush: bool = False) -> None:
    """Write text as it is; characters that the stream's encoding lacks are escaped."""
    stream = sys.stdout if file is None else file
    if stream is None:  # closed by the shell: `h2h list >&-`
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    if flush:
        stream.flush()


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; False for a closed one."""
    return stream is not None and stream.isatty()


def open_streams() -> None:
    """Replace output streams that the shell has closed (`>&-`), so that no file takes their descriptor."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def close_streams() -> None:
    """Flush the output; discard what its reader no longer takes, which the interpreter would report at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
