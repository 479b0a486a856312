"""Train toy runs on several cores: each process trains some of the forms, with one thread.

The first line of a process's standard input lists its runs, in groups that are trained in one pass. It reports on
standard output, and stops at the end of its input, whether the parent closed it or died.
"""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch
from msgspec import Struct

from headtohead.common.errors import UserError
from headtohead.common.worker_process import WorkerProcess, receive, send
from headtohead.papers.faster_qk.runs import ToyRun
from headtohead.papers.faster_qk.train import ToyResult, batched, train

Found = TypeVar("Found")
Part = list[list[ToyRun]]
"""The groups of runs of one process."""


def distribute(runs: Sequence[ToyRun], workers: int) -> list[Part]:
    """Return groups of runs for each process, with about equal expected time: longest groups first."""
    groups = sorted(batched(runs), key=_weight, reverse=True)
    parts: list[Part] = [[] for _ in range(min(workers, len(groups)))]
    for group in groups:
        min(parts, key=lambda part: sum(map(_weight, part))).append(group)
    return parts


def _weight(group: Sequence[ToyRun]) -> int:
    # A step of n runs takes about (n + 2) / 3 times as long as a step of one.
    return max(run.expected_steps for run in group) * (len(group) + 2)


def train_in_processes(
    parts: Sequence[Part],
    progress: Callable[[str, float], None],
    keep: Callable[[ToyResult], None],
    stop: Callable[[], bool],
    meanwhile: Callable[[], Found],
) -> Found:
    """Train in separate processes until all runs are done or `stop` returns true; `keep` is called with each result.

    `meanwhile` runs in this thread, `progress` and `keep` in another; returns what `meanwhile` returns.
    """
    shares, kept = dict.fromkeys(range(len(parts)), 0.0), 0
    total = sum(len(group) for part in parts for group in part)
    ended = threading.Event()

    def supervise() -> None:
        nonlocal kept
        events: queue.Queue[tuple[WorkerProcess, Report]] = queue.Queue()
        workers = [start(part, events) for part in parts]
        while any(worker.alive for worker in workers) or not events.empty():
            if ended.is_set() or stop():
                for worker in workers:
                    worker.ask_to_stop()
            with suppress(queue.Empty):
                worker, report = events.get(timeout=0.1)
                if report.result is not None:
                    keep(ToyResult.from_dict(report.result))
                    kept += 1
                else:
                    shares[workers.index(worker)] = report.share
                    progress(f"toy: {kept} of {total} runs", min(shares.values()))
        for worker in workers:
            if how := worker.wait():
                raise UserError(f"a toy worker {how}")

    with ThreadPoolExecutor(1) as threads:
        try:
            supervised = threads.submit(supervise)
            found = meanwhile()
            supervised.result()
        finally:  # Ctrl-C too: the workers end after the current window
            ended.set()
    return found


class Report(Struct, omit_defaults=True):
    """What a process reports: the finished share of its runs, or the result of one."""

    share: float = 0.0
    result: dict[str, Any] | None = None


def start(part: Part, events: queue.Queue[tuple[WorkerProcess, Report]]) -> WorkerProcess:
    """Start a process that trains the runs of a part."""
    order = [[run.as_dict() for run in group] for group in part]
    return WorkerProcess(
        "headtohead.papers.faster_qk.processes", order, Report, events, log=subprocess.DEVNULL
    )


def main() -> None:
    """Train the runs given on standard input."""
    torch.set_num_threads(1)
    order, stop = receive(list)
    groups = [[ToyRun(**run) for run in group] for group in order]
    weights = [max(run.expected_steps for run in group) for group in groups]
    for index, group in enumerate(groups):

        def show(message: str, share: float, index: int = index) -> None:
            send(Report(share=(sum(weights[:index]) + share * weights[index]) / sum(weights)))

        train(group, "cpu", show, lambda result: send(Report(result=result.as_dict())), stop)


if __name__ == "__main__":
    main()
