"""Values as people write them in TOML: each is what it should be, or refused in one line that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import is_number


def check_known(values: Mapping[str, Any], known: set[str], kind: str) -> None:
    """Refuse a key that is none of those known."""
    for key in values:
        if key not in known:
            raise unknown(kind, str(key), known)


def as_table(value: Any, name: str) -> Mapping[str, Any]:
    """Return a table."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name} takes a table, got {value!r}")
    return value


def as_text(value: Any, name: str) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise UserError(f"{name} takes a text, got {value!r}")
    return value


def as_texts(value: Any, name: str) -> tuple[str, ...]:
    """Return texts, of which one may stand alone."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise UserError(f"{name} takes a text or a list of texts, got {value!r}")
    return tuple(as_text(word, name) for word in given)


def as_list(value: Any, name: str) -> list[Any]:
    """Return a list that holds something."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{name} takes a list of numbers, got {value!r}")
    return value


def as_number(value: Any, name: str) -> float:
    """Return a finite number."""
    if not is_number(value) or not math.isfinite(value):
        raise UserError(f"{name} takes a number, got {value!r}")
    return float(value)


def as_choice(value: Any, name: str, allowed: tuple[Any, ...]) -> str:
    """Return a word that is one of those allowed."""
    if value not in allowed:
        raise unknown(name, str(value), map(str, allowed))
    return str(value)
