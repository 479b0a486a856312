"""The typed contents of result.json and cost.json, and the functions that read and check them.

Files may be damaged or come from an untrusted source. All readers (verdicts, pages, exports) rely only on what is
checked here. The `read_*` functions raise ValueError with a one-line reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from headtohead.common.typed import LARGEST, Amount, Number
from headtohead.evaluation.logged_row import LoggedRow
from headtohead.model.check.gate import GateResult
from headtohead.study.store.manifest import METRIC
from headtohead.study.store.run_spec import RunSpec

Status = Literal["done", "diverged", "failed", "out of memory"]
STATUSES: tuple[Status, ...] = ("done", "diverged", "failed", "out of memory")
SPLITS = ("valid", "test")
_Positive = Annotated[int, Meta(gt=0, lt=LARGEST)] | Annotated[float, Meta(gt=0, lt=LARGEST)]
Blocks = NDArray[np.float64]
"""(blocks, 2): [nats, bytes] of a corpus, [sum of the metric, count] of a task."""


class Score(Struct, frozen=True, eq=False):
    """The score of a trained model on one split of a corpus or a task."""

    values: dict[str, int | float]
    """Every number by name. A corpus has nats, perplexity, bits_per_byte, tokens and bytes; a task nats, its metrics,
    examples and tokens."""
    metric: str = METRIC
    """The metric that the run is judged by."""
    blocks: dict[str, Blocks] = {}
    """Sums over parts of the split, by metric: a corpus has them for bits per byte."""
    groups: dict[str, list[float]] | None = None
    """[metric, examples] of each group of a task's examples."""

    @property
    def of_task(self) -> bool:
        """Whether it is the score of a task."""
        return self.metric != METRIC

    def as_dict(self) -> dict[str, Any]:
        """Return the score, JSON-ready."""
        if not self.of_task:
            sums = self.blocks[METRIC].tolist() if METRIC in self.blocks else []
            return {**self.values, "blocks": [[nats, round(length)] for nats, length in sums]}
        groups = {} if self.groups is None else {"groups": self.groups}
        blocks = {metric: sums.tolist() for metric, sums in self.blocks.items()}
        return {"metric": self.metric, **self.values, **groups, "blocks": blocks}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and self.as_dict() == other.as_dict()


class Best(Struct, frozen=True):
    """The best step of a run on valid by one metric, with its scores."""

    step: Number
    valid: dict[str, Number]
    test: dict[str, Number]


class RunResult(Struct, frozen=True, kw_only=True):
    """What result.json says about a finished run; a number is None if its status has none."""

    status: Status
    error: str | None = None
    step: Number | None = None
    tokens: Number | None = None
    parameters: Number | None = None
    train_nats: float | None = None
    unique_tokens: Number | None = None
    epochs: Number | None = None
    valid: Score | None = None
    test: Score | None = None
    diverged_at: Number | None = None
    best: Best | None = None
    """By the task's metric; runs that are evaluated during training have it."""
    best_by: dict[str, Best] = {}
    """By each metric of the task."""
    late_fall: Number | None = None
    """The relative decrease of the loss in the second half of training."""
    environment_changed: list[str] = []
    """Differences between the environments of a resumed run."""
    check: GateResult | None = None
    """The gate's findings for the trained model; None: it has no user code."""
    run: str = ""
    """The id of its run; files of older versions have none."""
    checksum: str = ""

    @property
    def tested(self) -> Score | None:
        """The score on test of a completed run, else None."""
        return self.test if self.status == "done" else None

    def best_step(self, metric: str) -> Best | None:
        """Return the best step by a metric; results of earlier versions have it for the task's metric only."""
        return self.best_by.get(metric, self.best)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of result.json without the keys that every document has."""
        if self.status not in ("done", "diverged"):
            return {"status": self.status, "error": self.error or ""}
        counts = ("status", "step", "tokens", "parameters", "train_nats", "unique_tokens", "epochs")
        scores = {"valid": self.valid, "test": self.test}
        rest = {
            "diverged_at": self.diverged_at,
            "best": msgspec.to_builtins(self.best),
            "best_by": msgspec.to_builtins(self.best_by) or None,
            "late_fall": self.late_fall,
            "environment_changed": self.environment_changed or None,
            "check": None if self.check is None else self.check.as_dict(),
        }
        return {
            **{name: getattr(self, name) for name in counts},
            **{split: score.as_dict() for split, score in scores.items() if score is not None},
            **{name: value for name, value in rest.items() if value is not None},
        }


class Cost(Struct, frozen=True):
    """What cost.json says about a run; None: not measured."""

    train_seconds: Amount | None = None
    compile_seconds: Amount | None = None
    """Of the first step of a compiled model, which `train_seconds` do not include."""
    score_seconds: Amount | None = None
    tokens_per_second: Amount | None = None
    peak_bytes: Amount | None = None
    micro_batch: Amount | None = None
    stacked: Amount | None = None
    """Number of runs in its population."""
    metrics_sha256: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the known costs."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


NO_COST = Cost()


def read_result(value: Any) -> RunResult:
    """Return the result in a document; raise ValueError if it is invalid."""
    if not isinstance(value, dict) or value.get("status") not in STATUSES:
        raise ValueError("no status")
    if value["status"] not in ("done", "diverged"):
        known = {name: value[name] for name in ("status", "error", "run", "checksum") if name in value}
        return msgspec.convert(known, RunResult)
    content = value | dict.fromkeys(SPLITS)
    if value["status"] == "done":
        content |= {split: read_score(value.get(split), f"the {split} split") for split in SPLITS}
    found = msgspec.convert(content, RunResult)
    if None in (found.step, found.tokens, found.parameters, found.epochs):
        raise ValueError("a count is not a number")
    return found


class _CorpusScore(Struct):
    """The numbers of a corpus' score."""

    nats: Number
    bits_per_byte: Number
    perplexity: Annotated[float, Meta(gt=0, lt=1e305)]
    tokens: _Positive
    bytes: _Positive


