"""Train toy runs on several cores: each process trains some of the forms, with one thread.

The first line of a process's standard input lists its runs, in groups that are trained in one pass. It reports on
standard output, and stops at the end of its input, whether the parent closed it or died.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

from headtohead.common.errors import UserError
from headtohead.common.worker_protocol import emit, receive
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

    `meanwhile` runs in this thread, `progress` and `keep` in others, one at a time; returns what `meanwhile` returns.
    """
    shares, kept = [0.0] * len(parts), 0
    total = sum(len(group) for part in parts for group in part)
    ended, one_at_a_time = threading.Event(), threading.Lock()

    def supervise(index: int) -> None:
        nonlocal kept
        with _start(parts[index]) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            for line in worker.stdout:
                event = json.loads(line)
                with one_at_a_time:
                    if "result" in event:
                        keep(ToyResult.from_dict(event["result"]))
                        kept += 1
                    else:
                        shares[index] = event["share"]
                        progress(f"toy: {kept} of {total} runs", min(shares))
                if ended.is_set() or stop():
                    worker.stdin.close()
        if worker.returncode != 0:
            raise UserError(f"a toy worker failed with exit code {worker.returncode}")

    with ThreadPoolExecutor(len(parts)) as threads:
        try:
            supervised = [threads.submit(supervise, index) for index in range(len(parts))]
            found = meanwhile()
            for thread in as_completed(supervised):
                thread.result()
        finally:  # Ctrl-C too: the workers end after the current window
            ended.set()
    return found


def _start(part: Part) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headtohead.papers.faster_qk.processes"]
    pipe = subprocess.PIPE
    # A process group of their own: Ctrl-C reaches only the parent, and workers print no traceback.
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0)
    assert worker.stdin is not None
    worker.stdin.write(json.dumps([[run.as_dict() for run in group] for group in part]) + "\n")
    worker.stdin.flush()
    return worker


def main() -> None:
    """Train the runs given on standard input."""
    torch.set_num_threads(1)
    order, stop = receive()
    groups = [[ToyRun(**run) for run in group] for group in order]
    weights = [max(run.expected_steps for run in group) for group in groups]
    for index, group in enumerate(groups):

        def show(message: str, share: float, index: int = index) -> None:
            emit({"share": (sum(weights[:index]) + share * weights[index]) / sum(weights)})

        train(group, "cpu", show, lambda result: emit({"result": result.as_dict()}), stop)


if __name__ == "__main__":
    main()
