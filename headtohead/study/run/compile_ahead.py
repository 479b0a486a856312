"""Compile the next population of a study in a helper process while this one trains.

The helper does one step of the pass without saving anything; what remains is the compiled graph in the compile cache,
which the pass then finds. A helper that fails changes nothing: the pass compiles its graph itself.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from headtohead.common.worker_process import WorkerProcess, receive
from headtohead.mechanisms.contract.terms import Composed
from headtohead.study.plan.dataset import dataset_of
from headtohead.study.plan.execution import ExecutionSettings, current_device, layers_of
from headtohead.study.plan.step_timing import trial
from headtohead.study.store.run_spec import RunSpec, run_spec_from
from headtohead.study.store.run_store import Store
from headtohead.training.population import PopulationTrainer


class Order(Struct, frozen=True):
    """What a helper compiles."""

    store: str
    execution: ExecutionSettings
    runs: list[dict[str, Any]]
    """Contents of spec.json."""


class CompileAhead:
    """Compiles one pass at a time in a helper process."""

    def __init__(self, store: Store, execution: ExecutionSettings) -> None:
        self.store, self.execution = store, execution
        self._helper: WorkerProcess | None = None

    def start(self, runs: Sequence[RunSpec], layers: Sequence[Composed] | None = None) -> None:
        """Start to compile the pass of a population, unless it is not compiled or a helper is still at work.

        `layers` are given if they cannot be built from the runs in another process.
        """
        compiled = self.execution.compile and runs[0].stacked and not runs[0].task
        portable = layers is None or all(composed.portable for composed in layers)
        if not compiled or not portable or (self._helper and self._helper.alive):
            return
        order = Order(str(self.store.path.resolve()), self.execution, [run.as_dict() for run in runs])
        module = "headtohead.study.run.compile_ahead"
        events: queue.Queue[tuple[WorkerProcess, None]] = queue.Queue()
        # Compiling with all cores slows the training beside it down to a fifth (docs/log.md).
        cores = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // 4))}
        self._helper = WorkerProcess(
            module, order, type(None), events, log=subprocess.DEVNULL, environment=cores
        )

    def close(self) -> None:
        """End the helper and its own processes."""
        if self._helper is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._helper.process.pid, signal.SIGKILL)  # it leads a session of its own
            self._helper.process.wait()
            self._helper = None


def compile_pass(store: Store, runs: Sequence[RunSpec], execution: ExecutionSettings) -> None:
    """Do one step of a population without saving anything."""
    members = [
        trial(
            run, layers_of(run), dataset_of(store.run(run.id), run, execution.data_dir), execution, len(runs)
        )
        for run in runs
    ]
    for member in members:
        member.model.train()
    PopulationTrainer(members, compile=True).one_step()


def main() -> None:
    """Compile the pass of the order on standard input, and exit at once when that ends."""
    os.nice(10)
    order, stopped = receive(Order)
    threading.Thread(target=_exit_when, args=(stopped,), daemon=True).start()
    runs = [run_spec_from(record, record["id"]) for record in order.runs]
    with current_device(torch.device(order.execution.device)):
        compile_pass(Store(Path(order.store)), runs, order.execution)


def _exit_when(stopped: Callable[[], bool]) -> None:
    while not stopped():
        time.sleep(0.2)
    os._exit(0)


if __name__ == "__main__":
    main()
