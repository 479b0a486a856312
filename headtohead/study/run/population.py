"""Stacked seeds: whether a study's runs are trained so, which are trained together, and one stack from records to results.

All runs of a study are stacked or none is: what is compared was computed the same way. Each stays a run of its own, with
its directory, lock, checkpoints and result.
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
    """Do runs that are alike in all but their seeds, or go on with them, in one pass; return how each ended.

    Seeds that have begun and seeds that have not are two passes, so that no work is lost.
    """
    started = [any(checkpoint_paths(run.checkpoints)) for run in runs]
    states: dict[str, str] = {}
    for part in (True, False):
        chosen = [place for place, known in enumerate(started) if known is part]
        if not chosen:
            continue
        found = _one_pass(
            [runs[place] for place in chosen],
            [recorded[place] for place in chosen],
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

        def ended(place: int, outcome: Outcome) -> None:
            run, record, member = runs[place], recorded[place], members[place]

            def whole() -> str:
                status = finish_run(member, outcome, execution, held, emit)
                if status == "done":
                    missing = missing_probes(run, probes)
                    take_probes(run, record, member.model, execution, missing, held, emit)
                return status

            states[run.id] = with_failures_recorded(run, emit, whole)

        stack = PopulationTrainer(
            [member.trainer for member in members],
            record=may_record(first, chosen)
            and records(execution.record, size_of(first), device, compiled=False),
            compile=bool(execution.compile),  # asked for or not, it is the same for all arms
            save_every=execution.save_every,
            stop=after_step(held),
        )
        try:
            for place, outcome in enumerate(stack.run(ended)):
                if runs[place].id not in states:
                    ended(place, outcome)
        except Stopped:  # what was trained stays, and is scored at the next start
            stack.save([place for place, run in enumerate(runs) if run.id in states])
            states.update({run.id: "stopped" for run in runs} | states)

    try:
        train()
    except Exception as error:
        # What went wrong for all is recorded or told for each.
        for run in runs:
            if run.id not in states:
                states[run.id] = with_failures_recorded(run, emit, _raising(error))
    return states


def _raising(error: Exception) -> Callable[[], str]:
    def again() -> str:
        raise error

    return again
