"""Copies of finished runs from the directories of other studies, in place of training them again."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from headtohead.common.errors import DamagedFile, UserError
from headtohead.common.files import sync_directory
from headtohead.common.stop import NEVER, Stop
from headtohead.study.probes import is_timed
from headtohead.study.store.archive import FILES, check_run
from headtohead.study.store.history import NAME as HISTORY
from headtohead.study.store.history import History
from headtohead.study.store.result import NO_COST, Cost
from headtohead.study.store.run_store import PROBES, KeptWeights, RunDirectory, Store
from headtohead.study.store.shared import exclusive


@dataclass(frozen=True)
class Source:
    """Another study whose finished runs may be copied."""

    store: Store
    same_plan: bool = False
    """Whether it was planned together with this study, as the studies of a paper are. The copies of any other study are
    recorded in history.jsonl, because its results were known before this study was planned."""


@dataclass(frozen=True)
class Wanted:
    """A run that may be copied."""

    run: str
    probes: Sequence[str] = ()
    """A run that lacks one of them, and the weights to take it, is not copied."""
    weights: KeptWeights = "yes"


def copy_finished_runs(
    store: Store,
    sources: Sequence[Source],
    wanted: Sequence[Wanted],
    *,
    stop: Stop = NEVER,
    progress: Callable[[str, float], None] = lambda message, share: None,
    note: Callable[[str], None] = lambda message: None,
) -> list[str]:
    """Copy runs that have not begun in the store and are finished in another one, one by one; return their ids.

    The id of a run is the hash of everything that can change its result. What depends on the machine is not copied: probes
    that measure time, the times of runs that another study trained, and failures. A run whose copy is damaged is trained
    here. `note` receives why a study cannot be copied from.
    """
    copied: list[str] = []
    for source in sources:
        left = [one for one in wanted if not store.run(one.run).path.exists()]
        try:
            known = History.read(source.store.path).origins() if source.same_plan and left else {}
        except DamagedFile as error:
            note(f"no runs of {source.store.path} are copied: {error}")
            continue
        for index, one in enumerate(left):
            if stop():
                return copied
            progress(f"copying runs of {source.store.path.name}", index / len(left))
            origin = known.get(one.run, "") if source.same_plan else source.store.path.name
            if _copy(source, store, one, origin):
                copied.append(one.run)
                stop.advance()
    return copied


def _copy(source: Source, store: Store, wanted: Wanted, origin: str) -> bool:
    """Copy a run under a temporary name, check it, record its origin in history.jsonl, if any, and rename it."""
    staging = store.path / "runs" / f".copies.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    staged, target = RunDirectory(staging / wanted.run), store.run(wanted.run).path
    try:
        if not _stage(source, staged, wanted):
            return False
        with exclusive(store.path):
            if target.exists():  # another process was faster
                return False
            if origin:  # before the rename: a copied run is never without its mark
                History(store.path / HISTORY, []).copied(origin, [wanted.run])
            return _renamed(staged.path, target)
    except OSError as error:
        raise UserError(
            f"cannot copy runs of {source.store.path} to {store.path}: {error.strerror}"
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _stage(source: Source, staged: RunDirectory, wanted: Wanted) -> bool:
    """Copy a finished run to a temporary directory and check it; return whether it can be used."""
    run = source.store.run(staged.id)
    if not run.finished():
        return False
    for path in _files(run):
        place = staged.path / path.relative_to(run.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            shutil.copyfile(path, place, follow_symlinks=False)
    if not _usable(staged, wanted.probes):
        return False
    if wanted.weights == "no":
        staged.delete_weights()
    elif wanted.weights == "until probed" and staged.weights.is_file():
        staged.keep_weights_until_probed()
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
