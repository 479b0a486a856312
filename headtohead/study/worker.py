"""A worker process: does the runs it is told of, one after another, and reports on standard output.

It is told everything on the first line of standard input; the end of standard input, whether the parent closed it or
died, means: save a checkpoint and stop.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from headtohead.study.perform import conditions_from
from headtohead.study.store import Store
from headtohead.study.work import Job, work


def main() -> None:
    """Do the work that standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    conditions = conditions_from(json.dumps(order["conditions"]))
    stopped = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=listen, daemon=True).start()
    jobs = [Job(record, probes=tuple(order["probes"])) for record in order["records"]]
    work(Store(Path(order["store"])), jobs, conditions, stopped.is_set, tell)


def tell(event: dict[str, Any]) -> None:
    """Write one event as a line."""
    try:
        print(json.dumps(event), flush=True)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
