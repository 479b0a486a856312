"""Stacked seeds: whether a study's runs are trained so, which are trained together, and one stack from records to results.

All runs of a study are stacked or none is: what is compared was computed the same way. Each stays a run of its own, with
its directory, lock, checkpoints and result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json
from headtohead.common.stop import NEVER, Stop
from headtohead.mechanisms.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.study.grounds import task_model
from headtohead.study.perform import (
    Conditions,
    Event,
    Stopped,
    after_step,
    begin,
    conclude,
    guarded,
    layers_of,
    may_record,
    missing_probes,
    most_stacked,
    take_probes,
    unless_lost,
)
from headtohead.study.planned import Run
from headtohead.study.records import size_of, training_of
from headtohead.study.store import RunDirectory
from headtohead.training.checkpoint import checkpoint_paths
from headtohead.training.compiling import is_small, records
from headtohead.training.stacked import COMPARED, StackedTrainer, stacks
from headtohead.training.trainer import Outcome

MOST = 16
"""Seeds in one pass: beyond, a GPU has nothing left to gain."""


class Stacking:
    """Says of a study's runs whether seeds are stacked; where that was not asked for, only where it pays.

    A study that was `begun` one way goes on that way, on any device.
    """

    def __init__(self, wanted: bool | None, conditions: Conditions, begun: bool | None = None) -> None:
        self.wanted, self.conditions, self.begun = wanted, conditions, begun

    def __call__(self, runs: Sequence[Run]) -> bool:
        """Return whether all of them are stacked; what was asked for and cannot be is refused by name."""
        wanted = self.begun if self.wanted is None else self.wanted
        several = len({run.seed for run in runs}) > 1
        if wanted is False or not (several or self.begun):  # one seed alone is no stack
            return False
        if wanted:
            if words := self._obstacle(runs):
                how = (
                    "stack=True"
                    if self.wanted
                    else "this study's seeds are stacked (stack=False does all anew)"
                )
                raise UserError(f"{how}: {words}")
            return True
        able = torch.device(self.conditions.device).type == "cuda"
        pays = several and all(is_small(run.size) for run in runs)
        # What was compared on a GPU: these mechanisms, on windows of a corpus.
        corpora = not any(run.ground is not None and run.ground.task for run in runs)
        known = corpora and all(
            term.is_ours(COMPARED) for run in runs for layer in run.layers for term in layer.terms
        )
        return able and pays and known and self._room(runs) and not self._obstacle(runs)

    def _room(self, runs: Sequence[Run]) -> bool:
        device = torch.device(self.conditions.device)
        kinds = {(run.size, run.training) for run in runs}
        return all(most_stacked(size, training, device) > 1 for size, training in kinds)

    def _obstacle(self, runs: Sequence[Run]) -> str:
        """Say what keeps the runs from being stacked, or nothing."""
        if any(run.parent for run in runs):
            return "runs with branches are not stacked"
        if any(run.contest.length.startswith("time") for run in runs):
            return "under length=time a run has its seconds to itself, and is not stacked"
        text = np.broadcast_to(np.zeros(1, dtype=np.int64), 2**40)  # as long as any companion wants
        for run in {(run.size, run.layers): run for run in runs}.values():
            task = run.ground.task if run.ground is not None else None
            layers = list(run.layers)
            model = task_model(task, run.size, layers, run.seed, text) if task else None
            if words := stacks(model or Decoder(run.size, layers, run.seed, companion=text)):
                return f"arm '{run.arm.text}': {words}"
        return ""


def is_stacked(record: dict[str, Any]) -> bool:
    """Return whether a run's record says that it is trained with other seeds."""
    return bool(record.get("identity", {}).get("stacked"))


def stacked_together(recorded: Iterable[dict[str, Any]], conditions: Conditions) -> list[list[str]]:
    """Return the names of runs by the stack they are trained in: alike in all but the seed, as many as fit."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for record in recorded:
        key = canonical_json({**record["identity"], "seed": None})
        alike.setdefault(key, []).append(record)
    device = torch.device(conditions.device)
    found = []
    for members in alike.values():
        room = most_stacked(size_of(members[0]), training_of(members[0]), device)
        most = max(1, min(MOST, room)) if device.type == "cuda" else MOST
        names = [str(record["id"]) for record in members]
        # Stacks of about one size: 20 seeds are two of ten, not one of 16 and one of four.
        parts = -(-len(names) // most)
        found += [names[place::parts] for place in range(parts)]
    return found


def perform_stack(
    runs: Sequence[RunDirectory],
    recorded: Sequence[dict[str, Any]],
    conditions: Conditions,
    *,
    layers: list[Composed] | None = None,
    probes: Sequence[str] = (),
    stop: Stop = NEVER,
    lost: Callable[[], bool] = lambda: False,
    tell: Event = lambda event: None,
) -> list[str]:
    """Do runs that are alike in all but their seeds, or go on with them, in one pass; return how each ended.

    Seeds that have begun and seeds that have not are two passes, so that no work is lost.
    """
    begun = [any(checkpoint_paths(run.checkpoints)) for run in runs]
    states: dict[str, str] = {}
    for part in (True, False):
        chosen = [place for place, known in enumerate(begun) if known is part]
        if not chosen:
            continue
        found = _one_pass(
            [runs[place] for place in chosen],
            [recorded[place] for place in chosen],
            conditions,
            layers,
            probes,
            stop,
            lost,
            tell,
        )
        states |= found
        if any(state in ("stopped", "hindered", "blocked") for state in found.values()):
            break
    return [states.get(run.id, "stopped") for run in runs]


def _one_pass(
    runs: list[RunDirectory],
    recorded: list[dict[str, Any]],
    conditions: Conditions,
    layers: list[Composed] | None,
    probes: Sequence[str],
    stop: Stop,
    lost: Callable[[], bool],
    tell: Event,
) -> dict[str, str]:
    device, first = torch.device(conditions.device), recorded[0]
    if device.type == "cpu":
        torch.set_num_threads(conditions.threads)
    held = unless_lost(runs[0], lost, stop)
    states: dict[str, str] = {}

    def train() -> None:
        chosen = layers if layers is not None else layers_of(first)
        members = [
            begin(run, record, conditions, device, chosen, held, tell, len(runs))
            for run, record in zip(runs, recorded, strict=True)
        ]

        def ended(place: int, outcome: Outcome) -> None:
            run, record, member = runs[place], recorded[place], members[place]

            def whole() -> str:
                status = conclude(member, outcome, conditions, held, tell)
                if status == "done":
                    missing = missing_probes(run, probes)
                    take_probes(run, record, member.model, conditions, missing, held, tell)
                return status

            states[run.id] = guarded(run, tell, whole)

        stack = StackedTrainer(
            [member.trainer for member in members],
            record=may_record(first, chosen)
            and records(conditions.record, size_of(first), device, compiled=False),
            compile=bool(conditions.compile),  # asked for or not, it is the same for all arms
            save_every=conditions.save_every,
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
                states[run.id] = guarded(run, tell, _raising(error))
    return states


def _raising(error: Exception) -> Callable[[], str]:
    def again() -> str:
        raise error

    return again
