"""Validation of settings with a fixed set of values, and splitting of lists."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headtohead.common.errors import unknown


@cache
def allowed_choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the `Literal` fields of a dataclass with their allowed values."""
    hints = get_type_hints(kind)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def split_outside(text: str, mark: str) -> list[str]:
    """Return `text` split at each `mark` outside parentheses, with surrounding spaces stripped."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def check_choices(settings: Any) -> None:
    """Raise UserError if a `Literal` field of a dataclass has a value that its type does not list."""
    for name, allowed in allowed_choices(settings.__class__).items():
        value = getattr(settings, name)
        if value not in allowed:
            raise unknown(f"value for {name}", str(value), [str(choice) for choice in allowed])
