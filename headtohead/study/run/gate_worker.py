"""Process that runs the causality gate on user code."""

from __future__ import annotations

from headtohead.common.worker_process import receive, send
from headtohead.study.plan.execution import layers_of
from headtohead.study.run.admission import Order, check_run
from headtohead.study.store.run_spec import run_spec_from


def main() -> None:
    """Check the runs of the order on standard input, and send one result for each."""
    order, stopped = receive(Order)
    for record in order.runs:
        if stopped():
            return
        spec = run_spec_from(record, record["id"])
        send(check_run(spec, order.execution, layers_of(spec)))


if __name__ == "__main__":
    main()
