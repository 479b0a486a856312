"""Train toy runs on several cores: each process trains some of the forms."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from headtohead.common.errors import UserError
from headtohead.papers.faster_qk.runs import ToyRun
from headtohead.papers.faster_qk.train import ToyResult, batched


def distribute(runs: Sequence[ToyRun], workers: int) -> list[list[list[ToyRun]]]:
    """Return groups of runs for each process, with about equal expected time: longest groups first."""
    groups = sorted(batched(runs), key=_weight, reverse=True)
    parts: list[list[list[ToyRun]]] = [[] for _ in range(min(workers, len(groups)))]
    for group in groups:
        min(parts, key=lambda part: sum(map(_weight, part))).append(group)
    return parts


def _weight(group: Sequence[ToyRun]) -> int:
    # A step of n runs takes about (n + 2) / 3 times as long as a step of one.
    return max(run.expected_steps for run in group) * (len(group) + 2)


@contextmanager
def train_in_processes(parts: Sequence[list[list[ToyRun]]]) -> Iterator[Callable[..., None]]:
    """Train in separate processes; yield a callable that waits for the end.

    It takes (progress, keep, stop): `keep` is called with each result, `stop` returns whether to stop early.
    """
    events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    workers = [_start(part) for part in parts]
    for index, worker in enumerate(workers):
        assert worker.stdout is not None
        threading.Thread(target=_read, args=(index, worker.stdout, events), daemon=True).start()

    def wait(
        progress: Callable[[str, float], None], keep: Callable[[ToyResult], None], stop: Callable[[], bool]
    ) -> None:
        shares, alive, done = [0.0] * len(parts), len(parts), 0
        total = sum(len(group) for part in parts for group in part)
        while alive:
            if stop():
                _close(workers)
            try:
                index, event = events.get(timeout=0.5)
            except queue.Empty:
                continue
            if event is None:
                alive -= 1
                if workers[index].wait() != 0:
                    raise UserError(f"a toy worker failed with exit code {workers[index].returncode}")
            elif "result" in event:
                keep(ToyResult.from_dict(event["result"]))
                done += 1
            else:
                shares[index] = event["share"]
                progress(f"toy: {done} of {total} runs", min(shares))

    try:
        yield wait
    finally:
        _close(workers)
        for worker in workers:
            worker.wait()


def _start(part: list[list[ToyRun]]) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, "-m", "headtohead.papers.faster_qk.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C reaches only the parent, which closes their input; workers print no traceback
    )
    assert worker.stdin is not None
    worker.stdin.write(json.dumps([[run.as_dict() for run in group] for group in part]) + "\n")
    worker.stdin.flush()
    return worker


def _close(workers: Sequence[subprocess.Popen[str]]) -> None:
    for worker in workers:
        if worker.stdin is not None and not worker.stdin.closed:
            worker.stdin.close()


def _read(index: int, stream: IO[str], events: queue.Queue[tuple[int, dict[str, Any] | None]]) -> None:
    for line in stream:
        events.put((index, json.loads(line)))
    events.put((index, None))
