"""Parsing and formatting of counts and durations such as 120k, 65M, 8m, 1.5h."""

from __future__ import annotations

import re
from typing import Any, TypeGuard

from headtohead.common.errors import UserError

# A comma separates thousands only: 2048,4096 is two counts. An underscore is between two digits.
_COUNT = re.compile(r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*)(?:\.[0-9]+)?)\s*([kKmMgGbB]?)")
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d)?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_count(text: str | int | float, name: str = "") -> int:
    """Return the integer written as 120000, 120k, 65M or 1.5B. `name` prefixes the error message."""
    expected = f"{name}: expected" if name else "expected"
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise UserError(f"{expected} a count such as 120000, 120k or 65M, got {text!r}")
    value: float
    if not isinstance(text, str):
        value = text
    else:
        match = _COUNT.fullmatch(text.strip())
        if not match:
            several = "; a comma separates thousands, as in 1,234,567" if "," in text else ""
            raise UserError(f"{expected} a count such as 120000, 120k or 65M, got '{text[:40]}'{several}")
        value = float(match[1].replace(",", "").replace("_", "")) * _SCALE[match[2].lower()]
    if not 0 <= value <= 2**62 or value != int(value):
        raise UserError(f"{expected} a whole number, zero or more, got '{str(text)[:40]}'")
    return int(value)


def parse_number(text: str, kind: type[int] | type[float]) -> int | float:
    """Return a number written in ASCII digits, else raise ValueError. Python also reads 1_0 and the digits of any script."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return kind(text)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a float or an int that fits one. TOML and JSON may contain larger ints."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, float) or (whole and abs(value) < 10**308)


def exact_count(value: int) -> str:
    """Return 4000000 as 4M and 1500000 as 1500k: short and exact."""
    for scale, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value and value % scale == 0:
            return f"{value // scale}{suffix}"
    return str(value)


def parse_duration(text: str | float) -> float:
    """Return seconds from 90s, 8m, 1.5h or 2d; a number is seconds already."""
    if not isinstance(text, str):
        if not is_number(text) or not text >= 0:
            raise UserError(f"expected a duration of 0 seconds or more, or a text such as 8m, got {text!r}")
        return text
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise UserError(f"expected a duration such as 90s, 8m or 1.5h, got '{text}'")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def short_count(value: float) -> str:
    """Return 1234567 as 1.23M: three significant digits, for display."""
    for scale, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.3g}"


def short_time(seconds: float) -> str:
    """Return seconds as 12 s, 3 m 20 s or 2 h 05 m."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} m {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} m"


def short_bytes(count: float) -> str:
    """Return a number of bytes as B, KiB, MiB or GiB."""
    for scale, suffix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {suffix}"
    return f"{count:.0f} B"


def number(value: float | None, form: str) -> str:
    """Return a number in that form, or a dash where it is not defined."""
    return "–" if value is None else format(value, form)


def interval(low: float | None, high: float | None, form: str) -> str:
    """Return an interval such as 0.1 to 0.2, or a dash where it is not defined."""
    return "–" if low is None else f"{low:{form}} to {high:{form}}"
