"""The claim loop of one executor: lease a run without a result, run it, continue; wait for runs leased by others.

Several executors, on one host or on several, can work on one study at the same time. Each goes through the same list,
and the first to lease a run trains it. An executor that has no run left waits for the runs that others lease and takes
them over if their owner dies, so a study is finished as soon as one of its executors returns.

The rows of a population are leased together: an executor holds the locks of all of them or of none.

A branch waits until its trunk has saved the checkpoint that the branch starts from, or has ended without one. The
executor that finishes the last branch of a trunk deletes the trunk's saved checkpoints.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.stop import Stop
from headtohead.mechanisms.contract.terms import Composed
from headtohead.study.plan.branches import Parent, drop_checkpoints, kept_checkpoint
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.population import group_populations, in_population
from headtohead.study.run.population import run_population
from headtohead.study.run.run_one import Event, missing_probes, run_one
from headtohead.study.store.lease import LeaseManager
from headtohead.study.store.run_store import RunDirectory, Store

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """A run to train. `layers` is given if they cannot be built from the record."""

    record: dict[str, Any]
    layers: tuple[Composed, ...] | None = None
    probes: tuple[str, ...] = ()

    def done(self, run: RunDirectory) -> bool:
        """Return whether the run has its result and every probe that can be taken."""
        return is_done(run, self.wanted)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The probes to take: none for a trunk, which is in no contest."""
        return () if "branches" in self.record else self.probes

    @property
    def id(self) -> str:
        """The run's id."""
        return str(self.record["id"])

    @property
    def parent(self) -> Parent | None:
        """What a branch starts from."""
        return Parent(**self.record["parent"]) if "parent" in self.record else None


def is_done(run: RunDirectory, probes: tuple[str, ...]) -> bool:
    """Return whether the run has its result and every one of these probes that can be taken."""
    return run.finished() and not (probes and run.weights.is_file() and missing_probes(run, probes))


def work(store: Store, jobs: list[Job], execution: ExecutionSettings, stop: Stop, emit: Event) -> None:
    """Run every job that has no result and no other owner, until all have a result or `stop` is true."""
    leases = LeaseManager()
    awaited: set[str] = set()
    if not _work_on_populations(store, jobs, leases, awaited, execution, stop, emit):
        return
    jobs = [job for job in jobs if not in_population(job.record)]
    branches = [(job.id, parent) for job in jobs if (parent := job.parent)]
    abandoned: set[str] = set()
    while jobs and not stop():
        waiting = {job.id for job in jobs} - abandoned
        held = []
        for index, job in enumerate(jobs):
            if stop():
                return
            if (parent := job.parent) and not _ready(store, parent) and parent.run in waiting:
                held.append(job)
                continue
            if parent and parent.run in abandoned:
                abandoned.add(job.id)
                continue
            state = _attempt(store, job, leases, execution, stop, emit)
            if state == "held":
                held.append(job)
            elif state == "blocked":
                return
            elif state in ("stopped", "deferred"):
                abandoned.add(job.id)
            elif branches:
                if parent:
                    drop_checkpoints(store, [pair for pair in branches if pair[1].run == parent.run])
                # The branches of a trunk that has ended run before the next trunk.
                held += jobs[index + 1 :]
                break
        if len(held) == len(jobs):
            if stop.late:  # other executors hold all remaining runs
                return
            _report_owner(store, held, awaited, emit)
            time.sleep(_POLL_SECONDS)
        jobs = held


def _work_on_populations(
    store: Store,
    jobs: list[Job],
    leases: LeaseManager,
    awaited: set[str],
    execution: ExecutionSettings,
    stop: Stop,
    emit: Event,
) -> bool:
    """Run the jobs that are trained in populations; return whether to continue with the others."""
    by_id = {job.id: job for job in jobs if in_population(job.record)}
    groups = group_populations([job.record for job in by_id.values()], execution)
    populations = [[by_id[name] for name in names] for names in groups]
    while populations and not stop():
        held = []
        for population in populations:
            if stop():
                return False
            state = _attempt_population(store, population, leases, execution, stop, emit)
            if state == "held":
                held.append(population)
            elif state == "blocked":
                return False
        if len(held) == len(populations):
            if stop.late:
                return False
            _report_owner(store, [job for population in held for job in population], awaited, emit)
            time.sleep(_POLL_SECONDS)
        populations = held
    return not stop()


