"""Worker processes that compile slices in parallel, then measure them one at a time on the device."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from headtohead.bench.compile_cache import compile_threads
from headtohead.bench.slice import Slice

Progress = Callable[[str, float], None]
_MEMORY = "out of memory"


class TimeLimitReached(Exception):
    """The time limit is reached."""


class InProcess:
    """Measures in this process, without compilation."""

    def warm(self, slices: Sequence[Slice], progress: Progress) -> None:
        """Do nothing; eager steps are not compiled."""

    def measure(self, one: Slice) -> dict[str, Any]:
        """Return the measurements of a slice."""
        return one.measure()

    def close(self) -> None:
        """Do nothing; no process is open."""


class WorkerPool:
    """Up to `most` processes; a slice is measured by the process that compiled it."""

    def __init__(self, most: int, deadline: float) -> None:
        self.most, self.deadline = most, deadline
        self.answers: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
        self.workers: list[_Worker] = []
        self.owners: dict[Slice, _Worker] = {}
        self.failed: dict[Slice, str] = {}

    def warm(self, slices: Sequence[Slice], progress: Progress) -> None:
        """Compile every slice; slices with the same graph go to the same process."""
        units: dict[Slice, list[Slice]] = {}
        for one in slices:
            units.setdefault(one.graph, []).append(one)
        waiting, count = list(units.values()), len(units)
        side = min(self.most, count)
        self.workers = [_Worker(self.answers, compile_threads(side)) for _ in range(side)]
        idle, busy = list(self.workers), dict[_Worker, list[Slice]]()
        while busy or (waiting and idle):
            while waiting and idle:
                worker, unit = idle.pop(), waiting.pop(0)
                busy[worker] = unit
                self.owners |= dict.fromkeys(unit, worker)
                worker.emit("warm", unit)
            worker, answer = self._receive(
                lambda: progress(
                    f"compiling in parallel, {count - len(waiting) - len(busy)} of {count} done", 0
                )
            )
            unit = busy.pop(worker, [])
            if answer is None:
                idle = [one for one in idle if one is not worker]
                self.failed |= dict.fromkeys(
                    unit, f"worker process ended during compilation ({worker.end()})"
                )
                continue
            idle.append(worker)
            # Out of memory is not final: many processes hold memory now; later each slice has the device alone.
            errors = zip(unit, answer["errors"], strict=True)
            self.failed |= {one: error for one, error in errors if error and error != _MEMORY}
        self.failed |= dict.fromkeys((one for unit in waiting for one in unit), "no worker process was left")

    def measure(self, one: Slice) -> dict[str, Any]:
        """Return the measurements of a slice by the process that compiled it, or an error."""
        if one in self.failed:
            return {"error": self.failed[one]}
        owner = self.owners[one]
        if owner.ended:
            return {"error": f"worker process ended earlier ({owner.end()})"}
        owner.emit("measure", [one])
        while True:
            worker, answer = self._receive(lambda: None)
            if worker is owner:
                break
        return {"error": f"worker process ended ({owner.end()})"} if answer is None else answer

    def close(self) -> None:
        """Kill all worker processes."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()

    def _receive(self, meanwhile: Callable[[], None]) -> tuple[_Worker, dict[str, Any] | None]:
        """Return the next answer; None means the process ended."""
        while True:
            meanwhile()
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeLimitReached
            with suppress(queue.Empty):
                worker, answer = self.answers.get(timeout=min(left, 1.0))
                worker.ended = worker.ended or answer is None
                return worker, answer


class _Worker:
    """A worker process and the thread that reads its output."""

    def __init__(
        self, answers: queue.Queue[tuple[_Worker, dict[str, Any] | None]], environment: dict[str, str]
    ) -> None:
        self.ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headtohead.bench.worker_pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | environment,
        )
        threading.Thread(target=self._listen, args=(answers,), daemon=True).start()

    def emit(self, what: str, slices: Sequence[Slice]) -> None:
        """Send an order to the process."""
        assert self.process.stdin is not None
        with suppress(OSError):  # the process ended; the listener reports it
            self.process.stdin.write(
                json.dumps({"do": what, "slices": [asdict(one) for one in slices]}) + "\n"
            )
            self.process.stdin.flush()

    def end(self) -> str:
        """Return the signal or exit code as text."""
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"code {code}"

    def _listen(self, answers: queue.Queue[tuple[_Worker, dict[str, Any] | None]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answers.put((self, json.loads(line)))
        answers.put((self, None))


def main() -> None:
    """Run a worker process: answer every line of standard input with one line on standard output."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # other prints go to stderr, not to the answers
        for line in sys.stdin:
            order = json.loads(line)
            slices = [Slice(**facts) for facts in order["slices"]]
            if order["do"] == "warm":
                found: dict[str, Any] = {"errors": [one.warm() for one in slices]}
            else:
                found = slices[0].measure()
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
