"""Over-training from one run: a trunk at the stable rate, and a branch that decays from it for each token count.

A branch is a warm-up-stable-decay run of its own length. Up to the step at which its decay begins it does what its
trunk did, so it starts from the trunk's checkpoint of that step, and on CPU it ends bit for bit where the uninterrupted
run would. All branches of a trunk warm up over the same steps: those of the shortest. The trunk ends where the decay of
the longest begins. It keeps the checkpoints until the last branch has a result; a branch that finds none, or a damaged
one, does the trunk's steps itself.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headtohead.common.errors import UserError
from headtohead.study.store.run_store import RunDirectory, Store
from headtohead.training.checkpoint import checkpoint_path
from headtohead.training.settings import TrainSettings


@dataclass(frozen=True)
class Parent:
    """The run a branch starts from, and the step at which it leaves it."""

    run: str
    step: int


def grow(
    lengths: Sequence[TrainSettings], context: int
) -> tuple[TrainSettings, list[TrainSettings], list[int]]:
    """Return how the trunk of these runs is trained, each of them as its branch, and the step each starts at."""
    counts = [settings.steps(context) for settings in lengths]
    shortest = min(counts)
    rises = [max(1, round(settings.warmup * shortest)) if settings.warmup else 0 for settings in lengths]
    branches, starts = [], []
    for settings, count, rise in zip(lengths, counts, rises, strict=True):
        fall = round(settings.decay_share * count)
        if fall < 1 or rise > count - fall or count == fall:
            raise UserError(
                f"branches: {count} steps ({settings.tokens:,} tokens) do not hold a warm-up of {rise}, a stable part and "
                f"a decay of {fall} steps; give more tokens, a smaller batch, or another warmup and decay_share"
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
    """Return where a trunk keeps the checkpoint of a step for its branch."""
    return checkpoint_path(trunk.branches, step)


def drop_checkpoints(store: Store, branches: Iterable[tuple[str, Parent]]) -> None:
    """Drop what trunks kept for their branches, where all of these (run, parent) have results."""
    waiting: dict[str, bool] = {}
    for run, parent in branches:
        waiting[parent.run] = waiting.get(parent.run, False) or not store.run(run).finished()
    for trunk, waits in waiting.items():
        folder = store.run(trunk).branches
        if not waits and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
