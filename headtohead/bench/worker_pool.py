"""Worker processes that call functions of this package, to compile in parallel or to train side by side.

A process answers one call after another, and keeps what its functions cache from call to call.
"""

from __future__ import annotations

import importlib
import math
import os
import queue
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec import Struct

from headtohead.bench.harness import Progress, Row, attempt, silent
from headtohead.common.worker_process import WorkerProcess, orders, send


class TimeLimitReached(Exception):
    """The time limit is reached."""


class Call(Struct, frozen=True):
    """A call of a function of a module."""

    module: str
    name: str
    order: Row


class WorkerPool:
    """Processes that divide the cores among their compilers; every wait ends at the deadline."""

    def __init__(self, processes: int, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.answers: queue.Queue[tuple[WorkerProcess, Row]] = queue.Queue()
        settings, threads = compile_threads(processes), torch.get_num_threads()
        self.workers = [
            WorkerProcess(
                *("headtohead.bench.worker_pool", None, Row, self.answers),
                log=subprocess.DEVNULL,
                threads=threads,
                environment=settings,
            )
            for _ in range(processes)
        ]

    def map(
        self, function: Callable[..., Row], orders: Sequence[Row], progress: Progress = silent
    ) -> list[tuple[int, Row]]:
        """Return for each order of `function(**order)` the index of the process that was free for it, and the answer."""
        waiting = deque(enumerate(orders))
        found = self._serve(function, {one: waiting for one in self.workers if one.alive}, progress)
        left = (0, {"error": "no worker process was left"})
        return [found.get(number, left) for number in range(len(orders))]

    def ask(self, function: Callable[..., Row], orders: Mapping[int, Row]) -> list[Row]:
        """Return the answers of the processes with these indices, called at the same time."""
        waiting = {self.workers[index]: deque([(index, order)]) for index, order in orders.items()}
        found = self._serve(function, waiting, silent)
        return [found[index][1] for index in orders]

    def close(self) -> None:
        """Kill all worker processes."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()

    def _serve(
        self,
        function: Callable[..., Row],
        waiting: Mapping[WorkerProcess, deque[tuple[int, Row]]],
        progress: Progress,
    ) -> dict[int, tuple[int, Row]]:
        """Give each process the next of its numbered orders until none is left; return index and answer by number."""
        total = len({number for orders in waiting.values() for number, _ in orders})
        found, busy, free = dict[int, tuple[int, Row]](), dict[WorkerProcess, int](), list(waiting)
        while True:
            for worker in free:
                if waiting[worker]:
                    busy[worker], order = waiting[worker].popleft()
                    worker.give(Call(function.__module__, function.__name__, order))
            progress(f"compiling in parallel, {len(found)} of {total} done", 0.0)
            if not busy:
                return found
            if (left := self.deadline - time.monotonic()) <= 0:
                raise TimeLimitReached
            ended = [worker for worker in busy if not worker.alive]
            try:
                worker, answer = self.answers.get(timeout=0.0 if ended else min(left, 1.0))
                free = [worker]
            except queue.Empty:
                free = []
                if not ended:
                    continue
                worker, answer = ended[0], {"error": f"worker process {ended[0].wait()}"}
            found[busy.pop(worker)] = self.workers.index(worker), answer


def compile_threads(processes: int) -> dict[str, str]:
    """Return the environment that divides the cores among compiling processes; by default each uses all cores."""
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // max(1, processes)))}


def main() -> None:
    """Run a worker process: answer every call with the function's result, or with its error."""
    for call in orders(Call):
        function = getattr(importlib.import_module(call.module), call.name)
        send(attempt(lambda: function(**call.order), name="error"))  # noqa: B023  called at once


if __name__ == "__main__":
    main()
