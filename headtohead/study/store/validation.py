"""Validation of a run's logged rows and environments; run_spec.py checks specs, result.py results and costs."""

from __future__ import annotations

import re
from typing import Any

RUN_ID = re.compile(r"[0-9a-f]{16}")
_LONGEST_TEXT = 10_000
_LARGEST = 1e15
"""Upper bound of counts and scores; larger values and NaN are invalid."""


def validate_owner(document: Any, run_id: str) -> str:
    """Return the problem of a run's document that names another run, or an empty string.

    Documents of older versions name none; `validate_match` compares their content with the spec.
    """
    if not isinstance(document, dict):
        return "not an object"
    named = document.get("run", run_id)
    return "" if named == run_id else f"it belongs to run {str(named)[:40]}"


_LARGEST_LOGGED, _SMALLEST_LOGGED = 1e100, 1e-100
"""Bounds of logged numbers: squares, sums and ratios of them are finite. Values of float32 are well inside."""
_COUNTS = ("step", "tokens")
_LARGEST_COUNT = 2**53
"""Upper bound of a count; larger integers do not fit into a float."""
_LARGEST_SECONDS = 1e9


def is_logged_row(row: Any) -> bool:
    """Return whether a row of metrics.jsonl has a step and valid numbers. Other keys may be of any type but a number."""
    if (
        not isinstance(row, dict)
        or type(row.get("step")) is not int
        or ("test" in row and "valid" not in row)
    ):
        return False
    for key, value in row.items():
        if value is None and key not in ("step", "valid", "test"):
            continue
        if key in _COUNTS:
            good = type(value) is int and (key == "tokens") <= value < _LARGEST_COUNT
        elif key == "circuits":
            good = _are_circuits(value)
        elif key in ("valid", "test"):
            good = isinstance(value, dict) and all(item is None or _number(item) for item in value.values())
        elif type(value) in (int, float):
            good = value == 0 or _SMALLEST_LOGGED < abs(value) < _LARGEST_LOGGED
            good = good and (key != "seconds" or 0 <= value < _LARGEST_SECONDS)
        else:
            good = key not in ("nats", "lr", "grad_norm", "grad_norm_max", "seconds")
        if not good:
            return False
    return True


def _are_circuits(value: Any) -> bool:
    """Return whether `value` has lists of numbers over layers, by circuit and quantity."""
    return type(value) is dict and all(
        type(circuit) is dict
        and all(
            type(layers) is list
            and bool(layers)
            and all(
                item is None or (type(item) in (int, float) and 0 <= item < _LARGEST_LOGGED)
                for item in layers
            )
            for layers in circuit.values()
        )
        for circuit in value.values()
    )


def is_stretch(value: Any) -> bool:
    """Return whether `value` is an environment: a table of short texts and numbers."""
    return isinstance(value, dict) and all(
        item is None or _number(item) or (isinstance(item, str) and len(item) <= _LONGEST_TEXT)
        for item in value.values()
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
