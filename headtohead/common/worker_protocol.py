"""Protocol of a worker process: one JSON order on standard input, JSON events on standard output.

End of file on standard input, because the parent closed it or died, tells the worker to stop.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


def receive() -> tuple[Any, Callable[[], bool]]:
    """Return the order from the first input line and a function that returns whether to stop.

    SIGINT is ignored; the parent handles Ctrl-C.
    """
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
