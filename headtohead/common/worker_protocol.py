"""Protocol of a worker process: one JSON order on standard input, JSON events on standard output.

End of file on standard input, because the parent closed it or died, tells the worker to stop.
"""

from __future__ import annotations

import json
import os
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
    """Write one event as a line; none is written after the parent has died.

    The end of standard input then stops the worker, which first saves its work.
    """
    try:
        print(json.dumps(event), flush=True)
    except BrokenPipeError:
        # The line stays in the buffer of sys.stdout, and Python writes it again at the next event and at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
