"""Fill the compile cache by parallel processes before a benchmark."""

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
    """Return the environment that divides the cores among compiling processes; by default each uses all cores."""
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // max(1, processes)))}


def warm(module: str, orders: Sequence[dict[str, Any]], progress: Callable[[str, float], None]) -> None:
    """Run the module once per order, passed on its standard input, with one process per core at a time.

    Exit codes are ignored: what fails here fails again, and is recorded, when it is measured.
    """
    side = min(len(orders), os.cpu_count() or 1)
    waiting = list(orders)
    running: list[subprocess.Popen[str]] = []
    try:
        while waiting or running:
            while waiting and len(running) < side:
                running.append(_start(module, waiting.pop(0), side))
            time.sleep(0.1)
            running = [worker for worker in running if worker.poll() is None]
            done = len(orders) - len(waiting) - len(running)
            progress(f"compiling in parallel, {done} of {len(orders)} done", 0.0)
    finally:
        for worker in running:
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
    with suppress(OSError):  # the process ended at once
        worker.stdin.write(json.dumps(order))
        worker.stdin.close()
    return worker
