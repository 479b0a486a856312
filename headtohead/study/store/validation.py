"""Validation of a run's spec, its logged rows and its environments; store/result.py checks results and costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json, digest
from headtohead.model.sizes import Settings, Size
from headtohead.training.settings import TrainSettings, recorded_settings

RUN_ID = re.compile(r"[0-9a-f]{16}")
_LONGEST_TEXT = 10_000
_LARGEST = 1e15
"""Upper bound of counts and scores; larger values and NaN are invalid."""


def size_of(record: Mapping[str, Any]) -> Size:
    """Return the size in a run's record."""
    facts = dict(record["size"])
    return Size(**{**facts, "settings": Settings(**facts["settings"])})


def training_of(record: Mapping[str, Any]) -> TrainSettings:
    """Return the training settings in a run's record."""
    return recorded_settings(record["training"])


def validate_spec(record: Any, run_id: str) -> str:
    """Return the problem of a spec, or an empty string. The run id must be the hash of the identity."""
    try:
        identity = record["identity"]
        if digest(canonical_json(identity))[:16] != run_id or record["id"] != run_id:
            return "the run id is not the hash of its identity"
        size = {key: value for key, value in record["size"].items() if key != "name"}
        shown = (size, record["training"], record["seed"], record["corpus"]["content"], len(record["layers"]))
        meant = (
            identity["size"],
            identity["training"],
            identity["seed"],
            identity["corpus"],
            len(identity["layers"]),
        )
        others = ("parent", "task", "start")
        if shown != meant or any(record.get(key) != identity.get(key) for key in others):
            return "its fields do not match its identity"
        if "parent" in record and not _parent(record["parent"]):
            return "its parent is not a run id and a step"
        if "task" in record and not _task(record["task"]):
            return "its task is invalid"
        if "start" in record and not RUN_ID.fullmatch(record["start"]):
            return "its start is not a run id"
        if not all(_number(step) for step in record.get("branches", ())):
            return "a step of its branches is not a number"
        if not _number(record.get("steps", 0)):
            return "its number of steps is not a number"
        size_of(record)
        training_of(record)
        texts = [record["arm"], record["label"], record["shape"], record["length"], record["size"]["name"]]
        texts += [*record["layers"], *(record["corpus"][key] for key in ("name", "label", "tokenizer"))]
        if not all(isinstance(text, str) and len(text) <= _LONGEST_TEXT for text in texts):
            return "a name is not a string, or is too long"
        counts = (record["parameters"], record["flops_per_token"], record["cache_bytes_per_token"] or 0)
        if not all(_number(count) and count >= 0 for count in counts):
            return "a count is not a number"
    except (KeyError, TypeError, ValueError, AttributeError, UserError, RecursionError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


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


def _task(value: Any) -> bool:
    kinds = ("classifier", "reader", "pointer")
    known = set(value) - {"answers"} == {"model", "classes", "causal"} and value["model"] in kinds
    return (
        known
        and value.get("answers", "likeliest") == "likeliest"
        and _number(value["classes"])
        and isinstance(value["causal"], bool)
    )


def _parent(value: Any) -> bool:
    return set(value) == {"run", "step"} and bool(RUN_ID.fullmatch(value["run"])) and _number(value["step"])


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
