"""A worker process: executes the given runs one after another and reports events on standard output.

It reads its whole order from the first line of standard input. When standard input ends, because the parent closed it
or died, the worker saves a checkpoint and stops. It enforces the time limit itself.
"""

from __future__ import annotations

import json
from pathlib import Path

from headtohead.common.stop import Stop
from headtohead.common.worker_protocol import emit, receive
from headtohead.study.plan.execution import execution_settings_from
from headtohead.study.run.claim_loop import Job, work
from headtohead.study.store.run_store import Store


def main() -> None:
    """Execute the runs given on standard input."""
    order, requested = receive()
    execution = execution_settings_from(json.dumps(order["conditions"]))
    jobs = [Job(record, probes=tuple(order["probes"])) for record in order["records"]]
    work(Store(Path(order["store"])), jobs, execution, Stop.after(order["seconds"], requested), emit)


if __name__ == "__main__":
    main()
