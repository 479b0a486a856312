"""Worker processes that call functions of this package, to compile in parallel or to train side by side.

A call is one JSON line on a process's standard input, its answer one line on its standard output. A process keeps what
its functions cache from call to call.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from headtohead.bench.harness import Progress, Row, attempt, silent


class TimeLimitReached(Exception):
    """The time limit is reached."""


class WorkerPool:
    """Processes that divide the cores among their compilers; every wait ends at the deadline."""

    def __init__(self, processes: int, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.answers: queue.Queue[tuple[_Worker, Row | None]] = queue.Queue()
        self.workers = [_Worker(self.answers, compile_threads(processes)) for _ in range(processes)]

    def map(
        self, function: Callable[..., Row], orders: Sequence[Row], progress: Progress = silent
    ) -> list[tuple[int, Row]]:
        """Return for each order of `function(**order)` the index of the process that was free for it, and the answer."""
        found: dict[int, tuple[int, Row]] = {}
        waiting, idle, busy = list(range(len(orders))), list(self.workers), dict[_Worker, int]()
        while busy or (waiting and idle):
            while waiting and idle:
                worker = idle.pop()
                busy[worker] = waiting.pop(0)
                worker.call(function, orders[busy[worker]])
            worker, answer = self._receive(
                lambda: progress(f"compiling in parallel, {len(found)} of {len(orders)} done", 0.0)
            )
            if worker not in busy:  # it ended without work
                idle.remove(worker)
                continue
            found[busy.pop(worker)] = self.workers.index(worker), worker.answered(answer)
            if answer is not None:
                idle.append(worker)
        progress(f"compiling in parallel, {len(found)} of {len(orders)} done", 0.0)
        left = (0, {"error": "no worker process was left"})
        return [found.get(index, left) for index in range(len(orders))]

    def ask(self, function: Callable[..., Row], orders: dict[int, Row]) -> list[Row]:
        """Return the answers of the processes with these indices, called at the same time."""
        found: dict[_Worker, Row] = {}
        for index, order in orders.items():
            worker = self.workers[index]
            if worker.ended:
                found[worker] = worker.answered(None)
            else:
                worker.call(function, order)
        asked = [self.workers[index] for index in orders]
        while any(worker not in found for worker in asked):
            worker, answer = self._receive(lambda: None)
            found[worker] = worker.answered(answer)
        return [found[worker] for worker in asked]

    def close(self) -> None:
        """Kill all worker processes."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()

    def _receive(self, meanwhile: Callable[[], None]) -> tuple[_Worker, Row | None]:
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

    def __init__(self, answers: queue.Queue[tuple[_Worker, Row | None]], environment: dict[str, str]) -> None:
        self.ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headtohead.bench.worker_pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | environment,
            process_group=0,  # Ctrl-C reaches only this process, which then kills them
        )
        threading.Thread(target=self._listen, args=(answers,), daemon=True).start()

    def call(self, function: Callable[..., Row], order: Row) -> None:
        """Call a function of a module with keyword arguments."""
        assert self.process.stdin is not None
        line = json.dumps({"module": function.__module__, "name": function.__name__, "order": order})
        with suppress(OSError):  # the process ended; the listener reports it
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def answered(self, answer: Row | None) -> Row:
        """Return the answer, or how the process ended."""
        if answer is not None:
            return answer
        code = self.process.wait()
        return {"error": f"worker process ended ({f'signal {-code}' if code < 0 else f'code {code}'})"}

    def _listen(self, answers: queue.Queue[tuple[_Worker, Row | None]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answers.put((self, json.loads(line)))
        answers.put((self, None))


def compile_threads(processes: int) -> dict[str, str]:
    """Return the environment that divides the cores among compiling processes; by default each uses all cores."""
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // max(1, processes)))}


def main() -> None:
    """Run a worker process: answer every call with the function's result, or with its error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # other prints go to stderr, not to the answers
        for line in sys.stdin:
            call: dict[str, Any] = json.loads(line)
            function = getattr(importlib.import_module(call["module"]), call["name"])
            answer = attempt(lambda: function(**call["order"]), name="error")  # noqa: B023  called at once
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
