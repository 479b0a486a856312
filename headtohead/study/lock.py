"""study.lock.json: what was planned before the first run, so that a study resumed means the same thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headtohead.common.errors import DamagedFile
from headtohead.common.files import canonical_json, digest
from headtohead.common.schema import read_document, write_document
from headtohead.study.planned import Plan

NAME = "study.lock.json"


def planned_seeds(folder: Path, plan: Plan, started: bool) -> frozenset[int]:
    """Return the seeds of this plan that were added after results could be looked at; write the lock.

    `started` says whether a run of this plan has a result already.
    """
    path = folder / NAME
    lock = read_lock(path) if path.is_file() else {"plans": {}}
    key = digest(canonical_json(_comparison(plan)))[:16]
    known = lock.get("recovered", plan.spec.seeds)
    planned = [seed for seed in plan.spec.seeds if seed in known]
    entry = lock["plans"].setdefault(key, {"seeds": planned, "added": [], "solved": _solved(plan)})
    new = [seed for seed in plan.spec.seeds if seed not in (*entry["seeds"], *entry["added"])]
    if new and started:
        entry["added"] += new
    else:
        entry["seeds"] += new
    if "stacked" in lock or any(run.stacked for run in plan.runs):
        lock["stacked"] = any(run.stacked for run in plan.runs)
    write_document(path, lock)
    return frozenset(entry["added"])


def read_lock(path: Path) -> dict[str, Any]:
    """Return the lock; a damaged one is refused, since it says which seeds were planned before looking."""
    lock = read_document(path)
    try:
        good = all(
            all(isinstance(seed, int) for seed in (*entry["seeds"], *entry["added"]))
            for entry in lock["plans"].values()
        ) and all(_measured(row) for row in lock.get("seconds", {}).values())
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise DamagedFile(
            f"damaged file {path}: no plans; h2h doctor {path.parent} makes it again from study.json"
        )
    return dict(lock)


def frozen_seconds(folder: Path) -> dict[str, Any]:
    """Return the seconds per step that the lock of a study holds."""
    path = folder / NAME
    return dict(read_lock(path).get("seconds", {})) if path.is_file() else {}


def frozen_stacking(folder: Path) -> bool | None:
    """Return whether the seeds of a study that was planned before are stacked, None where none was."""
    path = folder / NAME
    lock = read_lock(path) if path.is_file() else {}
    return bool(lock.get("stacked", False)) if lock.get("plans") else None


def sound_seconds(given: Any) -> dict[str, Any]:
    """Return what a damaged study still knows of its seconds per step."""
    try:
        return {key: row for key, row in given.items() if _measured(row)}
    except (KeyError, TypeError, AttributeError):
        return {}


def _measured(row: Any) -> bool:
    """Whether a row holds seconds per step."""
    numbers = all(isinstance(row[key], int | float) and row[key] >= 0 for key in ("seconds", "spread"))
    return numbers and row["seconds"] > 0 and isinstance(row["where"], str)


def _comparison(plan: Plan) -> list[Any]:
    """What the study compares, seeds aside."""
    distinct = {
        (run.layers, run.size, run.training, run.corpus["content"], run.start): run for run in plan.runs
    }
    # The name of a branch's parent depends on the seed; its step does not.
    return sorted(
        {
            canonical_json(
                {**run.identity, "seed": None} | ({"parent": run.parent.step} if run.parent else {})
            )
            for run in distinct.values()
        }
    )


def _solved(plan: Plan) -> list[dict[str, Any]]:
    """The numbers that the shape and length rules gave each arm."""
    return [
        {
            "arm": run.arm.text,
            "contest": run.contest.title,
            "layers": [composed.text for composed in run.layers],
            "width": run.size.width,
            "ffn": run.size.ffn,
            "parameters": run.parameters,
            "cache_bytes_per_token": run.cache,
            "tokens": run.training.tokens,
            "steps": run.steps,
        }
        for run in plan.runs
        if run.seed == plan.spec.seeds[0]
    ]