def _attempt_population(
    store: Store,
    population: list[Job],
    leases: LeaseManager,
    execution: ExecutionSettings,
    stop: Stop,
    emit: Event,
) -> str:
    """Run the jobs of one population unless they are done or one of them is leased; return the resulting state."""
    states = []
    for job in population:
        if store.run(job.id).finished():  # only its probes may be missing
            states.append(_attempt(store, job, leases, execution, stop, emit))
    jobs = [job for job in population if not store.run(job.id).finished()]
    if jobs:
        states.append(_attempt_pass(store, jobs, leases, execution, stop, emit))
    return next((state for state in ("blocked", "held") if state in states), "done")


def _attempt_pass(
    store: Store,
    jobs: list[Job],
    leases: LeaseManager,
    execution: ExecutionSettings,
    stop: Stop,
    emit: Event,
) -> str:
    runs = [store.run(job.id) for job in jobs]
    try:
        for run, job in zip(runs, jobs, strict=True):
            run.open(job.record)
        with ExitStack() as exits:
            owned = []
            for run in runs:
                if (lease := exits.enter_context(leases.acquire(run.path))) is None:
                    return "held"
                owned.append(lease)
            if any(run.finished() for run in runs):
                return "held"  # another executor was faster; the next pass finds what is left
            for run in runs:
                emit({"kind": "started", "run": run.id})
            states = run_population(
                runs,
                [job.record for job in jobs],
                execution,
                layers=None if jobs[0].layers is None else list(jobs[0].layers),
                probes=jobs[0].wanted,
                stop=stop,
                lost=lambda: any(lease.lost() for lease in owned),
                emit=emit,
            )
    except (OSError, UserError) as error:
        message = (
            f"cannot write to {error.filename or runs[0].path}: {error.strerror}"
            if isinstance(error, OSError)
            else str(error)
        )
        emit({"kind": "deferred", "run": runs[0].id, "message": message})
        return "blocked"
    if any(run.finished() for run in runs):
        stop.advance()
    for run, state in zip(runs, states, strict=True):
        emit({"kind": "ended", "run": run.id, "state": state})
    return "blocked" if "blocked" in states else "done"


def _ready(store: Store, parent: Parent) -> bool:
    trunk = store.run(parent.run)
    return trunk.finished() or kept_checkpoint(trunk, parent.step).is_dir()


def _attempt(
    store: Store, job: Job, leases: LeaseManager, execution: ExecutionSettings, stop: Stop, emit: Event
) -> str:
    """Run one job unless it is done or leased; return the resulting state."""
    run = store.run(job.id)
    if job.done(run):
        return "done"
    try:
        run.open(job.record)
        with leases.acquire(run.path) as lease:
            if lease is None:
                return "held"
            if job.done(run):
                return "done"
            emit({"kind": "started", "run": run.id})
            layers = None if job.layers is None else list(job.layers)
            state = run_one(
                run,
                job.record,
                execution,
                layers=layers,
                probes=job.wanted,
                stop=stop,
                lost=lease.lost,
                emit=emit,
            )
    except (OSError, UserError) as error:
        message = (
            f"cannot write to {run.path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        )
        emit({"kind": "deferred", "run": run.id, "message": message})
        return "blocked"
    if run.finished():
        stop.advance()
    emit({"kind": "ended", "run": run.id, "state": state})
    return state


def _report_owner(store: Store, jobs: list[Job], awaited: set[str], emit: Event) -> None:
    for job in jobs:
        run = store.run(job.id)
        if (owner := run.owner()) is None:
            continue
        if str(owner) not in awaited:
            awaited.add(str(owner))
            pid = owner.pid if owner.here else 0
            emit({"kind": "waiting", "run": run.id, "owner": str(owner), "pid": pid})
        return
