"""The executor of a study on a cluster: one task for each run or population, placed by an engine such as Ray.

The run store of the driver is the source of truth. Where nodes share its file system, tasks lease and write runs there.
Elsewhere the driver leases a run, its task works in a directory of its node, and the driver writes what the task sends.
A task that ended without a result is started again from the newest checkpoint in the store: without limit if its node
was lost, and up to twice if its process died.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtohead.common.stop import Stop
from headtohead.study.plan.branches import drop_checkpoints, kept_checkpoint
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.population import group_populations
from headtohead.study.run.cluster.engine import Engine, store_is_shared
from headtohead.study.run.cluster.messages import Instructions, Order, Post, ShippedFile, TaskEnd, Versions
from headtohead.study.run.cluster.run_files import apply_changes
from headtohead.study.run.cluster.shipping import Inputs, run_state
from headtohead.study.run.deaths import MAX_DEATHS, record_death
from headtohead.study.run.events import Event
from headtohead.study.run.scoring import is_done
from headtohead.study.run.training import UNFINISHED
from headtohead.study.store.lease import LeaseManager, owner_of
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store

_NONCE = ".shared"
_POLL_SECONDS = 0.25
_EXIT_SECONDS = 120.0
"""How long tasks that were asked to stop may take to save their work."""
_PATIENCE_SECONDS = 10.0
"""After this time without a node for the queued tasks, the driver says so."""
_TASKS_PER_POST = 50
"""Tasks that post once a second; more of them post less often, so that the driver's work stays the same."""


@dataclass
class _Task:
    """A task that the engine has."""

    group: list[RunSpec]
    files: dict[str, ShippedFile]
    """What it may ask for, by sha256."""
    leases: ExitStack
    host: str = ""
    """Where it runs; empty until it starts."""
    running: list[str] = field(default_factory=list)
    """Its runs that have started and not ended, in this order."""


