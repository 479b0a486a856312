"""A worker process: executes the given runs one after another and reports events.

When its standard input ends, because the parent closed it or died, it saves a checkpoint and stops. It enforces the
time limit itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from headtohead.common.stop import Stop
from headtohead.common.worker_process import receive, send
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.run.claim_loop import ClaimLoop
from headtohead.study.store.run_spec import run_spec_from
from headtohead.study.store.run_store import Store


class Order(Struct, frozen=True):
    """What a worker does."""

    store: str
    execution: ExecutionSettings
    runs: list[dict[str, Any]]
    """Contents of spec.json."""
    probes: tuple[str, ...]
    seconds: float | None
    """Time limit."""


def main() -> None:
    """Execute the runs of the order on standard input."""
    order, requested = receive(Order)
    runs = [run_spec_from(record, record["id"]) for record in order.runs]
    stop = Stop.after(float("inf") if order.seconds is None else order.seconds, requested)
    ClaimLoop(Store(Path(order.store)), runs, order.execution, stop, send, probes=order.probes).work()


if __name__ == "__main__":
    main()
