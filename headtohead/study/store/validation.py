"""Validation of a run's files: the spec must match the run id, and results must contain valid numbers.

Files may be damaged or come from an untrusted source. All readers (verdicts, pages, exports) rely only on what is
checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headtohead.study.store.run_spec import RunSpec

RUN_ID = re.compile(r"[0-9a-f]{16}")
STATUSES = ("done", "diverged", "failed", "out of memory")
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


def validate_match(spec: RunSpec, result: Mapping[str, Any]) -> str:
    """Return how a valid result contradicts the valid spec of its run, or an empty string."""
    if result["status"] not in ("done", "diverged"):
        return ""
    if result["parameters"] != spec.parameters:
        return f"it has {result['parameters']:,} parameters, the spec of its run {spec.parameters:,}"
    batch, steps = spec.training.batch, spec.steps
    if result["step"] != steps if result["status"] == "done" else result["step"] > steps:
        return f"it ends at step {result['step']:,}, its run at step {steps:,}"
    if not spec.task and result["tokens"] != result["step"] * batch:
        return f"it has {result['tokens']:,} tokens, its run {result['step'] * batch:,}"
    return ""


def validate_cost(cost: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return how a cost contradicts the valid result of its run, or an empty string."""
    seconds: Any = cost.get("train_seconds")
    speed: Any = cost.get("tokens_per_second")
    if not _number(seconds) or not _number(speed) or "tokens" not in result:
        return ""
    # Both are rounded when they are stored.
    low, high = ((seconds + sign * 6e-4) * (speed + sign * 0.06) for sign in (-1, 1))
    if low <= result["tokens"] <= high:
        return ""
    return f"its {seconds * speed:,.0f} tokens are not the {result['tokens']:,} of the result"


def validate_metrics(rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> str:
    """Return how the rows of metrics.jsonl contradict the valid result of their run, or an empty string."""
    if not rows or "step" not in result:
        return ""
    last = rows[-1]
    if last["step"] > result["step"]:
        return f"it has a row of step {last['step']:,}, the result ends at step {result['step']:,}"
    if last["step"] == result["step"] and last.get("tokens", result["tokens"]) != result["tokens"]:
        return f"it ends with {last['tokens']} tokens, the result with {result['tokens']}"
    return ""


def validate_result(result: Any, arrays: bool = False) -> str:
    """Return the problem of a result, or an empty string.

    `arrays` converts the blocks of its scores from lists of [nats, bytes] to arrays of shape (blocks, 2), a tenth of the
    memory.
    """
    if not isinstance(result, dict) or result.get("status") not in STATUSES:
        return "no status"
    if result["status"] in ("failed", "out of memory"):
        return "" if isinstance(result.get("error", ""), str) else "its error is not a string"
    if not all(_number(result.get(key)) for key in ("step", "tokens", "parameters", "epochs")):
        return "a count is not a number"
    if result["status"] == "diverged":
        return ""
    for split in ("valid", "test"):
        if problem := validate_score(result.get(split), f"the {split} split", arrays):
            return problem
    steps = [result["best"]] if "best" in result else []
    by_metric = result.get("best_by", {})
    if not isinstance(by_metric, dict) or not all(_best(step) for step in (*steps, *by_metric.values())):
        return "its best step is not a step with scores"
    if "check" in result and not _check(result["check"]):
        return "its check is not a table of string lists"
    return "" if _number(result.get("late_fall", 0.0)) else "late_fall is not a number"


_LARGEST_LOGGED, _SMALLEST_LOGGED = 1e100, 1e-100
"""Bounds of logged numbers: squares, sums and ratios of them are finite. Values of float32 are well inside."""
_COUNTS = ("step", "tokens")
_LARGEST_COUNT = 2**53
"""Upper bound of a count; larger integers do not fit into a float."""
_LARGEST_SECONDS = 1e9
_COSTS = ("train_seconds", "score_seconds", "tokens_per_second", "peak_bytes", "micro_batch", "stacked")


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


def are_costs(value: Any) -> bool:
    """Return whether `value` is a table of costs, measured numbers of zero or more."""
    return isinstance(value, dict) and all(
        _number(value[key]) and value[key] >= 0 for key in _COSTS if key in value
    )


def is_stretch(value: Any) -> bool:
    """Return whether `value` is an environment: a table of short texts and numbers."""
    return isinstance(value, dict) and all(
        item is None or _number(item) or (isinstance(item, str) and len(item) <= _LONGEST_TEXT)
        for item in value.values()
    )


def _check(value: Any) -> bool:
    """Return whether `value` is a result of the causality gate."""
    names = ("failed", "marks", "warnings")
    return isinstance(value, dict) and all(
        isinstance(value.get(name), list) and all(isinstance(item, str) for item in value[name])
        for name in names
    )


def _best(value: Any) -> bool:
    """Return whether `value` is a step with scores of valid and test."""
    if not isinstance(value, dict) or not _number(value.get("step")):
        return False
    splits = [value.get("valid"), value.get("test")]
    return all(isinstance(part, dict) and all(_number(number) for number in part.values()) for part in splits)


def validate_score(score: Any, what: str, arrays: bool = False) -> str:
    """Return the problem of a split's score, or an empty string; `arrays` as in `validate_result`."""
    if not isinstance(score, dict):
        return f"no score of {what}"
    if "metric" in score:
        return _validate_task_score(score, what)
    if not all(_number(score.get(key)) for key in ("nats", "bits_per_byte")):
        return f"the score of {what} is not a number"
    perplexity = score.get("perplexity")
    if not isinstance(perplexity, int | float) or not 0 < perplexity < 1e305:
        return f"the perplexity of {what} is not a number"
    if not all(_number(score.get(key)) and score[key] > 0 for key in ("tokens", "bytes")):
        return f"{what} has no length"
    try:
        blocks = np.array(score.get("blocks"), dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return f"the blocks of {what} are not numbers"
    if blocks.size and (blocks.ndim != 2 or blocks.shape[1] != 2 or not (abs(blocks) < _LARGEST).all()):
        return f"the blocks of {what} are not pairs of numbers"
    if blocks.size and blocks[:, 1].min() <= 0:
        return f"a block of {what} has no length"
    if arrays:
        score["blocks"] = blocks
    return ""


def _validate_task_score(score: dict[str, Any], what: str) -> str:
    """Return the problem of the scores of a task's split, or an empty string."""
    if not isinstance(score["metric"], str) or not _number(score.get(score["metric"])):
        return f"the score of {what} is not a number"
    if not all(_number(value) for key, value in score.items() if key not in ("metric", "groups", "blocks")):
        return f"the score of {what} is not a number"
    if not all(_number(score.get(key)) and score[key] > 0 for key in ("examples", "tokens")):
        return f"{what} has no length"
    try:
        parts = [*score["blocks"].values(), *([list(score["groups"].values())] if "groups" in score else [])]
        pairs = [np.array(part, dtype=np.float64) for part in parts]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return f"the blocks of {what} are not numbers"
    if not all(part.ndim == 2 and part.shape[1] == 2 and (abs(part) < _LARGEST).all() for part in pairs):
        return f"the blocks of {what} are not pairs of numbers"
    return "" if all(part[:, 1].min() > 0 for part in pairs) else f"a block of {what} has no length"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
