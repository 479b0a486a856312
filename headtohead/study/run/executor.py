"""Executors run the unfinished runs of a plan: in this process, or in one process per core.

An executor takes runs (`submit`), reports what happens to them (`events`) and can be asked to `stop`; another engine
that does the same can take its place.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from headtohead.common.errors import UnreadableFile
from headtohead.common.files import open_regular, open_to_append
from headtohead.common.stop import Stop
from headtohead.common.worker_process import WorkerProcess
from headtohead.study.environment import alone_with
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import LayerTable
from headtohead.study.run.claim_loop import ClaimLoop
from headtohead.study.run.compile_ahead import CompileAhead
from headtohead.study.run.deaths import MAX_DEATHS, record_death
from headtohead.study.run.events import Event
from headtohead.study.run.worker import Order
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store

Handler = Callable[[Event], None]
_LOG_BYTES = 2**16


class Executor(Protocol):
    """Runs a list of runs."""

    def submit(self, runs: Sequence[RunSpec]) -> None:
        """Take runs to execute."""
        ...

    def events(self, handle: Handler, say: Callable[[str], None]) -> None:
        """Execute until every run has ended or the executor has stopped.

        `handle` receives every event, and `say` messages about the executor itself, such as a worker that died.
        """
        ...

    def stop(self) -> None:
        """Ask for an early end, which saves all work; may be called from a signal handler."""
        ...


class InProcess:
    """Runs everything in this process, one run or population after another."""

    def __init__(
        self,
        store: Store,
        execution: ExecutionSettings,
        layers: LayerTable,
        *,
        probes: tuple[str, ...] = (),
        stop: Stop,
    ) -> None:
        self.store, self.execution, self.layers = store, execution, layers
        self.probes, self.limit = probes, stop
        self.runs: list[RunSpec] = []

    def submit(self, runs: Sequence[RunSpec]) -> None:
        """Take runs to execute."""
        self.runs += runs

    def events(self, handle: Handler, say: Callable[[str], None]) -> None:
        """Execute the runs."""
        ahead = CompileAhead(self.store, self.execution)
        try:
            ClaimLoop(
                self.store,
                self.runs,
                self.execution,
                self.limit,
                handle,
                probes=self.probes,
                layers=self.layers,
                ahead=ahead,
            ).work()
        finally:
            ahead.close()

    def stop(self) -> None:
        """Nothing to do: the claim loop asks `Stop` after every step."""


class WorkerPool:
    """Worker processes on this host, distributed over its devices.

    A dead worker is replaced on the same device; a run that kills its worker twice has failed.
    """

    def __init__(
        self,
        store: Store,
        execution: ExecutionSettings,
        count: int,
        *,
        probes: tuple[str, ...] = (),
        stop: Stop,
    ) -> None:
        self.store, self.execution, self.count = store, execution, count
        self.probes, self.limit = probes, stop
        self.queue: queue.Queue[tuple[WorkerProcess, Event]] = queue.Queue()
        self.workers: list[_Worker] = []
        self.deaths: dict[str, int] = {}
        self.runs: list[RunSpec] = []

    def submit(self, runs: Sequence[RunSpec]) -> None:
        """Take runs to execute; each worker goes through all of them and leases what is free."""
        self.runs += runs

    def events(self, handle: Handler, say: Callable[[str], None]) -> None:
        """Start the workers and pass on their events until all have ended."""
        self.workers = [self._spawn(index) for index in range(min(self.count, len(self.runs)))]
        try:
            while self.workers or not self.queue.empty():
                if self.limit.requested():  # workers watch the time limit themselves
                    self.stop()
                try:
                    process, event = self.queue.get(timeout=0.2)
                except queue.Empty:
                    self._reap(say)
                    continue
                worker = next((one for one in self.workers if one.process is process), None)
                if worker and event.kind not in ("warning", "waiting"):
                    worker.run = "" if event.kind in ("ended", "deferred") else event.run
                if event.kind != "waiting" or event.pid not in {one.pid for one in self.workers}:
                    handle(event)
        finally:
            self.stop()
            for worker in self.workers:
                worker.wait()

    def stop(self) -> None:
        """Ask every worker to save a checkpoint and exit."""
        for worker in self.workers:
            worker.process.ask_to_stop()

    def _spawn(self, index: int) -> _Worker:
        left = self.limit.seconds_left
        devices = self.execution.devices or (self.execution.device,)
        device, environment = alone_with(devices[index % len(devices)])
        order = Order(
            store=str(self.store.path.resolve()),
            execution=dataclasses.replace(self.execution, device=device),
            runs=[run.as_dict() for run in self.runs],
            probes=self.probes,
            seconds=None if left == float("inf") else left,
        )
        return _Worker(index, self.store, order, self.queue, environment)

    def _reap(self, say: Callable[[str], None]) -> None:
        """Remove workers that have ended, and replace those that died."""
        ending = self.limit.requested() or self.limit.late
        ended = [worker for worker in self.workers if not worker.process.alive]
        if not self.queue.empty():  # with the last events of those that ended just now
            return
        for worker in ended:
            self.workers.remove(worker)
            how = worker.wait() or ("ended with code 0 in the middle of a run" if worker.run else "")
            if not how:
                continue
            count = self.deaths[worker.run] = self.deaths.get(worker.run, 0) + 1
            say(f"a worker {how}" + (f" (see {worker.log})" if worker.log.is_file() else ""))
            if (
                worker.run
                and count >= MAX_DEATHS
                and (failed := record_death(self.store.run(worker.run), how))
            ):
                say(failed)
            if not ending and (worker.run or count < MAX_DEATHS):
                self.workers.append(self._spawn(worker.index))


class _Worker:
    """A worker of a study and its log."""

    def __init__(
        self,
        index: int,
        store: Store,
        order: Order,
        events: queue.Queue[tuple[WorkerProcess, Event]],
        environment: Mapping[str, str],
    ) -> None:
        # Several executors, also on several hosts, may write logs of one study.
        name = f"worker-{socket.gethostname()}-{os.getpid()}-{index + 1}.log".replace("/", "_")
        self.index, self.log = index, store.path / "logs" / name
        self.run = ""
        """The run it is training; empty while the run cannot be continued here."""
        with open_to_append(store.path, "logs", name) as stream:
            self.process = WorkerProcess(
                "headtohead.study.run.worker",
                order,
                Event,
                events,
                log=stream,
                threads=order.execution.threads,
                environment=environment,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.process.pid

    def wait(self) -> str:
        """Wait until it exits; return how it died with the last line of its log, or an empty string."""
        how = self.process.wait()
        lines = _end_of(self.log).strip().splitlines()
        if not lines:
            self.log.unlink(missing_ok=True)
        return f"{how}: {lines[-1]}" if how and lines else how


def _end_of(log: Path) -> str:
    """Return the last 64 KiB of a log, or an empty string if it cannot be read."""
    try:
        with open_regular(log) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _LOG_BYTES))
            return stream.read(_LOG_BYTES).decode("utf-8", "replace")
    except (OSError, UnreadableFile):
        return ""
