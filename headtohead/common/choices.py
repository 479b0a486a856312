"""Settings that take one of a few words, and lists of words."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headtohead.common.errors import unknown


@cache
def allowed_choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the fields of a dataclass that are typed as a choice, with what each may be."""
    hints = get_type_hints(kind)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def split_outside(text: str, mark: str) -> list[str]:
    """Return the parts of a text between marks that stand outside parentheses, without spaces around them."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def check_choices(settings: Any) -> None:
    """Refuse a dataclass that holds a word its type does not list."""
    for name, words in allowed_choices(settings.__class__).items():
        value = getattr(settings, name)
        if value not in words:
            raise unknown(f"value for {name}", str(value), [str(word) for word in words])
