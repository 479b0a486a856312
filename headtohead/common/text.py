"""Checks of text and values from users: characters that no name or path has, nesting, and size."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from headtohead.common.errors import UserError

_MAX_DEPTH = 16
_MAX_BITS = 4096
"""Python converts no integer of more than 4,300 digits (14,284 bits) to text, not even for an error message."""


def check_unicode(text: str, name: str) -> str:
    """Return `text`; raise UserError if it has a lone surrogate, as Python reads a byte that is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{name} is not valid UTF-8: {text[:80]!a}") from None
    return text


def check_plain(text: str, name: str) -> str:
    """Return `text`; raise UserError if it has a lone surrogate or a control character, such as NUL or a newline."""
    check_unicode(text, name)
    if any(unicodedata.category(letter) == "Cc" for letter in text):
        raise UserError(f"{name} contains a control character: {text[:80]!a}")
    return text


def check_values(value: Any, name: str, depth: int = 0) -> None:
    """Raise UserError for plain values that no setting takes: control characters, deep nesting, gigantic integers."""
    if isinstance(value, str):
        check_plain(value, name)
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise UserError(f"{name} is an integer of {value.bit_length():,} bits; no setting is that large")
    elif isinstance(value, Mapping | list | tuple):
        if depth > _MAX_DEPTH:
            raise UserError(
                f"{name.partition('.')[0]} is nested too deep; at most {_MAX_DEPTH} levels are allowed"
            )
        items = value.items() if isinstance(value, Mapping) else [(None, item) for item in value]
        for key, item in items:
            if key is not None:
                check_plain(str(key), f"a key of {name}" if name else "a setting")
            check_values(item, ".".join(filter(None, (name, None if key is None else str(key)))), depth + 1)


def counted(count: int, noun: str) -> str:
    """Return `1 run` or `2 runs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
