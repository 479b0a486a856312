"""Execute the unfinished runs of a plan, in this process or in one process per core."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtohead.common.errors import UnreadableFile
from headtohead.common.files import open_regular, open_to_append
from headtohead.common.numbers import short_count
from headtohead.common.progress import Display
from headtohead.common.stop import Stop
from headtohead.study.plan.branches import drop_checkpoints
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.run_spec import Run
from headtohead.study.run.claim_loop import Job, is_done, work
from headtohead.study.store.lease import LeaseManager
from headtohead.study.store.manifest import metric_label
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import RunDirectory, Store

_LOG_BYTES = 2**16
_DEADLY = 2
"""A run has failed after its worker has died this many times."""


@dataclass
class Summary:
    """How one execution of a study ended."""

    done: int = 0
    """Runs finished in this execution."""
    left: int = 0
    """Runs without a result; after a stop also those that lack a requested probe."""
    stopped: bool = False
    """Whether a stop was requested."""
    trouble: list[str] = field(default_factory=list)
    """Error messages."""


def execute(
    store: Store,
    runs: list[Run],
    execution: ExecutionSettings,
    display: Display,
    *,
    probes: tuple[str, ...] = (),
    workers: int = 1,
    seconds: float = math.inf,
) -> Summary:
    """Execute every run that has no result and take missing probes; stop cleanly on Ctrl-C or after `seconds`."""

    def done(run: Run, probes: tuple[str, ...]) -> bool:
        return is_done(store.run(run.id), () if run.branches else probes)

    pending = [run for run in runs if not done(run, probes)]
    # A trunk whose branches are all done is no longer needed.
    wanted = {run.parent.run for run in pending if run.parent}
    pending = [run for run in pending if not run.branches or run.id in wanted]
    display.begin(len(runs), len(runs) - len(pending), float(sum(run.tokens for run in pending)))
    summary = Summary()
    stop = Stop.after(seconds, lambda: summary.stopped)
    try:
        with _interruptible(summary):
            together = workers > 1 and len(pending) > 1 and all(run.arm.layout.portable for run in pending)
            if together:
                pool = _WorkerPool(store, pending, execution, min(workers, len(pending)), probes, stop)
                _in_workers(store, pending, pool, display, stop, summary)
            else:
                _in_process(store, pending, execution, display, stop, summary, probes)
    finally:
        display.end()
    store.check_present()
    # Repeated here in case a process was killed between a branch's result and this call.
    drop_checkpoints(store, [(run.id, run.parent) for run in runs if run.parent])
    summary.stopped = summary.stopped or (stop.late and not all(done(run, probes) for run in pending))
    summary.left = sum(not done(run, probes if summary.stopped else ()) for run in pending)
    return summary


@contextmanager
def _interruptible(summary: Summary) -> Iterator[None]:
    """Turn the first Ctrl-C (or SIGTERM) into a clean stop; the second one interrupts immediately."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: Any) -> None:
        if summary.stopped:
            raise KeyboardInterrupt
        summary.stopped = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _in_process(
    store: Store,
    runs: list[Run],
    execution: ExecutionSettings,
    display: Display,
    stop: Stop,
    summary: Summary,
    probes: tuple[str, ...],
) -> None:
    by_id = {run.id: run for run in runs}

    def emit(event: dict[str, Any]) -> None:
        _take(summary, display, store, by_id[event["run"]], event)

    jobs = [Job(run.record(), run.layers, probes) for run in runs]
    work(store, jobs, execution, stop, emit)


def _in_workers(
    store: Store,
    runs: list[Run],
    pool: _WorkerPool,
    display: Display,
    stop: Stop,
    summary: Summary,
) -> None:
    by_id = {run.id: run for run in runs}
    try:
        while pool.busy:
            if summary.stopped:  # workers watch the time limit themselves
                pool.ask_to_stop()
            event = pool.next_event()
            if event is None:
                for message in pool.reap(replace=not (summary.stopped or stop.late)):
                    summary.trouble.append(message)
                    display.note(message)
            elif event["kind"] != "waiting" or event["pid"] not in pool.pids:
                _take(summary, display, store, by_id[event["run"]], event)
    finally:
        pool.ask_to_stop()
        pool.wait()


class _WorkerPool:
    """The workers of one executor. A dead worker is replaced; a run that kills its worker twice has failed."""

    def __init__(
        self,
        store: Store,
        runs: list[Run],
        execution: ExecutionSettings,
        count: int,
        probes: tuple[str, ...],
        stop: Stop,
    ) -> None:
        self.store, self.stop = store, stop
        self.events: queue.Queue[tuple[_Worker, dict[str, Any]]] = queue.Queue()
        self.order = {
            "store": str(store.path.resolve()),
            "conditions": dataclasses.asdict(execution),
            "records": [run.record() for run in runs],
            "probes": probes,
        }
        self.threads = execution.threads
        self.deaths: dict[str, int] = {}
        self.workers = [self._spawn(index) for index in range(count)]

    def _spawn(self, index: int) -> _Worker:
        order = json.dumps(self.order | {"seconds": self.stop.seconds_left})
        return _Worker(index, self.store, order, self.threads, self.events)

    @property
    def busy(self) -> bool:
        """Whether a worker is alive or an event is unread."""
        return bool(self.workers) or not self.events.empty()

    @property
    def pids(self) -> set[int]:
        """The process ids of the workers."""
        return {worker.process.pid for worker in self.workers}

    def next_event(self) -> dict[str, Any] | None:
        """Return the next event of a worker, or None if there is none within 0.2 s."""
        try:
            worker, event = self.events.get(timeout=0.2)
        except queue.Empty:
            return None
        if event["kind"] in ("started", "ended"):
            worker.run = event["run"] if event["kind"] == "started" else ""
        return event

    def reap(self, replace: bool) -> list[str]:
        """Remove workers that have ended, replace those that died, and return a message about each death."""
        notes = []
        for worker in [worker for worker in self.workers if not worker.alive]:
            self.workers.remove(worker)
            if not (how := worker.wait()):
                continue
            count = self.deaths[worker.run] = self.deaths.get(worker.run, 0) + 1
            notes.append(f"a worker {how}" + (f" (see {worker.log})" if worker.log.is_file() else ""))
            if worker.run and count == _DEADLY:
                notes.append(self._record_death(worker, how))
            if replace and (worker.run or count < _DEADLY):
                self.workers.append(self._spawn(worker.index))
        return notes

    def _record_death(self, worker: _Worker, how: str) -> str:
        run = self.store.run(worker.run)
        message = f"its process {how.partition(':')[0]} ({_DEADLY} times)"
        with LeaseManager().acquire(run.path) as lease:
            if lease is not None and not run.finished():
                run.finish(RunResult(status="failed", error=message))
        return f"run {run.id} is recorded as failed: {message}; run it again with --retry failed"

    def ask_to_stop(self) -> None:
        """Ask every worker to save a checkpoint and exit."""
        for worker in self.workers:
            worker.ask_to_stop()

    def wait(self) -> None:
        """Wait until all workers have exited."""
        for worker in self.workers:
            worker.wait()