class _TaskScore(Struct):
    """The numbers that every score of a task has."""

    examples: _Positive
    tokens: _Positive


_Numbers = dict[str, Number]


def _pairs(sums: Iterable[Sequence[float]]) -> Blocks:
    """Return pairs of numbers as an array (pairs, 2); a flat list is converted five times faster than a nested one."""
    flat = np.array([number for first, second in sums for number in (first, second)], dtype=np.float64)
    if flat.ndim != 1:
        raise ValueError("not pairs of numbers")
    return flat.reshape(-1, 2)


def score_of(values: Mapping[str, Any]) -> Score:
    """Return the score from its JSON form, without checking the numbers."""
    numbers = {name: value for name, value in values.items() if name not in ("metric", "groups", "blocks")}
    given = values["blocks"] if "metric" in values else {METRIC: values["blocks"]}
    blocks = {name: _pairs(sums) for name, sums in given.items() if len(sums)}
    return Score(numbers, values.get("metric", METRIC), blocks, values.get("groups"))


def read_score(value: Any, what: str) -> Score:
    """Return the score of a split; raise ValueError if it is invalid. `what` names the split."""
    if not isinstance(value, dict):
        raise ValueError(f"no score of {what}")
    try:
        found = score_of(value)
        sums = list(found.blocks.values())
        if found.groups is not None:
            sums.append(_pairs(found.groups.values()))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"the blocks of {what} are not numbers") from None
    try:
        if "metric" in value:
            msgspec.convert(found.values, _TaskScore)
            msgspec.convert(found.values, _Numbers)
            msgspec.convert(found.values[found.metric], Number)
        else:
            msgspec.convert(found.values, _CorpusScore)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"the score of {what} is not a number: {error}") from None
    for part in sums:
        if not (abs(part) < LARGEST).all():
            raise ValueError(f"the blocks of {what} are not numbers")
        if part[:, 1].min() <= 0:
            raise ValueError(f"a block of {what} has no length")
    return found


def read_cost(value: Any) -> Cost:
    """Return the costs in a document; raise ValueError if a number is invalid."""
    return msgspec.convert(value, Cost)


def validate_match(spec: RunSpec, result: RunResult) -> str:
    """Return how a result contradicts the valid spec of its run, or an empty string."""
    if result.status not in ("done", "diverged"):
        return ""
    assert result.step is not None
    if result.parameters != spec.parameters:
        return f"it has {result.parameters:,} parameters, the spec of its run {spec.parameters:,}"
    batch, steps = spec.training.batch, spec.steps
    if result.step != steps if result.status == "done" else result.step > steps:
        return f"it ends at step {result.step:,}, its run at step {steps:,}"
    if not spec.task and result.tokens != result.step * batch:
        return f"it has {result.tokens:,} tokens, its run {result.step * batch:,}"
    return ""


def validate_cost(cost: Cost, result: RunResult | None) -> str:
    """Return how a cost contradicts the result of its run, or an empty string."""
    seconds, speed = cost.train_seconds, cost.tokens_per_second
    if seconds is None or speed is None or result is None or result.tokens is None:
        return ""
    # Both are rounded when they are stored.
    low, high = ((seconds + sign * 6e-4) * (speed + sign * 0.06) for sign in (-1, 1))
    if low <= result.tokens <= high:
        return ""
    return f"its {seconds * speed:,.0f} tokens are not the {result.tokens:,} of the result"


def validate_metrics(rows: Sequence[LoggedRow], result: RunResult) -> str:
    """Return how the rows of metrics.jsonl contradict the result of their run, or an empty string."""
    if not rows or result.step is None:
        return ""
    last = rows[-1]
    if last.step > result.step:
        return f"it has a row of step {last.step:,}, the result ends at step {result.step:,}"
    if last.step == result.step and last.tokens not in (None, result.tokens):
        return f"it ends with {last.tokens} tokens, the result with {result.tokens}"
    return ""
