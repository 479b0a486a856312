"""User errors: reported as one line with exit code 2, without a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Invalid user input. The message says what was given and what is allowed."""


class UnreadableFile(UserError):
    """A file that cannot be read. The message names it."""


class MissingFile(UnreadableFile):
    """A file that does not exist. The message names it."""


class NewerFile(UserError):
    """A file in the format of a newer version. It is intact and must not be replaced or renamed."""


class DamagedFile(UnreadableFile):
    """A truncated, modified or malformed file. The message names it."""


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error message, or the exception type if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def closest(given: str, allowed: Iterable[str]) -> str:
    """Return the allowed name that is closest to the given one, or an empty string if none is close."""
    return next(iter(get_close_matches(given, list(allowed), n=1, cutoff=0.4)), "")


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest allowed name, or an empty string."""
    match = closest(given, allowed)
    return f"; did you mean '{match}'?" if match else ""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """Return the error for an unknown name: what was given, the closest match, what is allowed."""
    names = sorted(allowed)
    return UserError(
        f"unknown {kind} '{given}'{suggestion(given, names)} (allowed: {', '.join(names) or 'none'})"
    )
