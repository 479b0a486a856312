"""Learning-rate tuning: one grid and one budget for every arm, chosen on valid, judged on test.

If an arm's best rate is at the edge of the grid, the grid is extended for all arms until every optimum is inside. The
chosen rates are kept in study.lock.json, so that a resumed study uses the same ones.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json, digest
from headtohead.study.config.spec import StudySpec, Tune
from headtohead.study.plan.plan import Plan, Rates
from headtohead.study.store.frozen import changing_lock, read_lock
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


def tuning_key(spec: StudySpec, plan: Plan) -> str:
    """Return the name of a tuning in study.lock.json: what is tuned, without the rates. `plan` has any one rate."""
    return digest(canonical_json(_identity(plan) + [spec.metric][: bool(spec.metric)]))[:16]


def frozen_tuning(folder: Path, key: str, tune: Tune) -> Tuning | None:
    """Return the rates chosen earlier, or None if the tuning is not finished."""
    known = read_lock(folder).tuning.get(key)
    # The key covers the seeds of the trials; rows of earlier versions do not state their number.
    return Tuning(tuple(dataclasses.replace(row, seeds=tune.seeds) for row in known)) if known else None


def freeze_tuning(folder: Path, key: str, rows: list[Rate]) -> Tuning:
    """Write the chosen rates to study.lock.json and return them, or those of a process that was first."""
    with changing_lock(folder) as lock:
        chosen = lock.tuning.setdefault(key, rows)
    return Tuning(tuple(chosen))


def extended(grid: tuple[float, ...], rows: list[Rate]) -> tuple[float, ...]:
    """Return the grid with a further rate at each edge where an arm has its best one."""
    low, high = (any(row.chosen and row.lr == edge for row in rows) for edge in (grid[0], grid[-1]))
    return (
        *([_beyond(grid[1], grid[0])] if low else []),
        *grid,
        *([_beyond(grid[-2], grid[-1])] if high else []),
    )


def _beyond(inner: float, edge: float) -> float:
    """Return the next rate outside the grid, at the ratio of the last two, rounded to 6 digits."""
    return float(f"{edge * edge / inner:.6g}")


def grid_spec(spec: StudySpec, grid: tuple[float, ...]) -> StudySpec:
    """Return the study with one arm for each arm and rate, with the budget and the seeds of the tuning."""
    assert spec.tune is not None
    tokens = {} if spec.tune.tokens is None else {"tokens": spec.tune.tokens}
    arms = []
    for lr in grid:
        for arm in spec.arms:
            if "lr" in arm.training:
                raise UserError(
                    f"arm '{arm.label}' has a learning rate of its own; remove it, because tune sets lr for all arms"
                )
            training = {**arm.training, "lr": lr} | tokens
            arms.append(dataclasses.replace(arm, label=_label(arm.label, lr), training=training))
    return dataclasses.replace(
        spec,
        arms=tuple(arms),
        baseline=_label(spec.baseline_arm.label, grid[0]),
        primary="",
        lengths=("tokens",),
        branches=(),
        seeds=_seeds(spec),
        tune=None,
        bytes=0,
        probes=(),
    )


def _seeds(spec: StudySpec) -> tuple[int, ...]:
    """Return the seeds of the tuning: the study's first ones, and further ones if there are too few."""
    assert spec.tune is not None
    more = (seed for seed in count(1) if seed not in spec.seeds)
    return tuple(islice(chain(spec.seeds, more), spec.tune.seeds))


def _label(label: str, lr: float) -> str:
    return f"{label}, lr {lr:g}"


def _identity(plan: Plan) -> list[Any]:
    """Return what is tuned, without the rates, and however the trials are trained."""
    return sorted(
        canonical_json(
            {**run.identity, "training": {**run.identity["training"], "lr": None}, "stacked": False}
        )
        for run in plan.compared()
    )


def trials(spec: StudySpec, plan: Plan, store: Store, grid: tuple[float, ...]) -> list[Rate]:
    """Return the mean score over the tuning's seeds of every arm at every rate of the grid, with the best one chosen.

    A rate at which a seed diverged or failed has no score.
    """
    results = store.results(sorted(plan.runs))
    found: dict[tuple[str, str, str, str, str], dict[float, list[float | None]]] = {}
    signs: dict[str, int] = {}
    names = {_label(arm.label, lr): (arm.label, lr) for arm in spec.arms for lr in grid}
    for entry in plan.entries:
        label, lr = names[entry.label]
        result = results.get(entry.run)
        contest = entry.contest
        measure = plan.measure(contest)
        value = result.valid.values[measure.name] if result is not None and result.valid is not None else None
        signs[contest.corpus] = 1 if measure.better == "lower" else -1
        key = (contest.corpus, contest.size, contest.context, contest.shape, label)
        found.setdefault(key, {}).setdefault(lr, []).append(value)
    rows = []
    for (corpus, size, context, shape, label), by_rate in found.items():
        sign = signs[corpus]
        values = {lr: _mean(scores) for lr, scores in by_rate.items()}
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
                seeds=spec.tune.seeds if spec.tune is not None else 1,
            )
            for lr, value in sorted(values.items())
        ]
    return rows


def _mean(scores: list[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return fmean(known) if len(known) == len(scores) else None
