"""Several training lengths from one run: a trunk at the constant rate, and a decaying branch for each token count.

A branch is a warmup-stable-decay run of its own length. Until its decay begins it is identical to its trunk, so it
starts from the trunk's checkpoint of that step; on CPU its result equals that of the uninterrupted run bit for bit. All
branches of a trunk use the warm-up steps of the shortest. The trunk ends where the decay of the longest begins. It keeps
the checkpoints until the last branch has a result. A branch whose checkpoint is missing or damaged repeats the trunk's
steps itself.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from headtohead.common.errors import UserError
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import RunDirectory, Store
from headtohead.training.checkpoint import checkpoint_path
from headtohead.training.settings import TrainSettings


def grow(
    lengths: Sequence[TrainSettings], context: int
) -> tuple[TrainSettings, list[TrainSettings], list[int]]:
    """Return the settings of the trunk, the settings of each branch, and the step each branch starts at."""
    counts = [settings.steps(context) for settings in lengths]
    shortest = min(counts)
    rises = [max(1, round(settings.warmup * shortest)) if settings.warmup else 0 for settings in lengths]
    branches, starts = [], []
    for settings, count, rise in zip(lengths, counts, rises, strict=True):
        fall = round(settings.decay_share * count)
        if fall < 1 or rise > count - fall or count == fall:
            raise UserError(
                f"branches: {count} steps ({settings.tokens:,} tokens) are too few for {rise} warm-up steps, "
                f"a stable phase and {fall} decay steps; give more tokens, a smaller batch, warmup or decay_share"
            )
        branches.append(dataclasses.replace(settings, warmup=rise / count))
        starts.append(count - fall)
    last = max(starts)
    first = lengths[0]
    trunk = dataclasses.replace(
        first, schedule="constant", tokens=last * first.batch, warmup=max(rises) / last
    )
    return trunk, branches, starts


def kept_checkpoint(trunk: RunDirectory, step: int) -> Path:
    """Return the path of the checkpoint that a trunk keeps for the branch at `step`."""
    return checkpoint_path(trunk.branches, step)


def drop_checkpoints(store: Store, runs: Iterable[RunSpec]) -> None:
    """Delete the checkpoints of trunks whose branches among `runs` all have results."""
    waiting: dict[str, bool] = {}
    for run in runs:
        if run.parent:
            trunk = run.parent.run
            waiting[trunk] = waiting.get(trunk, False) or not store.run(run.id).finished()
    for trunk, waits in waiting.items():
        folder = store.run(trunk).branches
        if not waits and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
