"""Growth of a training step's time and memory with context, batch, layers and parameters, compared with declared FLOPs.

Tokens per step are constant along the context axis, so batch shrinks as context grows. Per-token work then costs the same
everywhere, and time per token shows the cost of token mixing: its slope is 1 where every token attends to all previous
ones, and 0 where it reads a state of fixed size. Slopes are log-log, between consecutive values.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from headtohead.bench.harness import Case, Progress, Row, Rows, silent
from headtohead.bench.slice import VOCABULARY, Slice, measure_slice, warm_slices
from headtohead.bench.train import check_arms, find_shape
from headtohead.bench.worker_pool import TimeLimitReached, WorkerPool
from headtohead.common.errors import UserError, unknown
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.study.environment import choose_device, device_name

AXES = ("context", "batch", "layers", "parameters")
LAYERS = 2
APART = 0.3
"""A measured slope farther than this from the declared one is reported."""
_PLAIN_FORMS = {"sharing": "sharing:tie=kv"}
"""Setting to measure for mechanisms whose default equals `standard`."""
_AXIS_OF_FIELD = {"batch": "batch", "layers": "layers", "width": "parameters"}


def bench_growth(
    arms: Sequence[str] = (),
    *,
    axes: Sequence[str] = AXES,
    contexts: Sequence[int] = (),
    size: str = "",
    batch: int = 0,
    rounds: int = 3,
    precision: str = "",
    device: str = "auto",
    compile: bool | None = None,
    workers: int = 0,
    longest: float = 2.0,
    seconds: float = math.inf,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> Row:
    """Return the benchmark document: one row per arm and shape, and the slopes under `growth`.

    Defaults: all mechanisms; on a GPU a slice of 60m, contexts 512 to 32,768, bf16, one compiled block; on CPU a slice of
    nano, contexts 128 to 2,048, float32, eager. `workers=0` compiles with one process per core. `batch` is tokens per
    step, by default the longest context. A row whose predicted step time exceeds `longest` seconds is skipped
    with a note. After `seconds` the benchmark stops with the rows measured so far; `out` stores them, and the same call
    continues.
    """
    where = choose_device(device)
    on_gpu = where.type == "cuda"
    arms = tuple(arms) or tuple(_PLAIN_FORMS.get(name, name) for name in builtin_mechanisms())
    contexts = sorted(set(contexts)) or ([512, 2048, 8192, 32_768] if on_gpu else [128, 512, 2048])
    if wrong := next((axis for axis in axes if axis not in AXES), ""):
        raise unknown("axis", wrong, AXES)
    if not axes:
        raise UserError(f"axes must name at least one of {', '.join(AXES)}")
    given = {"context": contexts[0], "rounds": rounds, "longest": longest, "seconds": seconds}
    if low := next((f"{name}={value:g}" for name, value in given.items() if not value > 0), ""):
        raise UserError(f"{low} must be above 0")
    if workers < 0:
        raise UserError(f"workers={workers} must be 0 (one per core) or more")
    tokens = batch or contexts[-1]
    if odd := next((context for context in contexts if tokens % context), None):
        raise UserError(f"batch={tokens} tokens per step is not a multiple of the context {odd}")
    shape = find_shape(size or ("60m" if on_gpu else "nano"))
    check_arms(arms, dataclasses.replace(shape, layers=LAYERS))
    compiled = on_gpu if compile is None else compile
    base = Slice(
        arm=arms[0],
        size=shape.name,
        context=contexts[0],
        batch=tokens // contexts[0],
        layers=LAYERS,
        width=shape.width,
        precision=precision or ("bf16" if on_gpu else "float32"),
        device=str(where),
        compiled=compiled,
        rounds=rounds,
    )
    rows = Rows("growth", out, {})
    able, left_out = _buildable(slices(base, arms, axes, contexts))
    deadline = time.monotonic() + seconds

    def found() -> list[Row]:
        return [row for case in cases.values() if (row := rows.find(case.facts))]

    def measure(one: Slice, show: Progress) -> Row:
        if time.monotonic() > deadline:
            raise TimeLimitReached
        forecast = forecast_seconds(one, base, found())
        if forecast > longest:
            reason = f"a step would take about {forecast:.2g} s, more than {longest:g} s"
            return one.declared | {"skipped": reason}
        if not compiled:
            return one.declared | one.measure()
        owner = owners[one]
        if isinstance(owner, str):
            return one.declared | {"error": owner}
        return one.declared | pool.ask(measure_slice, {owner: {"facts": dataclasses.asdict(one)}})[0]

    cases = {one: Case(facts_of(one, base), name_of(one), partial(measure, one)) for one in able}
    todo = rows.missing(cases.values())
    missing = [one for one, case in cases.items() if case in todo] if compiled else []
    processes = min(workers or os.cpu_count() or 1, len({one.graph for one in missing}))
    with suppress(TimeLimitReached), closing(WorkerPool(processes, deadline)) as pool:
        owners = compile_slices(pool, missing, progress)
        rows.run(todo, progress)
    measured = found()
    left = {"left": len(cases) - len(measured), "left_out": left_out}
    return rows.document() | {"rows": measured, **left, "growth": growth(measured)}


def compile_slices(pool: WorkerPool, slices: Sequence[Slice], progress: Progress) -> dict[Slice, int | str]:
    """Compile slices with the same graph in the same process; return the index of that process, or the error, of each."""
    graphs: dict[Slice, list[Slice]] = {}
    for one in slices:
        graphs.setdefault(one.graph, []).append(one)
    orders = [{"slices": [dataclasses.asdict(one) for one in unit]} for unit in graphs.values()]
    owners: dict[Slice, int | str] = {}
    for unit, (owner, answer) in zip(graphs.values(), pool.map(warm_slices, orders, progress), strict=True):
        errors = answer.get("errors") or [f"{answer['error']} during compilation"] * len(unit)
        for one, error in zip(unit, errors, strict=True):
            # Out of memory is not final: many processes hold memory now; later each slice has the device alone.
            owners[one] = error if error and error != "out of memory" else owner
    return owners


def slices(base: Slice, arms: Sequence[str], axes: Sequence[str], contexts: Sequence[int]) -> list[Slice]:
    """Return the slices to measure, by axis and then by arm, so that the points of one slope are measured consecutively."""
    lines: list[list[Slice]] = []
    if "context" in axes:
        lines.append([dataclasses.replace(base, context=one, batch=base.tokens // one) for one in contexts])
    steps: dict[str, list[int]] = {
        "batch": [count for part in (4, 2, 1) if (count := base.batch // part)],
        "layers": [base.layers // 2, base.layers, 2 * base.layers],
        "width": [base.width // 2, base.width, 2 * base.width],
    }
    for field, values in steps.items():
        if _AXIS_OF_FIELD[field] in axes:
            changes: list[dict[str, Any]] = [{field: value} for value in values]
            lines.append([dataclasses.replace(base, **change) for change in changes])
    found = (dataclasses.replace(shape, arm=arm) for line in lines for arm in arms for shape in line)
    return list(dict.fromkeys(found))


def _buildable(every: Iterable[Slice]) -> tuple[list[Slice], list[str]]:
    """Return the slices that can be built, and why not for the others (two mechanisms cannot fill one layer)."""
    able, left_out = [], []
    for one in every:
        try:
            one.declared  # noqa: B018  a property that builds the model on meta
            able.append(one)
        except UserError as error:
            left_out.append(f"{name_of(one)}: {error}")
    return able, left_out


def name_of(one: Slice) -> str:
    """Return a slice in words."""
    return f"{one.arm}, context {one.context}, {one.layers} layers of {one.width}"


def facts_of(one: Slice, base: Slice) -> Row:
    """Return the identifying fields of a row; `base` is the shape shared by all axes."""
    facts = dataclasses.asdict(one) | {"device": device_name(choose_device(one.device))}
    middle = {name: getattr(base, name) for name in ("context", "batch", "layers", "width")}
    return facts | {"vocabulary": VOCABULARY, "base": middle}


def forecast_seconds(one: Slice, base: Slice, rows: Iterable[Row]) -> float:
    """Return predicted seconds per step from smaller rows on its axes, the larger of FLOP scaling and last slope; else 0."""
    facts, best = facts_of(one, base) | one.declared, 0.0
    for axis in AXES:
        if not on_axis(facts, axis):
            continue
        before = [
            row
            for row in axis_rows(rows, axis, one.arm)
            if "seconds" in row and value_of(row, axis) < value_of(facts, axis)
        ]
        if before:
            last = before[-1]
            best = max(best, last["seconds"] * facts["flops"] / last["flops"])
        if len(before) > 1:
            slope = _slope(before[-2], before[-1], "seconds", axis)
            reach = value_of(facts, axis) / value_of(before[-1], axis)
            best = max(best, before[-1]["seconds"] * reach ** (slope or 0.0))
    return best


def on_axis(row: Mapping[str, Any], axis: str) -> bool:
    """Return whether a row is on an axis: all other dimensions equal the base's."""
    base = row["base"]
    if axis == "context":
        equal = row["context"] * row["batch"] == base["context"] * base["batch"]
        return equal and all(row[name] == base[name] for name in ("layers", "width"))
    if row["context"] != base["context"]:
        return False
    return all(row[name] == base[name] for name, other in _AXIS_OF_FIELD.items() if other != axis)


