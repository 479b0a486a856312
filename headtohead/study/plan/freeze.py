"""Freezes a plan before the first run: its definitions, and in study.lock.json its seeds, apart from those added later."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from headtohead.common.files import canonical_json, digest
from headtohead.study.plan.plan import Plan
from headtohead.study.store.frozen import PlannedSeeds, SolvedArm, changing_lock
from headtohead.study.store.history import ArmDefinition, Definitions
from headtohead.study.store.programs import code_digests
from headtohead.study.store.run_spec import RunSpec


def planned_seeds(folder: Path, plan: Plan, started: bool) -> frozenset[int]:
    """Write the lock and return the seeds of this plan that were added after results existed.

    `started`: whether a run of this plan already has a result.
    """
    key = digest(canonical_json(_comparison(plan)))[:16]
    with changing_lock(folder) as lock:
        known = plan.spec.seeds if lock.recovered is None else lock.recovered
        planned = [seed for seed in plan.spec.seeds if seed in known]
        entry = lock.plans.setdefault(key, PlannedSeeds(planned, [], _solved(plan)))
        new = [seed for seed in plan.spec.seeds if seed not in (*entry.seeds, *entry.added)]
        if new and started:
            entry.added += new
        else:
            entry.seeds += new
        stacked = any(run.stacked for run in plan.runs.values())
        if lock.stacked is not None or stacked:
            lock.stacked = stacked
        if stacked or lock.populations:
            lock.populations |= populations(plan)
    return frozenset(entry.added)


def populations(plan: Plan, prefix: str = "") -> dict[str, bool]:
    """Return whether the runs of each contest are rows of populations, by its title after `prefix`."""
    found = ((dataclasses.replace(entry.contest, branch=""), entry.run) for entry in plan.entries)
    return {f"{prefix}{contest.title}": plan.runs[run].stacked for contest, run in found}


def definitions(plan: Plan) -> Definitions:
    """Return what defines the arms of a plan, and the contexts that are not part of a contest's title."""
    runs: dict[str, list[RunSpec]] = {}
    contexts: dict[str, int] = {}
    for entry in plan.entries:
        run = plan.runs[entry.run]
        runs.setdefault(entry.label, []).append(run)
        if not entry.contest.context:
            contexts[entry.contest.title] = run.size.context
    arms = {}
    for arm in plan.spec.arms:
        own = runs[arm.label]
        settings = (
            arm.training
            | ({"model": arm.model} if arm.model else {})
            | ({"init_from": own[0].start} if arm.start else {})
        )
        code = sorted({one for run in own for one in code_digests(run)})
        arms[arm.label] = ArmDefinition.of(arm.text, settings, code)
    return Definitions(arms, contexts)


def _comparison(plan: Plan) -> list[Any]:
    """Return what the study compares, without seeds."""
    distinct = {
        (run.layers, run.size, run.training, run.corpus.content, run.start): run for run in plan.compared()
    }
    # The id of a branch's parent depends on the seed; its step does not.
    return sorted(
        {
            canonical_json(
                {**run.identity, "seed": None} | ({"parent": run.parent.step} if run.parent else {})
            )
            for run in distinct.values()
        }
    )


def _solved(plan: Plan) -> list[SolvedArm]:
    """Return the numbers that the shape and length rules solved for each arm."""
    return [
        SolvedArm(
            arm=run.arm,
            contest=entry.contest.title,
            layers=run.layers,
            width=run.size.width,
            ffn=run.size.ffn,
            parameters=run.parameters,
            cache_bytes_per_token=run.cache_bytes_per_token,
            tokens=run.training.tokens,
            steps=run.steps,
        )
        for entry, run in plan.first_seed()
    ]
