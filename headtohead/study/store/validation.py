"""Validation of a run's environments and owners; run_spec.py checks specs, result.py results and costs."""

from __future__ import annotations

import re
from typing import Any

from headtohead.common.typed import LARGEST

RUN_ID = re.compile(r"[0-9a-f]{16}")
_LONGEST_TEXT = 10_000


def validate_owner(document: Any, run_id: str) -> str:
    """Return the problem of a run's document that names another run, or an empty string.

    Documents of older versions name none; `validate_match` compares their content with the spec.
    """
    if not isinstance(document, dict):
        return "not an object"
    named = document.get("run", run_id)
    return "" if named == run_id else f"it belongs to run {str(named)[:40]}"


def is_stretch(value: Any) -> bool:
    """Return whether `value` is an environment: a table of short texts and numbers."""
    return isinstance(value, dict) and all(
        item is None or _number(item) or (isinstance(item, str) and len(item) <= _LONGEST_TEXT)
        for item in value.values()
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
