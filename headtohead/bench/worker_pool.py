"""Worker processes that call functions of this package, to compile in parallel or to train side by side.

A call is one JSON line on a process's standard input, its answer one line on its standard output. A process keeps what
its functions cache from call to call.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from headtohead.bench.harness import Progress, Row, attempt, silent


class TimeLimitReached(Exception):
    """The time limit is reached."""


class WorkerPool:
    """Processes that divide the cores among their compilers; every wait ends at the deadline."""

    def __init__(self, processes: int, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.workers = [_Worker(compile_threads(processes)) for _ in range(processes)]
        self.threads = ThreadPoolExecutor(max(1, processes))

    def map(
        self, function: Callable[..., Row], orders: Sequence[Row], progress: Progress = silent
    ) -> list[tuple[int, Row]]:
        """Return for each order of `function(**order)` the index of the process that was free for it, and the answer."""
        waiting, found = deque(enumerate(orders)), dict[int, tuple[int, Row]]()

        def serve(index: int) -> None:
            worker = self.workers[index]
            with suppress(IndexError):  # no order is left
                while not worker.ended:
                    number, order = waiting.popleft()
                    found[number] = index, worker.call(function, order)

        def show() -> None:
            progress(f"compiling in parallel, {len(found)} of {len(orders)} done", 0.0)

        self._wait([self.threads.submit(serve, index) for index in range(len(self.workers))], show)
        left = (0, {"error": "no worker process was left"})
        return [found.get(number, left) for number in range(len(orders))]

    def ask(self, function: Callable[..., Row], orders: dict[int, Row]) -> list[Row]:
        """Return the answers of the processes with these indices, called at the same time."""
        calls = [
            self.threads.submit(self.workers[index].call, function, order) for index, order in orders.items()
        ]
        self._wait(calls, lambda: None)
        return [call.result() for call in calls]

    def close(self) -> None:
        """Kill all worker processes."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
        self.threads.shutdown()

    def _wait(self, calls: Sequence[Future[Any]], show: Callable[[], None]) -> None:
        waiting = set(calls)
        while waiting:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeLimitReached
            waiting = wait(waiting, timeout=min(left, 1.0)).not_done
            show()


class _Worker:
    """A worker process; `ended` once it did not answer."""

    def __init__(self, environment: dict[str, str]) -> None:
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

    def call(self, function: Callable[..., Row], order: Row) -> Row:
        """Return the answer of a function of a module, or how the process ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        with suppress(OSError):  # the process ended
            call = {"module": function.__module__, "name": function.__name__, "order": order}
            self.process.stdin.write(json.dumps(call) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if line:
            answer: Row = json.loads(line)
            return answer
        self.ended, code = True, self.process.wait()
        return {"error": f"worker process ended ({f'signal {-code}' if code < 0 else f'code {code}'})"}


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