def value_of(row: Mapping[str, Any], axis: str) -> float:
    """Return the value of a row on an axis."""
    return float(row[axis])


def axis_rows(rows: Iterable[Row], axis: str, arm: str) -> list[Row]:
    """Return an arm's rows on an axis, in order."""
    own = [row for row in rows if row["arm"] == arm and on_axis(row, axis)]
    return sorted(own, key=lambda row: value_of(row, axis))


def growth(rows: Sequence[Row]) -> list[Row]:
    """Return the slopes of time, declared FLOPs and memory per axis and arm, with a text on the last slope."""
    found = []
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for axis in AXES:
        for arm in arms:
            own = axis_rows(rows, axis, arm)
            measured = [row for row in own if "seconds" in row]
            slopes = [
                {
                    "from": value_of(low, axis),
                    "to": value_of(high, axis),
                    "time": _slope(low, high, "seconds", axis),
                    "flops": _slope(low, high, "flops", axis),
                    "memory": _slope(low, high, "peak_bytes", axis),
                }
                for low, high in pairwise(measured)
            ]
            if len(own) > 1:
                found.append(
                    {"axis": axis, "arm": arm, "slopes": slopes, "words": words_of(axis, own, slopes)}
                )
    return found


def words_of(axis: str, rows: Sequence[Row], slopes: Sequence[Row]) -> str:
    """Return a text that compares an arm's last slope with the declared one and names the missing rows."""
    words = []
    if slopes:
        last = slopes[-1]
        apart = last["time"] - last["flops"]
        if apart > APART:
            words.append("grows faster than declared: possible defect")
        elif apart < -APART:
            words.append("grows less than declared: launch or memory bound")
        else:
            words.append("as declared")
        if axis == "context" and (last["memory"] or 0.0) > APART:
            words.append("memory per token grows: a (time, time) tensor is stored")
    for row in rows:
        if reason := row.get("error") or row.get("skipped"):
            kind = "failed" if "error" in row else "skipped"
            words.append(f"{value_of(row, axis):g} {kind}: {reason}")
    return "; ".join(words)


def _slope(low: Mapping[str, Any], high: Mapping[str, Any], key: str, axis: str) -> float | None:
    if not low.get(key) or not high.get(key):
        return None
    reach = math.log(value_of(high, axis) / value_of(low, axis))
    return round(math.log(high[key] / low[key]) / reach, 3)
