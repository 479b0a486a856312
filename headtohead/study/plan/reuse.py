"""Reuse of stored runs after an edit of a mechanism file that changes only comments or formatting."""

from __future__ import annotations

import dataclasses

from headtohead.common.errors import UnreadableFile
from headtohead.common.text import counted
from headtohead.study.plan.plan import Plan
from headtohead.study.store.programs import program_key, user_files
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store


def with_stored_programs(plan: Plan, store: Store) -> tuple[Plan, list[str]]:
    """Return the plan with stored runs in place of planned ones that have the same program, and notes about them.

    A stored run keeps its id, which is the hash of the text it was started with.
    """
    missing = [run for run in plan.runs.values() if run.programs and not store.run(run.id).started()]
    if not missing:
        return plan, []
    stored = _stored(store, plan)
    found: dict[str, RunSpec] = {}
    trunks: dict[str, str] = {}
    for run in missing:  # trunks come before their branches
        other = stored.get(program_key(run, trunks))
        if other is not None and run.branches:  # stays in the plan: other branches may need it
            trunks[run.id] = other.id
        elif other is not None:
            found[run.id] = dataclasses.replace(
                run, mechanisms=other.mechanisms, programs=other.programs, parent=other.parent
            )
    if not found:
        return plan, []
    runs = {(kept := found.get(name, run)).id: kept for name, run in plan.runs.items()}
    entries = tuple(
        dataclasses.replace(entry, run=found[entry.run].id) if entry.run in found else entry
        for entry in plan.entries
    )
    files = sorted({path for run in found.values() for path in user_files(run)})
    note = f"{', '.join(files)}: only comments or formatting differ from earlier runs; {counted(len(found), 'run')} reused"
    return dataclasses.replace(plan, runs=runs, entries=entries), [note]


def _stored(store: Store, plan: Plan) -> dict[str, RunSpec]:
    """Return the runs of user code that have started and are not in the plan, by their program."""
    found = {}
    for folder in store.runs():
        if folder.id in plan.runs or not folder.started():
            continue
        try:
            spec = folder.spec()
        except UnreadableFile:
            continue
        if spec.programs:
            found[program_key(spec, {})] = spec
    return found
