"""What a study finds when it is started again: results that stand, runs to do once more, and what to say of both."""

from __future__ import annotations

import json
from typing import Any

from headtohead.common.errors import UnreadableFile
from headtohead.study.environment import commit
from headtohead.study.numerics import NUMERICS, numerics_of
from headtohead.study.plan.run_spec import Plan
from headtohead.study.run.run_one import missing_probes
from headtohead.study.store.run_store import RunDirectory, Store, set_aside


def valid_results(store: Store, ids: list[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the results at hand, and a line about each damaged one: it is set aside and its run done again."""
    damage: dict[str, str] = {}
    known = store.results(ids, damage)
    notes = []
    for run_id, words in damage.items():
        kept = set_aside(store.run(run_id).path / "result.json")
        notes.append(f"{words}; kept as {kept.name}, and the run is done again")
    return known, notes


def reset_failed(store: Store, ids: list[str]) -> None:
    """Drop what failed runs left behind, so that they are done again."""
    for run_id in ids:
        run = store.run(run_id)
        if run.finished() and run.state() not in ("done", "diverged", "damaged"):
            run.reset()


def reuse_notes(store: Store, plan: Plan, known: dict[str, dict[str, Any]]) -> list[str]:
    """Say why runs are new or taken over: a mechanism's file that changed, results of another commit."""
    notes = []
    sources = {
        (term.path, term.kind.name): term.source
        for run in plan.runs
        for composed in run.layers
        for term in composed.terms
        if term.path
    }
    here = commit()
    others: dict[str, int] = {}
    older: dict[str, int] = {}
    planned = {run.id for run in plan.runs}
    changed: set[str] = set()
    for folder in store.runs():
        if folder.id in planned:
            if folder.id in known and (stretches := folder.stretches()):
                made = str(stretches[-1].get("commit", "unknown"))
                others[made] = others.get(made, 0) + (made != here)
            continue
        if (record := _record(folder)) is None:
            continue
        numerics = numerics_of(record)
        older[numerics] = older.get(numerics, 0) + (numerics != str(NUMERICS))
        text = json.dumps(record["identity"]["layers"]) if sources else ""
        changed |= {
            path for (path, name), source in sources.items() if f'"{name}"' in text and source not in text
        }
    notes += [f"{path} has changed: its runs start anew" for path in sorted(changed)]
    notes += [
        f"{count} runs computed with numerics {numerics} are left as they are: this version computes with numerics "
        f"{NUMERICS}, and never compares the two"
        for numerics, count in older.items()
        if count
    ]
    notes += [
        f"{count} runs of commit {made} are reused: the same numerics"
        for made, count in others.items()
        if count
    ]
    return notes


def unprobed_note(store: Store, known: dict[str, dict[str, Any]], probes: tuple[str, ...]) -> list[str]:
    """Say once that finished runs lack probes that cannot be taken any more, for they kept no weights."""
    lacking: dict[str, None] = {}
    count = 0
    for run_id, result in known.items():
        run = store.run(run_id)
        if result.get("status") == "done" and not run.weights.is_file():
            missing = missing_probes(run, probes)
            count += bool(missing)
            lacking |= dict.fromkeys(missing)
    if not count:
        return []
    return [
        f"{count} finished runs kept no weights: {', '.join(lacking)} cannot be taken there "
        "(another --out trains them anew, and keeps the weights)"
    ]


def _record(folder: RunDirectory) -> dict[str, Any] | None:
    try:
        return folder.spec()
    except UnreadableFile:
        return None
