"""Copies of finished runs from the directories of other studies, in place of training them again."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from headtohead.common.errors import UserError
from headtohead.common.files import sync_directory
from headtohead.study.probes import is_timed
from headtohead.study.store.archive import FILES, check_run
from headtohead.study.store.history import History
from headtohead.study.store.result import NO_COST, Cost
from headtohead.study.store.run_store import PROBES, RunDirectory, Store


@dataclass(frozen=True)
class Source:
    """Another study whose finished runs may be copied."""

    store: Store
    same_plan: bool = False
    """Whether it was planned together with this study, as the studies of a paper are. The copies of any other study are
    recorded in history.jsonl, because its results were known before this study was planned."""


def copy_finished_runs(
    store: Store,
    sources: Sequence[Source],
    ids: Iterable[str],
    probes: Sequence[str] = (),
    keep_weights: bool = True,
) -> int:
    """Copy runs that have not begun in the store and are finished in another one; return their number.

    The id of a run is the hash of everything that can change its result. What depends on the machine is not copied: probes
    that measure time, the times of runs that another study trained, and failures. A run is trained here if its copy is damaged,
    or lacks the weights for a probe that is still to be taken. Weights that no probe needs are copied with `keep_weights` only.
    """
    wanted = list(ids)
    return sum(_copy_from(source, store, wanted, probes, keep_weights) for source in sources)


def _copy_from(
    source: Source, store: Store, ids: Sequence[str], probes: Sequence[str], keep_weights: bool
) -> int:
    """Copy runs under a temporary name, check them, record them in history.jsonl and rename them; return their number."""
    staging = store.path / "runs" / f".copies.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        staged = [
            run
            for run in (RunDirectory(staging / run_id) for run_id in ids)
            if not store.run(run.id).path.exists() and _stage(source, run, probes, keep_weights)
        ]
        if origins := _origins(source, [run.id for run in staged]):
            with History.changing(
                store.path
            ) as history:  # before the renames: a copied run is never without its mark
                for study, runs in origins.items():
                    history.copied(study, runs)
        return sum(_renamed(run.path, store.run(run.id).path) for run in staged)
    except OSError as error:
        raise UserError(
            f"cannot copy runs of {source.store.path} to {store.path}: {error.strerror}"
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _origins(source: Source, ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the runs to record as copied, by the study from which they were copied first."""
    if not ids:
        return {}
    if not source.same_plan:
        return {source.store.path.name: list(ids)}
    known = History.read(source.store.path).origins()
    return {
        study: [run for run in ids if known.get(run) == study]
        for study in dict.fromkeys(known[run] for run in ids if run in known)
    }


def _stage(source: Source, staged: RunDirectory, probes: Sequence[str], keep_weights: bool) -> bool:
    """Copy a finished run to a temporary directory and check it; return whether it can be used."""
    run = source.store.run(staged.id)
    if not run.finished():
        return False
    for path in _files(run):
        place = staged.path / path.relative_to(run.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            shutil.copyfile(path, place, follow_symlinks=False)
    if not _usable(staged, probes):
        return False
    if not keep_weights and not staged.missing_probes(probes):
        staged.delete_weights()
    if not source.same_plan and (cost := staged.costs()) != NO_COST:
        staged.keep_cost(_untimed(cost))
    _sync(staged.path)
    return True


def _files(run: RunDirectory) -> Iterator[Path]:
    """Yield the files of a finished run that are copied, without links; a process may delete others meanwhile."""
    probes = (
        path for path in (run.path / PROBES).glob("*.json") if not is_timed(path.stem.partition("-")[0])
    )
    weights = (run.weights, run.weights.with_suffix(".sha256"))
    names = [*(run.path / name for name in FILES), *probes, *weights, *run.branches.rglob("*")]
    for path in names:
        inside = takewhile(lambda place: place != run.path, (path, *path.parents))
        if path.is_file() and not any(place.is_symlink() for place in inside):
            yield path


def _usable(run: RunDirectory, probes: Sequence[str]) -> bool:
    """Return whether a copied run is whole and did not fail, with its probes or the weights to take them."""
    try:
        check_run(run)
        result = run.result()
        if result is None or result.status not in ("done", "diverged"):
            return False
        if run.weights.is_file():
            run.check_weights_unchanged()
            return True
    except UserError:
        return False
    return result.status == "diverged" or not run.missing_probes(probes)


def _untimed(cost: Cost) -> Cost:
    """Return what a cost says that does not depend on the machine: the checksum of the metrics."""
    return Cost(metrics_sha256=cost.metrics_sha256)


def _sync(folder: Path) -> None:
    """Make a directory durable with everything in it."""
    for place, _, names in os.walk(folder):
        for name in names:
            with open(Path(place) / name, "rb") as stream:
                os.fsync(stream.fileno())
        sync_directory(Path(place))


def _renamed(staged: Path, target: Path) -> bool:
    """Rename a directory; return False if another process has put the run there."""
    try:
        staged.rename(target)
    except OSError:
        if target.exists():
            return False
        raise
    sync_directory(target.parent)
    return True
