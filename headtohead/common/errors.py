"""Mistakes of the person at the keyboard: one clear line, exit code 2, never a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something the user gave cannot be used; the message says what was given and what is allowed."""


class UnreadableFile(UserError):
    """A file whose content cannot be had; the message names it."""


class MissingFile(UnreadableFile):
    """A file that is not there; the message names it."""


class NewerFile(UserError):
    """A file of a format that only a newer version knows: it is whole, and must not be replaced or set aside."""


class DamagedFile(UnreadableFile):
    """A file that was cut short, changed or never was what it should be; the message names it."""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; its kind where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest allowed word, or an empty string."""
    matches = get_close_matches(given, list(allowed), n=1, cutoff=0.4)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """Return the error for a name that is not on the list: what was given, what is allowed, the nearest match."""
    names = sorted(allowed)
    return UserError(
        f"unknown {kind} '{given}'{suggestion(given, names)} (allowed: {', '.join(names) or 'none'})"
    )
