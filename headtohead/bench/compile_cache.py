"""Compiling in processes side by side, so that a benchmark finds the compiler's work in its cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any


def compile_threads(processes: int) -> dict[str, str]:
    """Return what that many compiling processes are told; each would start as many helpers as there are cores."""
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // max(1, processes)))}


def warm(module: str, orders: Sequence[dict[str, Any]], progress: Callable[[str, float], None]) -> None:
    """Run the module once for each order, given on its standard input, as many at a time as there are cores.

    How a process ends does not matter here: what fails there fails again, and is recorded, where it is measured.
    """
    side = min(len(orders), os.cpu_count() or 1)
    waiting = list(orders)
    at_work: list[subprocess.Popen[str]] = []
    try:
        while waiting or at_work:
            while waiting and len(at_work) < side:
                at_work.append(_start(module, waiting.pop(0), side))
            time.sleep(0.1)
            at_work = [worker for worker in at_work if worker.poll() is None]
            done = len(orders) - len(waiting) - len(at_work)
            progress(f"compiling side by side, {done} of {len(orders)} done", 0.0)
    finally:
        for worker in at_work:
            worker.kill()
            worker.wait()


def _start(module: str, order: dict[str, Any], side: int) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | compile_threads(side),
    )
    assert worker.stdin is not None
    with suppress(OSError):  # it died at once
        worker.stdin.write(json.dumps(order))
        worker.stdin.close()
    return worker
