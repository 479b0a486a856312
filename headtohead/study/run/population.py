"""Train one population from records to results.

Either all runs of a study are rows of populations or none is, so that compared runs are computed the same way. Each row
is still a run of its own, with its directory, lock, checkpoints and result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headtohead.common.stop import NEVER, Stop
from headtohead.mechanisms.contract.terms import Composed
from headtohead.study.plan.execution import ExecutionSettings, layers_of
from headtohead.study.run.run_one import (
    Event,
    Stopped,
    after_step,
    begin,
    finish_run,
    may_record,
    missing_probes,
    stop_when_lost,
    take_probes,
    with_failures_recorded,
)
from headtohead.study.store.run_store import RunDirectory
from headtohead.study.store.validation import size_of
from headtohead.training.acceleration import records
from headtohead.training.checkpoint import checkpoint_paths
from headtohead.training.population import PopulationTrainer
from headtohead.training.trainer import Outcome


def run_population(
    runs: Sequence[RunDirectory],
    recorded: Sequence[dict[str, Any]],
    execution: ExecutionSettings,
    *,
    layers: list[Composed] | None = None,
    probes: Sequence[str] = (),
    stop: Stop = NEVER,
    lost: Callable[[], bool] = lambda: False,
    emit: Event = lambda event: None,
) -> list[str]:
    """Train or resume runs that differ only in their seeds in one pass; return the resulting state of each.

    Runs that have started and runs that have not are trained in two passes, so that no work is lost.
    """
    started = [any(checkpoint_paths(run.checkpoints)) for run in runs]
    states: dict[str, str] = {}
    for part in (True, False):
        chosen = [index for index, known in enumerate(started) if known is part]
        if not chosen:
            continue
        found = _one_pass(
            [runs[index] for index in chosen],
            [recorded[index] for index in chosen],
            execution,
            layers,
            probes,
            stop,
            lost,
            emit,
        )
        states |= found
        if any(state in ("stopped", "deferred", "blocked") for state in found.values()):
            break
    return [states.get(run.id, "stopped") for run in runs]


def _one_pass(
    runs: list[RunDirectory],
    recorded: list[dict[str, Any]],
    execution: ExecutionSettings,
    layers: list[Composed] | None,
    probes: Sequence[str],
    stop: Stop,
    lost: Callable[[], bool],
    emit: Event,
) -> dict[str, str]:
    device, first = torch.device(execution.device), recorded[0]
    if device.type == "cpu":
        torch.set_num_threads(execution.threads)
    held = stop_when_lost(runs[0], lost, stop)
    states: dict[str, str] = {}

    def train() -> None:
        chosen = layers if layers is not None else layers_of(first)
        members = [
            begin(run, record, execution, device, chosen, held, emit, len(runs))
            for run, record in zip(runs, recorded, strict=True)
        ]

        def ended(index: int, outcome: Outcome) -> None:
            run, record, member = runs[index], recorded[index], members[index]

            def execute() -> str:
                status = finish_run(member, outcome, execution, held, emit)
                if status == "done":
                    missing = missing_probes(run, probes)
                    take_probes(run, record, member.model, execution, missing, held, emit)
                return status

            states[run.id] = with_failures_recorded(run, emit, execute)

        trainer = PopulationTrainer(
            [member.trainer for member in members],
            record=may_record(first, chosen)
            and records(execution.record, size_of(first), device, compiled=False),
            compile=bool(execution.compile),  # only on request: it must be the same for all arms
            save_every=execution.save_every,
            stop=after_step(held),
        )
        try:
            for index, outcome in enumerate(trainer.run(ended)):
                if runs[index].id not in states:
                    ended(index, outcome)
        except Stopped:  # the training is saved and scored at the next start
            trainer.save([index for index, run in enumerate(runs) if run.id in states])
            states.update({run.id: "stopped" for run in runs} | states)

    try:
        train()
    except Exception as error:
        # An error that affects all rows is recorded or reported for each.
        for run in runs:
            if run.id not in states:
                states[run.id] = with_failures_recorded(run, emit, _raising(error))
    return states


def _raising(error: Exception) -> Callable[[], str]:
    def again() -> str:
        raise error

    return again
