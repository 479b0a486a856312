"""Type checks for values from TOML files; errors name the setting in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import is_number


def check_known(values: Mapping[str, Any], known: set[str], kind: str) -> None:
    """Raise UserError for a key that is not in `known`."""
    for key in values:
        if key not in known:
            raise unknown(kind, str(key), known)


def as_table(value: Any, name: str) -> Mapping[str, Any]:
    """Return `value` if it is a table, else raise UserError."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name} takes a table, got {value!r}")
    return value


def as_text(value: Any, name: str) -> str:
    """Return `value` if it is a string, else raise UserError."""
    if not isinstance(value, str):
        raise UserError(f"{name} takes a string, got {value!r}")
    return value


def as_texts(value: Any, name: str) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise UserError(f"{name} takes a string or a list of strings, got {value!r}")
    return tuple(as_text(item, name) for item in given)


def as_number(value: Any, name: str) -> float:
    """Return `value` as a float if it is a finite number, else raise UserError."""
    if not is_number(value) or not math.isfinite(value):
        raise UserError(f"{name} takes a number, got {value!r}")
    return float(value)


def as_choice(value: Any, name: str, allowed: tuple[Any, ...]) -> str:
    """Return `value` as a string if it is one of `allowed`, else raise UserError."""
    if value not in allowed:
        raise unknown(name, str(value), map(str, allowed))
    return str(value)
