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
from collections.abc import Sequence
from contextlib import ExitStack

from headtohead.common.errors import UserError
from headtohead.common.stop import Stop
from headtohead.study.plan.branches import drop_checkpoints, kept_checkpoint
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import LayerTable
from headtohead.study.plan.population import group_populations
from headtohead.study.run.compile_ahead import CompileAhead
from headtohead.study.run.events import Emit, Event
from headtohead.study.run.scoring import is_done
from headtohead.study.run.training import TrainingPass
from headtohead.study.store.lease import LeaseManager
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store

_POLL_SECONDS = 0.5

Group = list[RunSpec]
"""Runs that are trained in one pass: a single run, or the rows of a population."""


class ClaimLoop:
    """Runs every run that has no result and no other owner, until all have a result or `stop` is true."""

    def __init__(
        self,
        store: Store,
        runs: Sequence[RunSpec],
        execution: ExecutionSettings,
        stop: Stop,
        emit: Emit,
        *,
        probes: Sequence[str] = (),
        layers: LayerTable | None = None,
        ahead: CompileAhead | None = None,
    ) -> None:
        """`layers` are given if the runs stay in this process, which may have classes that no file contains.

        `ahead` compiles the next pass meanwhile; not given if other processes may take it first.
        """
        self.store, self.runs, self.execution, self.stop, self.emit = store, runs, execution, stop, emit
        self.probes, self.layers = tuple(probes), layers
        self.ahead = ahead
        self.leases = LeaseManager()
        self.awaited: set[str] = set()

    def work(self) -> None:
        """Return when nothing is left to do here."""
        groups = group_populations(self.runs, self.execution)
        branching = any(run.parent for run in self.runs)
        abandoned: set[str] = set()
        while groups and not self.stop():
            waiting = {run.id for group in groups for run in group} - abandoned
            held: list[Group] = []
            for index, group in enumerate(groups):
                if self.stop():
                    return
                trunks = {run.id: run.parent.run for run in group if run.parent}
                if any(trunks.get(run.id) in waiting and not self._ready(run) for run in group):
                    held.append(group)
                    continue
                without = [run for run in group if trunks.get(run.id) in abandoned]
                abandoned.update(run.id for run in without)
                group = [run for run in group if run not in without]
                if not group:
                    continue
                if self.ahead is not None:
                    self._compile_next(groups[index + 1 :])
                state = self.attempt(group)
                if state == "held":
                    held.append(group)
                elif state == "blocked":
                    return
                elif state in ("stopped", "deferred"):
                    abandoned.update(run.id for run in group)
                elif branching:
                    if trunks:
                        own = set(trunks.values())
                        drop_checkpoints(
                            self.store, [run for run in self.runs if run.parent and run.parent.run in own]
                        )
                    # The branches of a trunk that has ended run before the next trunk.
                    held += groups[index + 1 :]
                    break
            if len(held) == len(groups):
                if self.stop.late:  # other executors hold all remaining runs
                    return
                self._report_owner(held)
                time.sleep(_POLL_SECONDS)
            groups = held

    def _compile_next(self, groups: list[Group]) -> None:
        """Compile the next group that has to be trained in a helper process."""
        assert self.ahead is not None
        for group in groups:
            left = [run for run in group if not self.store.run(run.id).finished()]
            if left:
                self.ahead.start(left, None if self.layers is None else self.layers[left[0].layers])
                return

    def _wanted(self, run: RunSpec) -> tuple[str, ...]:
        """Return the probes to take: none for a trunk, which is in no contest."""
        return () if run.branches else self.probes

    def _ready(self, branch: RunSpec) -> bool:
        assert branch.parent is not None
        trunk = self.store.run(branch.parent.run)
        return trunk.finished() or kept_checkpoint(trunk, branch.parent.step).is_dir()

    def attempt(self, group: Group) -> str:
        """Run a group unless it is done or one of its runs is leased; return the resulting state."""
        left = [run for run in group if not is_done(self.store.run(run.id), self._wanted(run))]
        unprobed = [[run] for run in left if self.store.run(run.id).finished()]
        untrained = [run for run in left if not self.store.run(run.id).finished()]
        states = [self._attempt_pass(part) for part in (*unprobed, untrained) if part]
        order = ("blocked", "held", "stopped", "deferred")
        return next((state for state in order if state in states), "done")

    def _attempt_pass(self, group: Group) -> str:
        """Lease all runs of a group and train them, or take the missing probes of a finished run."""
        directories = [self.store.run(run.id) for run in group]
        finished = [directory.finished() for directory in directories]
        try:
            for directory, run in zip(directories, group, strict=True):
                directory.open(run)
            with ExitStack() as exits:
                leases = []
                for directory in directories:
                    if (lease := exits.enter_context(self.leases.acquire(directory.path))) is None:
                        return "held"
                    leases.append(lease)
                if all(is_done(self.store.run(run.id), self._wanted(run)) for run in group):
                    return "done"
                if [directory.finished() for directory in directories] != finished:
                    return "held"  # another executor was faster; the next round finds what is left
                for run in group:
                    self.emit(Event("started", run.id))
                states = TrainingPass(
                    self.store,
                    group,
                    self.execution,
                    layers=None if self.layers is None else self.layers[group[0].layers],
                    probes=self._wanted(group[0]),
                    stop=self.stop,
                    lost=lambda: any(lease.lost() for lease in leases),
                    emit=self.emit,
                ).run()
        except (OSError, UserError) as error:
            path = getattr(error, "filename", None) or directories[0].path
            message = (
                f"cannot write to {path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            )
            self.emit(Event("deferred", group[0].id, message=message))
            return "blocked"
        if any(directory.finished() for directory in directories):
            self.stop.advance()
        for run, state in zip(group, states, strict=True):
            self.emit(Event("ended", run.id, state=state))
        if len(states) == 1 or "blocked" in states:
            return "blocked" if "blocked" in states else states[0]
        return "done"  # rows that stopped early are found again after the stop

    def _report_owner(self, groups: list[Group]) -> None:
        for run in (run for group in groups for run in group):
            if (owner := self.store.run(run.id).owner()) is None:
                continue
            if str(owner) not in self.awaited:
                self.awaited.add(str(owner))
                pid = owner.pid if owner.here else 0
                self.emit(Event("waiting", run.id, owner=str(owner), pid=pid))
            return
