"""Resume a study: which results are valid, which runs are repeated, and the notes about both."""

from __future__ import annotations

import json

from headtohead.common.errors import UnreadableFile
from headtohead.study.environment import commit
from headtohead.study.numerics import NUMERICS
from headtohead.study.plan.plan import Plan
from headtohead.study.store.programs import user_files
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import Store, set_aside


def valid_results(store: Store, ids: list[str]) -> tuple[dict[str, RunResult], list[str]]:
    """Return the valid results and a note about each damaged one, which is set aside so that its run is repeated."""
    damage: dict[str, str] = {}
    known = store.results(ids, damage)
    notes = []
    for run_id, message in damage.items():
        kept = set_aside(store.run(run_id).path / "result.json")
        notes.append(f"{message}; kept as {kept.name}, and the run is repeated")
    return known, notes


def reset_failed(store: Store, ids: list[str]) -> None:
    """Delete the files of failed runs, so that they run again."""
    for run_id in ids:
        run = store.run(run_id)
        if run.finished() and run.state() not in ("done", "diverged", "damaged"):
            run.reset()


def reuse_notes(store: Store, plan: Plan, known: dict[str, RunResult]) -> list[str]:
    """Return notes on why runs are new or reused: a changed mechanism file, results of another commit."""
    notes = []
    sources = {
        (term.path, term.kind.name): term.source
        for layers in plan.layers.values()
        for composed in layers
        for term in composed.terms
        if term.path
    }
    here = commit()
    others: dict[str, int] = {}
    older: dict[str, int] = {}
    changed: set[str] = set()
    for folder in store.runs():
        if folder.id in plan.runs:
            if folder.id in known and (starts := folder.environments()):
                made = starts[-1].commit
                others[made] = others.get(made, 0) + (made != here)
            continue
        try:
            spec = folder.spec()
        except UnreadableFile:
            continue
        older[spec.numerics] = older.get(spec.numerics, 0) + (spec.numerics != str(NUMERICS))
        text = json.dumps(spec.mechanisms) if sources else ""
        changed |= {
            path for (path, name), source in sources.items() if f'"{name}"' in text and source not in text
        }
    started = {
        path for run in plan.runs.values() if store.run(run.id).started() for path in user_files(run)
    }  # with its text of now, or the same program
    notes += [f"{path} has changed: its runs start from scratch" for path in sorted(changed - started)]
    notes += [
        f"{count} runs computed with numerics {numerics} are not used: this version computes with numerics {NUMERICS} "
        "and never compares the two"
        for numerics, count in older.items()
        if count
    ]
    notes += [
        f"{count} runs of commit {made} are reused: the same numerics"
        for made, count in others.items()
        if count
    ]
    return notes


def unprobed_note(store: Store, known: dict[str, RunResult], probes: tuple[str, ...]) -> list[str]:
    """Return a note if finished runs lack probes that cannot be taken because no weights were kept."""
    lacking: dict[str, None] = {}
    count = 0
    for run_id, result in known.items() if probes else ():
        run = store.run(run_id)
        if result.status == "done" and not run.weights.is_file():
            missing = run.missing_probes(probes)
            count += bool(missing)
            lacking |= dict.fromkeys(missing)
    if not count:
        return []
    return [
        f"{count} finished runs kept no weights: {', '.join(lacking)} cannot be taken "
        "(train them again in another --out to keep the weights)"
    ]
