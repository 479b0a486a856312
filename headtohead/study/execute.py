"""Does the runs of a plan that are not done yet: in this process, or in one process per core."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from headtohead.common.numbers import short_count
from headtohead.common.progress import Display
from headtohead.study.perform import Conditions, perform
from headtohead.study.plan import Run
from headtohead.study.store import RunDirectory, Store


@dataclass
class Summary:
    """How a stretch of work on a study ended."""

    done: int = 0
    """Runs finished in this stretch."""
    left: int = 0
    """Runs without a result."""
    stopped: bool = False
    """Whether it was asked to stop."""
    trouble: list[str] = field(default_factory=list)


def execute(
    store: Store,
    runs: list[Run],
    conditions: Conditions,
    display: Display,
    *,
    workers: int = 1,
    seconds: float = math.inf,
) -> Summary:
    """Do every run that has no result; stop cleanly on Ctrl-C or after `seconds`."""
    pending = [run for run in runs if store.run(run.id).result() is None]
    display.begin(len(runs), len(runs) - len(pending), float(sum(run.training.tokens for run in pending)))
    summary = Summary()
    deadline = time.monotonic() + seconds
    try:
        with _interruptible(summary):
            stop: Callable[[], bool] = lambda: summary.stopped or _reached(deadline, summary)  # noqa: E731
            together = workers > 1 and len(pending) > 1 and all(run.arm.layout.portable for run in pending)
            if together:
                _in_workers(store, pending, conditions, display, min(workers, len(pending)), stop, summary)
            else:
                _in_process(store, pending, conditions, display, stop, summary)
    finally:
        display.end()
    summary.left = sum(store.run(run.id).result() is None for run in runs)
    return summary


def _reached(deadline: float, summary: Summary) -> bool:
    if time.monotonic() >= deadline:
        summary.stopped = True
    return summary.stopped


@contextmanager
def _interruptible(summary: Summary) -> Iterator[None]:
    """Turn the first Ctrl-C (or a polite kill) into a clean stop; the second one is obeyed at once."""
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
    conditions: Conditions,
    display: Display,
    stop: Callable[[], bool],
    summary: Summary,
) -> None:
    for run in runs:
        if stop():
            return
        folder, record = store.run(run.id), run.record()
        folder.open(record)
        with folder.claimed() as mine:
            if not mine or folder.result() is not None:
                continue
            _show(display, run, {"kind": "started", "run": run.id}, folder)

            def tell(event: dict[str, Any], run: Run = run, folder: RunDirectory = folder) -> None:
                _show(display, run, event, folder)

            state = perform(folder, record, conditions, layers=list(run.layers), stop=stop, tell=tell)
            if state != "stopped":
                summary.done += 1
                _show(display, run, {"kind": "ended", "run": run.id, "state": state}, folder)


def _in_workers(
    store: Store,
    runs: list[Run],
    conditions: Conditions,
    display: Display,
    workers: int,
    stop: Callable[[], bool],
    summary: Summary,
) -> None:
    by_id = {run.id: run for run in runs}
    events: queue.Queue[dict[str, Any]] = queue.Queue()
    order = {
        "store": str(store.path.resolve()),
        "conditions": dataclasses.asdict(conditions),
        "records": [run.record() for run in runs],
    }
    (store.path / "logs").mkdir(exist_ok=True)
    crew = [_Worker(place, store, json.dumps(order), conditions.threads, events) for place in range(workers)]
    try:
        while any(worker.alive for worker in crew) or not events.empty():
            if stop():
                for worker in crew:
                    worker.ask_to_stop()
            try:
                event = events.get(timeout=0.2)
            except queue.Empty:
                continue
            if event["kind"] == "ended" and event["state"] != "stopped":
                summary.done += 1
            run = by_id[event["run"]]
            _show(display, run, event, store.run(run.id))
    finally:
        for worker in crew:
            worker.ask_to_stop()
        for worker in crew:
            if words := worker.wait():
                summary.trouble.append(words)
                display.note(words)


def _worker_environment(threads: int) -> dict[str, str]:
    """Return what a worker's C libraries are told before they start."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # glibc gives large blocks back to the system and takes them again at every step, a page fault per 4 KiB:
        # keeping them makes training 4 to 7 % faster.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_TOP_PAD_": str(2**24),
    }


class _Worker:
    """One worker process and the thread that listens to it."""

    def __init__(
        self, place: int, store: Store, order: str, threads: int, events: queue.Queue[dict[str, Any]]
    ) -> None:
        self.log = store.path / "logs" / f"worker-{place + 1}.log"
        self.asked = False
        with open(self.log, "wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headtohead.study.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                start_new_session=True,
                env=os.environ | _worker_environment(threads),
            )
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        self.listener = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self.listener.start()

    @property
    def alive(self) -> bool:
        """Whether it still has something to say."""
        return self.listener.is_alive()

    def ask_to_stop(self) -> None:
        """Close its input: it saves a checkpoint and ends."""
        if not self.asked and self.process.stdin is not None:
            self.asked = True
            with suppress(OSError):
                self.process.stdin.close()

    def wait(self) -> str:
        """Wait for its end; return what went wrong in words, or nothing."""
        try:
            code = self.process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code == 0:
            return ""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        how = f"was killed (signal {-code})" if code < 0 else f"ended with code {code}"
        return f"a worker {how}: {lines[-1] if lines else 'no message'} (see {self.log})"

    def _listen(self, events: queue.Queue[dict[str, Any]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(event, dict) and "kind" in event and "run" in event:
                events.put(event)


def _show(display: Display, run: Run, event: dict[str, Any], folder: RunDirectory) -> None:
    kind = event["kind"]
    if kind == "started":
        steps = run.training.steps(run.size.context)
        display.started(run.id, f"{run.arm.label}, seed {run.seed}", steps, float(run.training.tokens))
    elif kind == "step":
        display.stepped(run.id, event["step"], event["nats"], event["rate"])
    elif kind == "scoring":
        display.scoring(run.id, event["share"])
    elif kind == "warning":
        display.note(f"{run.arm.label}, seed {run.seed}: {event['words']}")
    elif kind == "ended" and event["state"] != "stopped":
        display.ended(run.id, _outcome(folder))


def _outcome(folder: RunDirectory) -> str:
    result = folder.result() or {}
    if result.get("status") == "done":
        rate = ""
        if (folder.path / "cost.json").is_file():
            cost = json.loads((folder.path / "cost.json").read_text())
            rate = f", {short_count(cost['tokens_per_second'])} tokens/s"
        return f"{result['test']['bits_per_byte']:.4f} bits per byte{rate}"
    if result.get("status") == "diverged":
        return f"diverged at step {result.get('diverged_at')}; recorded as a result"
    return f"{result.get('status', 'unknown')}: {result.get('error', '')}"
