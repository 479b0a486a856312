"""A worker process: does the runs it is told of, one after another, and reports on standard output.

It is told everything on the first line of standard input; the end of standard input, whether the parent closed it or
died, means: save a checkpoint and stop. It watches the time limit itself.
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
    """Do the work that standard input names."""
    order, requested = receive()
    execution = execution_settings_from(json.dumps(order["conditions"]))
    jobs = [Job(record, probes=tuple(order["probes"])) for record in order["records"]]
    work(Store(Path(order["store"])), jobs, execution, Stop.after(order["seconds"], requested), emit)


if __name__ == "__main__":
    main()