class ClusterExecutor:
    """Runs every run that has no result as tasks of an engine, until all have one or `stop` is true."""

    def __init__(
        self,
        store: Store,
        execution: ExecutionSettings,
        engine: Engine,
        inputs: Inputs,
        *,
        probes: tuple[str, ...] = (),
        stop: Stop,
        planning: ExecutionSettings | None = None,
    ) -> None:
        """`planning` are the settings of this machine, if it does not have the device of the nodes."""
        self.store, self.execution, self.engine, self.inputs = store, execution, engine, inputs
        self.probes, self.limit, self.planning = probes, stop, planning or execution
        self.versions = Versions.here()
        self.runs: list[RunSpec] = []
        self.tasks: dict[str, _Task] = {}
        self.deaths: dict[str, int] = {}
        self.abandoned: set[str] = set()
        """Runs that are not started again by this execution."""
        self.shared = False
        self.nonce = f"{_NONCE}-{os.getpid()}-{secrets.token_hex(8)}"
        self.leases = LeaseManager()
        self.awaited: set[str] = set()
        self._count = 0
        self._lost: frozenset[str] = frozenset()
        """Tasks that ended without an end of their own; a node that counts as dead may still be at work."""
        self._begun = False
        self._blocked = False
        """Whether the store cannot be written."""
        self._offers: dict[str, Any] = {}
        """New offers, by sha256."""
        self._offered: set[str] = set()
        self._asked = 0.0
        """When the tasks were asked to stop."""
        self._alone = 0.0
        """Since when no node is left."""

    def submit(self, runs: Sequence[RunSpec]) -> None:
        """Take runs to execute."""
        self.runs += runs

    def events(self, handle: Callable[[Event], None], say: Callable[[str], None]) -> None:
        """Start tasks and pass on their events until every run has ended or the executor has stopped."""
        if not self.runs:
            return
        with self._nonce():
            self.shared = store_is_shared(self.engine, self.store.path.resolve(), self.nonce)
            for run in self.runs:
                self.store.run(run.id).open(run)
            waiting = group_populations(self.runs, self.planning)
            try:
                while waiting or self.tasks:
                    if self._ending():
                        waiting = []
                        self._cancel_queued()
                        if self._overdue(say):
                            return
                    self._report_missing_nodes(say)
                    waiting = self._start(waiting, handle)
                    if not self.tasks and not waiting:
                        return
                    # A task sends its last post before it ends, so posts are taken after the ends are known.
                    ends = self.engine.ended(_POLL_SECONDS)
                    for post in self._exchange():
                        try:
                            self._receive(post, handle)
                        except OSError as error:
                            self._block(error, post, handle)
                    for end in ends:
                        waiting += self._end(end, say)
            finally:
                for task in self.tasks.values():
                    task.leases.close()

    def stop(self) -> None:
        """Nothing to do: the loop of `events` asks `Stop` several times a second and tells the tasks."""

    def _nonce(self) -> ExitStack:
        """Return a context in which a file of an unguessable name is in the store, for nodes to look for."""
        for path in self.store.path.glob(f"{_NONCE}-*"):  # of drivers that were killed
            pid = path.name.removeprefix(f"{_NONCE}-").partition("-")[0]
            if not (pid.isdecimal() and Path(f"/proc/{pid}").exists()):
                path.unlink(missing_ok=True)
        path = self.store.path / self.nonce
        path.touch()
        stack = ExitStack()
        stack.callback(lambda: path.unlink(missing_ok=True))
        return stack

    def _ending(self) -> bool:
        """Return whether no further task is started: at a request, or at the time limit once something has started."""
        return self._requested() or (self.limit.late and self._begun)

    def _requested(self) -> bool:
        return self._blocked or self.limit.requested()

    def _block(self, error: OSError, post: Post, handle: Callable[[Event], None]) -> None:
        """Report that the store cannot be written, and end."""
        run = self.tasks[post.task].group[0].id
        message = f"cannot write to {error.filename or self.store.path}: {error.strerror}"
        handle(Event("deferred", run, message=message))
        self._blocked = True

    def _overdue(self, say: Callable[[str], None]) -> bool:
        """Return whether tasks that were asked to stop have not done so for a long time; they are ended then."""
        self._asked = self._asked or time.monotonic()
        if time.monotonic() - self._asked < _EXIT_SECONDS:
            return False
        hosts = sorted({task.host for task in self.tasks.values()})
        say(
            f"{len(self.tasks)} tasks on {', '.join(hosts)} did not stop within {_EXIT_SECONDS:g} s and are ended"
        )
        return True

    def _report_missing_nodes(self, say: Callable[[str], None]) -> None:
        """Say that no node is left for the queued tasks, once."""
        idle = self.tasks and not any(task.host for task in self.tasks.values())
        if not idle or any(node.slots(self.engine.needed) for node in self.engine.nodes()):
            self._alone = 0.0
            return
        self._alone = self._alone or time.monotonic()
        if time.monotonic() - self._alone > _PATIENCE_SECONDS:
            self._alone = math.inf
            say(f"no node with {self.engine.needed} is left; waiting for one to join the cluster")

    def _cancel_queued(self) -> None:
        for name, task in self.tasks.items():
            if not task.host:
                self.engine.cancel(name)

    def _start(self, waiting: list[list[RunSpec]], handle: Callable[[Event], None]) -> list[list[RunSpec]]:
        """Start the groups that can start now; return the others."""
        # Some more tasks than fit are queued in the engine: a node that becomes free has one at once, and a cluster
        # that grows on demand sees the demand.
        room = 2 * sum(node.slots(self.engine.needed) for node in self.engine.nodes()) + 8 - len(self.tasks)
        rest: list[list[RunSpec]] = []
        unfinished = {run.id for group in waiting for run in group}
        unfinished |= {run.id for task in self.tasks.values() for run in task.group}
        for group in waiting:
            left = [run for run in group if not is_done(self.store.run(run.id), self._wanted(run))]
            lacking = [run for run in left if run.parent and run.parent.run in self.abandoned]
            self.abandoned |= {run.id for run in lacking}
            left = [run for run in left if run.id not in self.abandoned]
            if not left:
                continue
            if room <= 0 or any(
                run.parent and run.parent.run in unfinished and not self._ready(run) for run in left
            ):
                rest.append(left)
            elif self._start_task(left, handle):
                room -= 1
            else:
                rest.append(left)
        return rest

    def _wanted(self, run: RunSpec) -> tuple[str, ...]:
        return () if run.branches else self.probes

    def _ready(self, branch: RunSpec) -> bool:
        assert branch.parent is not None
        trunk = self.store.run(branch.parent.run)
        return trunk.finished() or kept_checkpoint(trunk, branch.parent.step).is_dir()

    def _start_task(self, group: list[RunSpec], handle: Callable[[Event], None]) -> bool:
        """Give a group to the engine; return False if another executor has one of its runs."""
        leases = ExitStack()
        if not self.shared:
            for run in group:
                if leases.enter_context(self.leases.acquire(self.store.run(run.id).path)) is None:
                    leases.close()
                    self._report_owner(run, handle)
                    return False
        self._count += 1
        name = f"{group[0].id}-{self._count}"
        state = () if self.shared else run_state(self.store, group)
        self.tasks[name] = _Task(group, {file.sha256: file for file in (*self.inputs.files, *state)}, leases)
        self.engine.start(
            Order(
                task=name,
                versions=self.versions,
                execution=self.execution,
                runs=[run.as_dict() for run in group],
                probes=self._wanted(group[0]),
                store=str(self.store.path.resolve()),
                nonce=self.nonce,
                shared=self.shared,
                gpus=self.engine.needed.gpus,
                inputs=self.inputs.files,
                moved=self.inputs.moved,
                state=state,
            )
        )
        return True

    def _report_owner(self, run: RunSpec, handle: Callable[[Event], None]) -> None:
        owner = self.store.run(run.id).owner()
        if owner is not None and str(owner) not in self.awaited:
            self.awaited.add(str(owner))
            handle(Event("waiting", run.id, owner=str(owner)))

    def _exchange(self) -> list[Post]:
        """Take the posts; tell the tasks the time left, and those that start after the limit to end."""
        names = frozenset(self.tasks)
        stopping = self._lost | (names if self._requested() else frozenset())
        if self.limit.late and self._begun:
            stopping |= {name for name, task in self.tasks.items() if not task.host}
        left = self.limit.seconds_left
        every = max(1.0, len(names) / _TASKS_PER_POST)
        # State is not wanted again once its task has ended; an offer of it would keep a checkpoint in memory.
        inputs = {file.sha256 for file in self.inputs.files}
        needed = inputs | {sha256 for task in self.tasks.values() for sha256 in task.files}
        withdrawn = frozenset(self._offered - needed)
        self._offered -= withdrawn
        offers, self._offers = self._offers, {}
        instructions = Instructions(stopping, None if left == math.inf else left, every, offers, withdrawn)
        return self.engine.exchange(instructions)

    def _receive(self, post: Post, handle: Callable[[Event], None]) -> None:
        task = self.tasks.get(post.task)
        if task is None:  # of a task that counts as lost
            return
        if post.host:
            task.host, self._begun = post.host, True
        for sha256 in post.wanted:
            if sha256 in task.files and sha256 not in self._offered:
                self._offered.add(sha256)
                self._offers[sha256] = self.engine.offer(Path(task.files[sha256].path))
        known = {run.id for run in task.group}
        for changes in post.changes:
            if changes.run in known and not self.shared:
                apply_changes(self.store.run(changes.run), changes)
        for event in post.events:
            if event.run not in known:
                continue
            if event.kind == "started":
                task.running.append(event.run)
            elif event.kind == "ended":
                task.running = [run for run in task.running if run != event.run]
                if event.state in UNFINISHED:
                    self.abandoned.add(event.run)
                else:
                    self._drop_checkpoints(event.run)
            handle(event)

    def _drop_checkpoints(self, run: str) -> None:
        """Delete the checkpoints of the trunk of a branch that has ended, if it was the last one."""
        trunks = {one.parent.run for one in self.runs if one.id == run and one.parent}
        if trunks:
            drop_checkpoints(
                self.store, [one for one in self.runs if one.parent and one.parent.run in trunks]
            )

    def _end(self, end: TaskEnd, say: Callable[[str], None]) -> list[list[RunSpec]]:
        """Handle the end of a task; return its group if it has to be started again."""
        task = self.tasks.pop(end.task, None)
        if task is None:
            return []
        task.leases.close()
        if end.how in ("node lost", "process died"):
            self._lost |= {end.task}
        group = [run for run in task.group if run.id not in self.abandoned]
        if not group:
            return []
        if end.how == "raised":
            say(end.message)
            self.abandoned |= {run.id for run in group}
            return []
        if end.unshared:
            self.shared = False
        elif end.how in ("returned", "cancelled"):
            left = [run for run in group if not is_done(self.store.run(run.id), self._wanted(run))]
            if left and end.how == "returned" and not self._ending():
                say(f"{_names(left)}: the task on {task.host} ended without a result")
            self.abandoned |= {run.id for run in left}
            return []
        if end.how == "node lost":
            say(f"node {task.host or 'unknown'} was lost; {_names(group)} will continue elsewhere")
            self._release(task)
        if end.how == "process died":
            self._count_death(task, group, end.message, say)
        return [group] if not self._ending() else []

    def _release(self, task: _Task) -> None:
        """Remove the locks that a lost node left in the shared store.

        Nobody else may take them over before a minute has passed. A task that runs on although its node counts as lost
        finds its lock gone and ends.
        """
        for run in task.group if self.shared else ():
            lock = self.store.run(run.id).path / "lock"
            owner = owner_of(lock) if lock.is_file() else None
            if owner is not None and owner.host.partition("?")[0] == task.host:
                lock.unlink(missing_ok=True)

    def _count_death(self, task: _Task, group: list[RunSpec], how: str, say: Callable[[str], None]) -> None:
        """Count the death of a process against the run that started last, and record that as failed the second time."""
        say(f"a process on {task.host or 'the cluster'} {how}")
        run = task.running[-1] if task.running else group[0].id
        count = self.deaths[run] = self.deaths.get(run, 0) + 1
        if count == MAX_DEATHS and task.running:
            say(record_death(self.store.run(run), how))
        elif count == MAX_DEATHS:  # it died before it had started a run
            self.abandoned |= {one.id for one in group}


def _names(group: Sequence[RunSpec]) -> str:
    first = f"{group[0].label}, seed {group[0].seed}"
    return first if len(group) == 1 else f"{first} and {len(group) - 1} more runs"
