"""Write the settings of a study as a TOML file, which `read_study` reads back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(settings: Mapping[str, Any]) -> str:
    """Return settings as TOML, one line each; a setting that is None is left out, as TOML has no such value."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in settings.items() if value is not None)


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # also inf and nan, which JSON lacks
    return json.dumps(value, ensure_ascii=False)
