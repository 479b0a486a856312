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

from headtohead.study.perform import conditions_from, perform
from headtohead.study.store import Store


def main() -> None:
    """Do the work that standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    store = Store(Path(order["store"]))
    conditions = conditions_from(json.dumps(order["conditions"]))
    stopped = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=listen, daemon=True).start()
    work(store, order["records"], conditions, stopped)


def work(store: Store, records: list[dict[str, Any]], conditions: Any, stopped: threading.Event) -> None:
    """Go through the records until none is left that nobody else holds."""
    for record in records:
        if stopped.is_set():
            return
        run = store.run(record["id"])
        if run.result() is not None:
            continue
        run.open(record)
        with run.claimed() as mine:
            if not mine or run.result() is not None:
                continue
            tell({"kind": "started", "run": run.id})
            state = perform(run, record, conditions, stop=stopped.is_set, tell=tell)
            tell({"kind": "ended", "run": run.id, "state": state})


def tell(event: dict[str, Any]) -> None:
    """Write one event as a line."""
    try:
        print(json.dumps(event), flush=True)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
