"""Compile the next pass of a study in a helper process while this one trains.

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
from headtohead.study.plan.execution import ExecutionSettings, layers_of
from headtohead.study.plan.step_timing import trial
from headtohead.study.store.run_spec import RunSpec, run_spec_from
from headtohead.study.store.run_store import Store
from headtohead.training.acceleration import compiles
from headtohead.training.population import PopulationTrainer
from headtohead.training.trainer import Runs


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
        """Start to compile the pass of these runs, unless it is not compiled or a helper is still at work.

        `layers` are given if they cannot be built from the runs in another process.
        """
        portable = layers is None or all(composed.portable for composed in layers)
        if not portable or not is_compiled(runs, self.execution) or (self._helper and self._helper.alive):
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


def is_compiled(runs: Sequence[RunSpec], execution: ExecutionSettings) -> bool:
    """Return whether the steps of a pass are compiled; those of tasks never are."""
    if runs[0].task:
        return False
    if runs[0].stacked:
        return bool(execution.compile)  # compiling a population takes longer than it saves in most studies
    return compiles(execution.compile, runs[0].size, torch.device(execution.device))


def compile_pass(store: Store, runs: Sequence[RunSpec], execution: ExecutionSettings) -> None:
    """Do one step of a pass without saving anything."""
    rows = len(runs) if runs[0].stacked else 0
    trainers = [
        trial(run, layers_of(run), dataset_of(store.run(run.id), run, execution.data_dir), execution, rows)
        for run in runs
    ]
    runner: Runs = PopulationTrainer(trainers, compile=True) if rows else trainers[0]
    for trainer in trainers:
        trainer.model.train()
    runner.one_step()


def main() -> None:
    """Compile the pass of the order on standard input, and exit at once when that ends."""
    os.nice(10)
    order, stopped = receive(Order)
    threading.Thread(target=_exit_when, args=(stopped,), daemon=True).start()
    runs = [run_spec_from(record, record["id"]) for record in order.runs]
    compile_pass(Store(Path(order.store)), runs, order.execution)


def _exit_when(stopped: Callable[[], bool]) -> None:
    while not stopped():
        time.sleep(0.2)
    os._exit(0)


if __name__ == "__main__":
    main()
