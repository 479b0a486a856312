"""The executor of a study on a cluster: one task for each run or population, placed by an engine such as Ray.

The run store of the driver is the source of truth. Where nodes share its file system, tasks lease and write runs there.
Elsewhere the driver leases a run, its task works in a directory of its node, and the driver writes what the task sends.
A task that ended without a result is started again from the newest checkpoint in the store: without limit if its node
was lost, and up to twice if its process died.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.stop import Stop
from headtohead.study.plan.branches import drop_checkpoints, kept_checkpoint
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.population import group_populations
from headtohead.study.run.cluster.engine import Engine, store_is_shared
from headtohead.study.run.cluster.messages import Instructions, Order, Post, ShippedFile, TaskEnd, Versions
from headtohead.study.run.cluster.node import device_type
from headtohead.study.run.cluster.run_files import apply_changes
from headtohead.study.run.cluster.shipping import Inputs, owned_name, remove_abandoned, run_state
from headtohead.study.run.deaths import MAX_DEATHS, record_death
from headtohead.study.run.events import Event
from headtohead.study.run.scoring import is_done
from headtohead.study.run.training import UNFINISHED
from headtohead.study.store.lease import Lease, LeaseManager, owner_of
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store

_NONCE = ".shared"
_POLL_SECONDS = 0.25
_EXIT_SECONDS = 120.0
"""How long tasks that were asked to stop may take to save their work."""
_PATIENCE_SECONDS = 10.0
"""After this time without a node for the queued tasks, the driver says so."""
_HELD_SECONDS = 5.0
"""Time until a run that another executor has is tried again."""
_MAX_TRIES = 12
_TASKS_PER_POST = 50
"""Tasks that post once a second; more of them post less often, so that the driver's work stays the same."""


