"""The loop of one executor: take lease of a run that has no result, do it, go on; wait for runs that others lease.

Several executors, on one host or on many, may work on one study at the same time. Each goes through the same list;
whoever leases a run first does it. At the end an executor stays while others lease runs, and takes them over when
their owner dies: a study is finished when any of its executors says so.

Stacked seeds are held together: an executor has the locks of all of them, or of none.

A branch waits until its trunk has kept the checkpoint it starts from, or has ended without one. Whoever finishes the
last branch of a trunk drops what the trunk kept.
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

_LOOK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """A run to do; the layers are given where its record alone cannot build them."""

    record: dict[str, Any]
    layers: tuple[Composed, ...] | None = None
    probes: tuple[str, ...] = ()

    def done(self, run: RunDirectory) -> bool:
        """Return whether the run has its result, and every probe that can be taken."""
        return run.finished() and not (run.weights.is_file() and missing_probes(run, self.wanted))

    @property
    def wanted(self) -> tuple[str, ...]:
        """The probes to take: none of a trunk, which stands in no contest."""
        return () if "branches" in self.record else self.probes

    @property
    def id(self) -> str:
        """The run's name."""
        return str(self.record["id"])

    @property
    def parent(self) -> Parent | None:
        """What a branch starts from."""
        return Parent(**self.record["parent"]) if "parent" in self.record else None


def work(store: Store, jobs: list[Job], execution: ExecutionSettings, stop: Stop, emit: Event) -> None:
    """Do every job that has no result and that nobody else does, until all have one or `stop` says so."""
    leases = LeaseManager()
    awaited: set[str] = set()
    if not _work_on_stacks(store, jobs, leases, awaited, execution, stop, emit):
        return
    jobs = [job for job in jobs if not in_population(job.record)]
    branches = [(job.id, parent) for job in jobs if (parent := job.parent)]
    abandoned: set[str] = set()
    while jobs and not stop():
        waiting = {job.id for job in jobs} - abandoned
        held = []
        for place, job in enumerate(jobs):
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
                # A trunk that has ended sets its branches free: they come before the next trunk.
                held += jobs[place + 1 :]
                break
        if len(held) == len(jobs):
            if stop.late:  # all that is left is with others
                return
            _report_owner(store, held, awaited, emit)
            time.sleep(_LOOK_AGAIN_SECONDS)
        jobs = held


def _work_on_stacks(
    store: Store,
    jobs: list[Job],
    leases: LeaseManager,
    awaited: set[str],
    execution: ExecutionSettings,
    stop: Stop,
    emit: Event,
) -> bool:
    """Do the jobs whose seeds are stacked; return whether there is anything left to go on with."""
    by_id = {job.id: job for job in jobs if in_population(job.record)}
    groups = group_populations([job.record for job in by_id.values()], execution)
    population_blocker = [[by_id[name] for name in names] for names in groups]
    while population_blocker and not stop():
        held = []
        for stack in population_blocker:
            if stop():
                return False
            state = _attempt_stack(store, stack, leases, execution, stop, emit)
            if state == "held":
                held.append(stack)
            elif state == "blocked":
                return False
        if len(held) == len(population_blocker):
            if stop.late:
                return False
            _report_owner(store, [job for stack in held for job in stack], awaited, emit)
            time.sleep(_LOOK_AGAIN_SECONDS)
        population_blocker = held
    return not stop()


def _attempt_stack(
    store: Store,
    stack: list[Job],
    leases: LeaseManager,
    execution: ExecutionSettings,
    stop: Stop,
    emit: Event,
) -> str:
    """Do the jobs of one stack unless they are done or one of them is held; return how that ended."""
    states = []
    for job in stack:
        if store.run(job.id).finished():  # only its probes may be missing
            states.append(_attempt(store, job, leases, execution, stop, emit))
    jobs = [job for job in stack if not store.run(job.id).finished()]
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
        with ExitStack() as stack:
            owned = []
            for run in runs:
                if (lease := stack.enter_context(leases.acquire(run.path))) is None:
                    return "held"
                owned.append(lease)
            if any(run.finished() for run in runs):
                return "held"  # another executor was quicker; the next look finds what is left
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
        words = (
            f"cannot write to {error.filename or runs[0].path}: {error.strerror}"
            if isinstance(error, OSError)
            else str(error)
        )
        emit({"kind": "obstacle", "run": runs[0].id, "words": words})
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
    """Do one job unless it is done or held; return how that ended."""
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
        words = f"cannot write to {run.path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        emit({"kind": "obstacle", "run": run.id, "words": words})
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
