"""Learning-rate tuning: one grid and one budget for every arm, chosen on valid, judged on test.

If an arm's best rate is at the edge of the grid, the grid is extended for all arms until every optimum is inside. The
chosen rates are kept in study.lock.json, so that a resumed study uses the same ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headtohead.common.errors import DamagedFile, UserError
from headtohead.common.files import canonical_json, digest
from headtohead.study.config.spec import StudySpec
from headtohead.study.plan.run_spec import Plan, Rates
from headtohead.study.store.frozen import NAME, changing_lock, read_lock
from headtohead.study.store.manifest import Rate
from headtohead.study.store.run_store import Store

MAX_EXTENSIONS = 6
"""After this many extensions the best rate found is used and marked as being at the edge."""


@dataclass(frozen=True)
class Tuning:
    """Result of tuning: all trials of every arm in every corpus, size and shape, with the chosen rates."""

    rows: tuple[Rate, ...] = ()

    def rates(self) -> Rates:
        """Return the chosen rate by (corpus, size, context, shape, arm's label)."""
        return {
            (row.corpus, row.size, row.context, row.shape, row.label): row.lr
            for row in self.rows
            if row.chosen
        }

    def warnings(self) -> list[str]:
        """Return a warning for each arm whose best rate is at the edge of the grid."""
        return [
            f"{row.label}: its best learning rate {row.lr:g} is at the edge of the grid"
            for row in self.rows
            if row.chosen and row.edge
        ]


def tune_study(
    spec: StudySpec,
    store: Store,
    plan: Callable[[StudySpec], Plan],
    run: Callable[[Plan], bool],
    say: Callable[[str], None],
) -> Tuning | None:
    """Return the tuned rates, running missing trials; None if `run` was stopped early."""
    assert spec.tune is not None
    key = digest(
        canonical_json(
            _identity(plan(grid_spec(spec, spec.tune.lr[:1]))) + [spec.metric][: bool(spec.metric)]
        )
    )[:16]
    path = store.path / NAME
    lock = read_lock(path)
    if known := lock.get("tuning", {}).get(key):
        return Tuning(tuple(_row(row, path) for row in known))
    grid, extensions = list(spec.tune.lr), 0
    while True:
        planned = plan(grid_spec(spec, tuple(grid)))
        if not run(planned):
            return None
        rows = _rows(spec, planned, store, grid)
        low, high = (any(row.chosen and row.lr == edge for row in rows) for edge in (grid[0], grid[-1]))
        if not (low or high) or extensions == MAX_EXTENSIONS:
            break
        extensions += 1
        if low:
            grid.insert(0, _beyond(grid[1], grid[0]))
        if high:
            grid.append(_beyond(grid[-2], grid[-1]))
        say(
            f"a best learning rate is at the edge: the grid is extended for all arms to {grid[0]:g} ... {grid[-1]:g}"
        )
    with changing_lock(store.path) as lock:
        # Another process may have finished the tuning first; all processes use the same rates.
        chosen = lock.setdefault("tuning", {}).setdefault(key, [dataclasses.asdict(row) for row in rows])
    return Tuning(tuple(_row(row, path) for row in chosen))


def _beyond(inner: float, edge: float) -> float:
    """Return the next rate outside the grid, at the ratio of the last two, rounded to 6 digits."""
    return float(f"{edge * edge / inner:.6g}")


def grid_spec(spec: StudySpec, grid: tuple[float, ...]) -> StudySpec:
    """Return the study with one arm for each arm and rate, the tuning budget and one seed."""
    assert spec.tune is not None
    arms = []
    for lr in grid:
        for arm in spec.arms:
            if "lr" in arm.training:
                raise UserError(
                    f"arm '{arm.label}' has a learning rate of its own; remove it, because tune sets lr for all arms"
                )
            training = {**arm.training, "lr": lr, "tokens": spec.tune.tokens}
            arms.append(dataclasses.replace(arm, label=_label(arm.label, lr), training=training))
    return dataclasses.replace(
        spec,
        arms=tuple(arms),
        baseline=_label(spec.baseline_arm.label, grid[0]),
        primary="",
        lengths=("tokens",),
        branches=(),
        seeds=spec.seeds[:1],
        tune=None,
        bytes=0,
        probes=(),
    )


def _label(label: str, lr: float) -> str:
    return f"{label}, lr {lr:g}"


def _identity(plan: Plan) -> list[Any]:
    """Return what is tuned, without the rates."""
    return sorted(
        canonical_json({**run.identity, "training": {**run.identity["training"], "lr": None}})
        for run in plan.runs
    )


def _rows(spec: StudySpec, plan: Plan, store: Store, grid: list[float]) -> list[Rate]:
    results = store.results(sorted({run.id for run in plan.runs}))
    scores: dict[tuple[str, str, str, str, str], dict[float, float | None]] = {}
    signs: dict[str, int] = {}
    names = {_label(arm.label, lr): (arm.label, lr) for arm in spec.arms for lr in grid}
    for run in plan.runs:
        label, lr = names[run.arm.label]
        result = results.get(run.id)
        measure = plan.measure(run.contest)
        value = result.valid.values[measure.name] if result is not None and result.valid is not None else None
        signs[run.contest.corpus] = 1 if measure.better == "lower" else -1
        contest = run.contest
        key = (contest.corpus, contest.size, contest.context, contest.shape, label)
        scores.setdefault(key, {})[lr] = value
    rows = []
    for (corpus, size, context, shape, label), values in scores.items():
        sign = signs[corpus]
        # Ties, such as several rates with a perfect task score, are resolved to the middle rate.
        ranked = sorted((math.inf if score is None else sign * score, lr) for lr, score in values.items())
        ties = [lr for value, lr in ranked if value == ranked[0][0]]
        best = ties[len(ties) // 2]
        if values[best] is None:
            raise UserError(
                f"{label}: training failed at every learning rate ({', '.join(f'{lr:g}' for lr in grid)})"
            )
        rows += [
            Rate(
                *(corpus, size, shape, label, lr, value),
                chosen=lr == best,
                edge=best in (grid[0], grid[-1]),
                context=context,
            )
            for lr, value in sorted(values.items())
        ]
    return rows


def _row(row: Any, path: Any) -> Rate:
    try:
        # Older locks use the key bits_per_byte.
        return Rate(**{"score" if key == "bits_per_byte" else key: value for key, value in row.items()})
    except TypeError as error:
        raise DamagedFile(f"damaged file {path}: tuning: {error}") from None