@dataclass
class _Task:
    """A task that the engine has."""

    group: list[RunSpec]
    files: dict[str, ShippedFile]
    """What it may ask for, by sha256."""
    shared: bool
    """Whether it works in the store itself, with leases of its own."""
    leases: list[Lease]
    exits: ExitStack
    """Releases the leases."""
    host: str = ""
    """Where it runs; empty until it starts."""
    pid: int = 0
    node: str = ""
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
        self.device = device_type(engine.needed.gpus > 0)
        """What step times are measured on, for runs under length=time."""
        self.runs: list[RunSpec] = []
        self.tasks: dict[str, _Task] = {}
        self.deaths: dict[str, int] = {}
        self.abandoned: set[str] = set()
        """Runs that are not started again by this execution."""
        self.shared = False
        self.nonce = owned_name(_NONCE)
        self.leases = LeaseManager()
        self.awaited: set[str] = set()
        self._count = 0
        self._lost: frozenset[str] = frozenset()
        """Tasks that ended without an end of their own; a node that counts as dead may still be at work."""
        self._started = False
        self._blocked = False
        """Whether the store cannot be written."""
        self._offers: dict[str, Any] = {}
        """New offers, by sha256."""
        self._offered: set[str] = set()
        self._asked = 0.0
        """When the tasks were asked to stop, or sent files after that."""
        self._without_nodes = 0.0
        """Since when no node is left."""
        self._later: dict[str, float] = {}
        """Runs that are not tried again before a time of `time.monotonic`."""
        self._tries: dict[str, int] = {}
        """How often a run came back without a result although nothing failed."""
        self._avoided = False

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
            self._exchange()  # the first task may post before the next exchange, and needs the time limit
            try:
                while waiting or self.tasks:
                    if self._ending():
                        waiting = []
                        self._cancel_queued()
                        if self._overdue(say):
                            return
                    if self._without_a_node(waiting, say):
                        return
                    waiting = self._step(waiting, handle, say)
            finally:
                for task in self.tasks.values():
                    task.exits.close()

    def _step(
        self, waiting: list[list[RunSpec]], handle: Callable[[Event], None], say: Callable[[str], None]
    ) -> list[list[RunSpec]]:
        """Start what can start, and handle what has happened; return the groups that wait."""
        try:
            waiting = self._start(waiting, handle)
        except OSError as error:
            self._block(error, waiting[0][0].id, handle)
        # A task sends its last post before it ends, so posts are taken after the ends are known.
        ends = self.engine.ended(_POLL_SECONDS)
        for post in self._exchange():
            try:
                self._receive(post, handle)
            except OSError as error:
                self._block(error, self.tasks[post.task].group[0].id, handle)
            except UserError as error:
                self._give_up(post.task, str(error), say)
        for end in ends:
            waiting += self._end(end, handle, say)
        return waiting

    def stop(self) -> None:
        """Nothing to do: the loop of `events` asks `Stop` several times a second and tells the tasks."""

    @contextmanager
    def _nonce(self) -> Iterator[None]:
        """Keep a file of an unguessable name in the store, for nodes to look for."""
        remove_abandoned(self.store.path, _NONCE)
        path = self.store.path / self.nonce
        path.touch()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def _ending(self) -> bool:
        """Return whether no further task is started: at a request, or at the time limit.

        Every start of a study makes progress, so the limit waits for the first task, but not for long.
        """
        patient = not self._started and time.monotonic() < self.limit.deadline + _PATIENCE_SECONDS
        return self._requested() or (self.limit.late and not patient)

    def _requested(self) -> bool:
        return self._blocked or self.limit.requested()

    def _block(self, error: OSError, run: str, handle: Callable[[Event], None]) -> None:
        """Report that the store cannot be written, and end."""
        message = f"cannot write to {error.filename or self.store.path}: {error.strerror}"
        handle(Event("deferred", run, message=message))
        self._blocked = True

    def _give_up(self, name: str, message: str, say: Callable[[str], None]) -> None:
        """Stop a task whose files cannot be used."""
        say(message)
        task = self.tasks.pop(name)
        task.exits.close()
        self._lost |= {name}
        self.abandoned |= {run.id for run in task.group}

    def _overdue(self, say: Callable[[str], None]) -> bool:
        """Return whether tasks that were asked to stop have been silent for a long time; they are ended then."""
        self._asked = self._asked or time.monotonic()
        if time.monotonic() - self._asked < _EXIT_SECONDS:
            return False
        hosts = sorted({task.host or "a queue" for task in self.tasks.values()})
        say(
            f"{len(self.tasks)} tasks on {', '.join(hosts)} did not stop within {_EXIT_SECONDS:g} s and are ended"
        )
        return True

    def _without_a_node(self, waiting: list[list[RunSpec]], say: Callable[[str], None]) -> bool:
        """Say that no node is left for the queued tasks, once; return True if all nodes are unfit."""
        busy = any(task.host for task in self.tasks.values())
        if busy or any(node.slots(self.engine.needed) for node in self.engine.nodes()):
            self._without_nodes = 0.0
            return False
        if self._avoided:
            say("no node is left that can run this study")
            self.abandoned |= {run.id for group in waiting for run in group}
            return True
        self._without_nodes = self._without_nodes or time.monotonic()
        if time.monotonic() - self._without_nodes > _PATIENCE_SECONDS:
            self._without_nodes = math.inf
            say(f"no node with {self.engine.needed} is left; waiting for one to join the cluster")
        return False

    def _cancel_queued(self) -> None:
        for name, task in self.tasks.items():
            if not task.host:
                self.engine.cancel(name)

    def _start(self, waiting: list[list[RunSpec]], handle: Callable[[Event], None]) -> list[list[RunSpec]]:
        """Start the groups that can start now; return the others."""
        # Some more tasks than fit are queued in the engine: a node that becomes free has one at once, and a cluster
        # that grows on demand sees the demand.
        slots = sum(node.slots(self.engine.needed) for node in self.engine.nodes())
        room = slots + max(2, slots // 4) - len(self.tasks)
        rest: list[list[RunSpec]] = []
        unfinished = {run.id for group in waiting for run in group}
        unfinished |= {run.id for task in self.tasks.values() for run in task.group}
        now = time.monotonic()
        for group in waiting:
            if room <= 0 or self._later.get(group[0].id, 0.0) > now:
                rest.append(group)
                continue
            left = [run for run in group if not is_done(self.store.run(run.id), self._wanted(run))]
            lacking = [run for run in left if run.parent and run.parent.run in self.abandoned]
            self.abandoned |= {run.id for run in lacking}
            left = [run for run in left if run.id not in self.abandoned]
            if not left:
                continue
            if any(run.parent and run.parent.run in unfinished and not self._ready(run) for run in left):
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
        leases: list[Lease] = []
        exits = ExitStack()
        for run in group if not self.shared else ():
            lease = exits.enter_context(self.leases.acquire(self.store.run(run.id).path))
            if lease is None:
                exits.close()
                self._report_owner(run, handle)
                return False
            leases.append(lease)
        self._count += 1
        name = f"{group[0].id}-{self._count}"
        state, trunks = ((), {}) if self.shared else run_state(self.store, group)
        files = {file.sha256: file for file in (*self.inputs.files, *state)}
        self.tasks[name] = _Task(group, files, self.shared, leases, exits)
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
                trunks=trunks,
                device=self.device if group[0].length.startswith("time") else "",
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
        if self.limit.late and self._started:
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
        if any(lease.lost() for lease in task.leases):
            raise UserError(
                f"{_names(task.group)}: another process took over, because this one did not update its lock for a minute"
            )
        if post.host:
            task.host, task.pid, task.node = post.host, post.pid, post.node
            self._started = True
        if post.changes and self._asked:
            self._asked = time.monotonic()
        for sha256 in post.wanted:
            if sha256 in task.files and sha256 not in self._offered:
                self._offered.add(sha256)
                self._offers[sha256] = self.engine.offer(Path(task.files[sha256].path))
        known = {run.id for run in task.group}
        for changes in post.changes:
            if changes.run in known and not task.shared:
                apply_changes(self.store.run(changes.run), changes)
        for event in post.events:
            if event.run not in known:
                continue
            if event.kind == "started":
                task.running.append(event.run)
            elif event.kind == "ended":
                task.running = [run for run in task.running if run != event.run]
                if event.state not in UNFINISHED:
                    self._drop_checkpoints(event.run)
                elif event.state != "stopped" or self._ending():
                    self.abandoned.add(event.run)
            handle(event)

    def _drop_checkpoints(self, run: str) -> None:
        """Delete the checkpoints of the trunk of a branch that has ended, if it was the last one."""
        trunks = {one.parent.run for one in self.runs if one.id == run and one.parent}
        if trunks:
            drop_checkpoints(
                self.store, [one for one in self.runs if one.parent and one.parent.run in trunks]
            )

    def _end(
        self, end: TaskEnd, handle: Callable[[Event], None], say: Callable[[str], None]
    ) -> list[list[RunSpec]]:
        """Handle the end of a task; return its group if it has to be started again."""
        task = self.tasks.pop(end.task, None)
        if task is None:
            return []
        task.exits.close()
        group = [run for run in task.group if run.id not in self.abandoned]
        if end.how in ("node lost", "process died"):
            self._lost |= {end.task}
            self._release(task)
        if not group:
            return []
        if end.how == "raised":
            say(end.message)
            self.abandoned |= {run.id for run in group}
        elif end.how == "unfit":
            say(f"{end.message}; the node gets no further run")
            self.engine.avoid(task.node or end.node)
            self._avoided = True
        elif end.how == "unshared":
            self.shared = False
        elif end.how == "held":
            self._later |= dict.fromkeys((run.id for run in group), time.monotonic() + _HELD_SECONDS)
            self._report_owner(group[0], handle)
        elif end.how == "node lost":
            say(f"node {task.host or 'unknown'} was lost; {_names(group)} will continue elsewhere")
        elif end.how == "process died":
            self._count_death(task, group, end.message, say)
        elif end.how == "returned":
            self._count_try(task, group, say)
        return [group] if not self._ending() else []

    def _count_try(self, task: _Task, group: list[RunSpec], say: Callable[[str], None]) -> None:
        """Try runs again that a task left without a result, some times.

        It may have stopped because it could not reach the driver for a while, and a file system that is shared over
        a network may show a result only after a minute.
        """
        for run in group:
            if is_done(self.store.run(run.id), self._wanted(run)) or self._ending():
                continue
            count = self._tries[run.id] = self._tries.get(run.id, 0) + 1
            self._later[run.id] = time.monotonic() + count
            if count == _MAX_TRIES:
                say(f"{_names([run])}: {count} tasks ended without a result, the last on {task.host}")
                self.abandoned.add(run.id)

    def _release(self, task: _Task) -> None:
        """Remove the locks that a dead process of another host left in the shared store.

        Others may take them over only after a minute. A process that runs on although its node counts as lost finds
        its lock gone within 40 seconds and ends.
        """
        for run in task.group if task.shared else ():
            lock = self.store.run(run.id).path / "lock"
            owner = owner_of(lock) if lock.is_file() else None
            if owner is not None and (owner.host.partition("?")[0], owner.pid) == (task.host, task.pid):
                lock.unlink(missing_ok=True)

    def _count_death(self, task: _Task, group: list[RunSpec], how: str, say: Callable[[str], None]) -> None:
        """Count the death of a process against the run that started last, and record that as failed the second time."""
        say(f"a process on {task.host or 'the cluster'} {how}")
        run = task.running[-1] if task.running else group[0].id
        count = self.deaths[run] = self.deaths.get(run, 0) + 1
        if count >= MAX_DEATHS and task.running and (failed := record_death(self.store.run(run), how)):
            say(failed)
        elif count >= MAX_DEATHS:  # it died before it had started a run, or the run is held elsewhere
            self.abandoned |= {one.id for one in group}


def _names(group: Sequence[RunSpec]) -> str:
    first = f"{group[0].label}, seed {group[0].seed}"
    return first if len(group) == 1 else f"{first} and {len(group) - 1} more runs"
