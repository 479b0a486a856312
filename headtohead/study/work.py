"""The loop of one executor: take hold of a run that has no result, do it, go on; wait for runs that others hold.

Several executors, on one host or on many, may work on one study at the same time. Each goes through the same list;
whoever holds a run first does it. At the end an executor stays while others hold runs, and takes them over when
their owner dies: a study is finished when any of its executors says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headtohead.common.errors import UserError
from headtohead.mechanisms.terms import Composed
from headtohead.study.holds import Holds
from headtohead.study.perform import Conditions, Event, missing_probes, perform
from headtohead.study.store import RunDirectory, Store

_LOOK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """A run to do; the layers are given where its record alone cannot build them."""

    record: dict[str, Any]
    layers: tuple[Composed, ...] | None = None
    probes: tuple[str, ...] = ()

    def done(self, run: RunDirectory) -> bool:
        """Return whether the run has its result, and every probe that can be taken."""
        return run.finished() and not (run.weights.is_file() and missing_probes(run, self.probes))


def work(
    store: Store, jobs: list[Job], conditions: Conditions, stop: Callable[[], bool], tell: Event
) -> None:
    """Do every job that has no result and that nobody else does, until all have one or `stop` says so."""
    holds = Holds()
    awaited: set[str] = set()
    while jobs and not stop():
        held = []
        for job in jobs:
            if stop():
                return
            state = _attempt(store, job, holds, conditions, stop, tell)
            if state == "held":
                held.append(job)
            elif state == "blocked":
                return
        if len(held) == len(jobs):
            _tell_of_owner(store, held[0], awaited, tell)
            time.sleep(_LOOK_AGAIN_SECONDS)
        jobs = held


def _attempt(
    store: Store, job: Job, holds: Holds, conditions: Conditions, stop: Callable[[], bool], tell: Event
) -> str:
    """Do one job unless it is done or held; return how that ended."""
    run = store.run(job.record["id"])
    if job.done(run):
        return "done"
    try:
        run.open(job.record)
        with holds.hold(run.path) as hold:
            if hold is None:
                return "held"
            if job.done(run):
                return "done"
            tell({"kind": "started", "run": run.id})
            layers = None if job.layers is None else list(job.layers)
            state = perform(
                run,
                job.record,
                conditions,
                layers=layers,
                probes=job.probes,
                stop=stop,
                lost=hold.lost,
                tell=tell,
            )
    except (OSError, UserError) as error:
        words = f"cannot write to {run.path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        tell({"kind": "obstacle", "run": run.id, "words": words})
        return "blocked"
    tell({"kind": "ended", "run": run.id, "state": state})
    return state


def _tell_of_owner(store: Store, job: Job, awaited: set[str], tell: Event) -> None:
    run = store.run(job.record["id"])
    owner = run.owner()
    if owner is not None and str(owner) not in awaited:
        awaited.add(str(owner))
        tell({"kind": "waiting", "run": run.id, "owner": str(owner), "pid": owner.pid if owner.here else 0})
