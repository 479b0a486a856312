"""A worker process' two ends: it is told its work on the first line of standard input, and tells on standard output.

The end of standard input, whether the parent closed it or died, means: stop.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


def receive() -> tuple[Any, Callable[[], bool]]:
    """Return what the first line says, and a function that says whether to stop; Ctrl-C is for the parent to notice."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    stopped = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=listen, daemon=True).start()
    return order, stopped.is_set


def emit(event: dict[str, Any]) -> None:
    """Write one event as a line."""
    try:
        print(json.dumps(event), flush=True)
    except BrokenPipeError:
        sys.exit(1)