def _worker_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a worker's C libraries."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # By default glibc returns large blocks to the system and takes them again at every step, with a page fault
        # per 4 KiB. Keeping them makes training 4 to 7 % faster.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_TOP_PAD_": str(2**24),
    }


def _end_of(log: Path) -> str:
    """Return the last 64 KiB of a log, or an empty string if it cannot be read."""
    try:
        with open_regular(log) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _LOG_BYTES))
            return stream.read(_LOG_BYTES).decode("utf-8", "replace")
    except (OSError, UnreadableFile):
        return ""


class _Worker:
    """One worker process and the thread that reads its events."""

    def __init__(
        self,
        index: int,
        store: Store,
        order: str,
        threads: int,
        events: queue.Queue[tuple[_Worker, dict[str, Any]]],
    ) -> None:
        # Several executors, also on several hosts, may write logs of one study.
        name = f"worker-{socket.gethostname()}-{os.getpid()}-{index + 1}.log".replace("/", "_")
        self.index, self.log = index, store.path / "logs" / name
        self.run = ""
        """The run it is training."""
        self.asked = False
        with open_to_append(store.path, "logs", name) as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headtohead.study.run.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                start_new_session=True,
                env=os.environ | _worker_environment(threads),
            )
        assert self.process.stdin is not None
        with suppress(OSError):  # it died immediately; its log says why
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()
        self.listener = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self.listener.start()

    @property
    def alive(self) -> bool:
        """Whether it can still send events."""
        return self.listener.is_alive()

    def ask_to_stop(self) -> None:
        """Close its input: it saves a checkpoint and exits."""
        if not self.asked and self.process.stdin is not None:
            self.asked = True
            with suppress(OSError):
                self.process.stdin.close()

    def wait(self) -> str:
        """Wait until it exits; return how it died, or an empty string."""
        try:
            code = self.process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        lines = _end_of(self.log).strip().splitlines()
        if not lines:
            self.log.unlink(missing_ok=True)
        if code == 0:
            return ""
        last = f": {lines[-1]}" if lines else ""
        if code == -signal.SIGKILL:
            return f"was killed (signal 9), often because memory ran out{last}"
        return (f"was killed (signal {-code})" if code < 0 else f"ended with code {code}") + last

    def _listen(self, events: queue.Queue[tuple[_Worker, dict[str, Any]]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "kind" in event and "run" in event:
                events.put((self, event))


def _take(summary: Summary, display: Display, store: Store, run: Run, event: dict[str, Any]) -> None:
    """Count and display an event of a run."""
    kind = event["kind"]
    branch = f"{run.contest.branch} tokens, " if run.parent else ""
    task = f"{run.contest.corpus_label}, " if run.dataset and run.dataset.task else ""
    name = f"{run.arm.label}, {task}{branch}seed {run.seed}"
    if kind in ("step", "compiling", "scoring") and not display.shows(run.id):
        return  # two workers had the run, because its lock was deleted, and the other one has ended it
    if kind == "started":
        steps = run.steps
        display.started(run.id, name, steps, float(run.tokens))
    elif kind == "step":
        display.stepped(run.id, event["step"], event["nats"], event["rate"])
    elif kind == "compiling":
        display.compiling(run.id)
    elif kind == "scoring":
        display.scoring(run.id, event["share"])
    elif kind == "warning":
        display.note(f"{name}: {event['message']}")
    elif kind == "deferred":
        if event["message"] not in summary.trouble:
            summary.trouble.append(event["message"])
            display.note(f"{name}: {event['message']}")
    elif kind == "waiting":
        display.note(f"waiting for {name}, which {event['owner']} is running")
    elif kind == "ended" and event["state"] not in ("stopped", "deferred", "blocked"):
        summary.done += 1
        display.ended(run.id, _outcome(store.run(run.id)))


def _outcome(folder: RunDirectory) -> str:
    result = folder.result()
    if result is None:
        return "unknown: "
    if result.tested is not None:
        speed = folder.costs().tokens_per_second
        rate = f", {short_count(speed)} tokens/s" if isinstance(speed, float) else ""
        metric = result.tested.metric
        return f"{result.tested.values[metric]:.4f} {metric_label(metric)}{rate}"
    if result.status == "diverged":
        return f"diverged at step {result.diverged_at}; recorded as a result"
    return f"{result.status}: {result.error or ''}"
