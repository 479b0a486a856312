"""Checks a study's directory for damage and repairs what is safe to repair.

Safe means that no data is deleted. A damaged file is renamed (`result.json.damaged`), and the study's own command then
repeats that run. Locks and temporary files of dead processes are removed.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headtohead.common.errors import DamagedFile, MissingFile, UnreadableFile, UserError
from headtohead.common.files import canonical_json, digest_file
from headtohead.common.memory import gc_paused
from headtohead.common.schema import read_document
from headtohead.study.store.archive import validate_probe
from headtohead.study.store.frozen import NAME as LOCK_NAME
from headtohead.study.store.frozen import Lock, read_lock, valid_seconds, write_lock
from headtohead.study.store.history import NAME as HISTORY
from headtohead.study.store.history import History
from headtohead.study.store.lease import owner_of, released
from headtohead.study.store.manifest import Contest, read_manifest
from headtohead.study.store.result import RunResult, read_cost, validate_cost, validate_match
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import DAMAGED, PROBES, RUN_ID, RunDirectory, Store, set_aside
from headtohead.study.store.shared import NAME as UPDATE_LOCK
from headtohead.study.store.shared import exclusive
from headtohead.training.checkpoint import checkpoint_paths, read_checkpoint

_OLD_SECONDS = 3600.0
"""A temporary file or ownerless lock is stale after this time without a change."""
_TAKEN_OVER = "h2h race takes it over after watching it for a minute"
_ROOM_BYTES = 2**30
_TEMPORARY = re.compile(r"\..+\.(\d+)(\.[0-9a-f]{8})?\.tmp")

Specs = dict[str, RunSpec | UnreadableFile]
_AGAIN = "the study's own command writes it again"


@dataclass
class Finding:
    """One problem in a study's directory."""

    path: Path
    problem: str
    """What is wrong."""
    remedy: str
    """What the repair does, or what the user has to do."""
    repair: Callable[[], object] | None = None
    """Repairs it, if that is safe; if it turns out to be impossible, returns as text what to do instead."""
    repaired: bool = False

    def __str__(self) -> str:
        done = "repaired" if self.repaired else "can be repaired" if self.repair else "not repaired"
        return f"{done}: {self.path}: {self.problem}; {self.remedy}"


@gc_paused()
def examine(
    folder: Path, progress: Callable[[str, float], None] = lambda message, share: None
) -> list[Finding]:
    """Return all problems in a study's directory without changing it."""
    if not folder.is_dir():
        raise UserError(f"no study in {folder}: no such directory")
    store = Store(folder)
    runs = store.runs()
    specs = {run.id: _spec(run) for run in runs}
    findings = [*_study_files(folder, bool(runs)), *_strays(folder), *_entries(store, specs)]
    for name in ("lock", UPDATE_LOCK):
        findings += _lock(folder / name)
    trunks = {run.id for run in runs if run.branches.is_dir()}
    ended = _ended_branches(runs, specs) if trunks else {}
    for index, run in enumerate(runs):
        progress("checking runs", index / len(runs))
        spec = specs[run.id]
        findings += _run(run, spec)
        if run.id in trunks:
            steps = set() if isinstance(spec, UnreadableFile) else set(spec.branches)
            findings += _kept(run, steps, ended.get(run.id, set()))
    return findings


def _spec(run: RunDirectory) -> RunSpec | UnreadableFile:
    """Return the spec of a run, or why it cannot be read."""
    try:
        return run.spec()
    except UnreadableFile as error:
        return error


def _ended_branches(runs: list[RunDirectory], specs: Specs) -> dict[str, set[int]]:
    """Return the steps of each trunk whose branches have a result, by the trunk's id."""
    found: dict[str, set[int]] = {}
    for run in runs:
        spec = specs[run.id]
        if isinstance(spec, RunSpec) and spec.parent and run.finished():
            found.setdefault(spec.parent.run, set()).add(spec.parent.step)
    return found


def repair(findings: list[Finding]) -> None:
    """Repair every finding that is safe to repair."""
    for finding in findings:
        if finding.repair is not None:
            instead = finding.repair()
            if isinstance(instead, str):
                finding.remedy, finding.repair = instead, None
            else:
                finding.repaired = True


def _study_files(folder: Path, has_runs: bool) -> Iterator[Finding]:
    study, lock = folder / "study.json", folder / LOCK_NAME
    try:
        read_manifest(study)
    except MissingFile:
        if has_runs:
            yield Finding(study, "missing", _AGAIN)
    except UnreadableFile as error:
        yield _aside(study, error, _AGAIN)
    try:
        read_lock(folder)
    except UnreadableFile as error:
        remedy = "restored from study.json; seeds not listed there count as added after results existed"
        yield Finding(lock, _cause(error), remedy, lambda: _renew_lock(lock, study))
    try:
        if damaged := History.read(folder).damaged:
            remedy = "left unchanged; verdicts mention it"
            yield Finding(folder / HISTORY, f"{damaged} rows are damaged", remedy)
    except DamagedFile as error:
        yield _aside(folder / HISTORY, error, "renamed; what the study reported earlier is lost")
    free = shutil.disk_usage(folder).free
    if free < _ROOM_BYTES:
        problem = f"only {free / 2**20:,.0f} MiB of disk space left"
        yield Finding(folder, problem, "free some space before continuing")


def _entries(store: Store, specs: Specs) -> Iterator[Finding]:
    """Compare study.json with the specs of its runs: each run has the seed it is listed with, and an arm has one setup."""
    study = store.path / "study.json"
    try:
        manifest, _ = read_manifest(study)
    except UnreadableFile:  # missing or damaged: reported elsewhere
        return
    setups: dict[tuple[Contest, str], str] = {}
    for entry in (*manifest.entries, *manifest.trunks):
        problem = f"run {entry.run[:40]} is not a run of {entry.label} with seed {entry.seed}"
        if RUN_ID.fullmatch(entry.run):
            if not isinstance(
                spec := specs.get(entry.run), RunSpec
            ):  # missing or damaged: reported elsewhere
                continue
            identity = spec.identity
            # The id of a branch's parent depends on the seed.
            setup = canonical_json({key: identity[key] for key in identity if key not in ("seed", "parent")})
            known = setups.setdefault((entry.contest, entry.label), setup)
            if identity["seed"] == entry.seed and known == setup:
                continue
        yield _aside(study, problem, _AGAIN)
        return


def _renew_lock(lock: Path, study: Path) -> None:
    """Rename the damaged lock and restore seeds and seconds per step from study.json."""
    with exclusive(lock.parent):
        try:
            manifest, added = read_manifest(study)
            planned = [seed for seed in manifest.seeds if seed not in added]
            seconds = valid_seconds(read_document(study).get("seconds"))
        except UnreadableFile:
            planned, seconds = [], {}
        set_aside(lock)
        write_lock(lock.parent, Lock({}, recovered=planned, seconds=seconds))


def _strays(folder: Path) -> Iterator[Finding]:
    yield from _temporaries(folder, folder / "runs")
    for path in _entries_of(folder / "runs"):
        if not RUN_ID.fullmatch(path.name) and not _TEMPORARY.fullmatch(path.name):
            yield Finding(path, "not a run", "left unchanged; remove it if you do not need it")


def _run(run: RunDirectory, spec: RunSpec | UnreadableFile) -> Iterator[Finding]:
    yield from _temporaries(run.path, run.checkpoints, run.path / PROBES, run.branches)
    for path in _entries_of(run.path / PROBES):
        if path.suffix == ".json" and (problem := validate_probe(run, f"{PROBES}/{path.name}")):
            yield _aside(path, problem, "renamed; the study's own command runs the probe again")
    yield from _lock(run.path / "lock")
    finished = None
    if isinstance(spec, DamagedFile):
        yield _aside(run.path / "spec.json", spec, _AGAIN)
    elif isinstance(spec, UnreadableFile):
        yield Finding(run.path / "spec.json", _cause(spec), _AGAIN)
    try:
        finished = run.result()
        if isinstance(spec, RunSpec) and finished is not None and (problem := validate_match(spec, finished)):
            raise DamagedFile(f"damaged file {run.path / 'result.json'}: {problem}")
    except DamagedFile as error:
        remedy = "renamed; the study's own command repeats the run"
        yield _aside(run.path / "result.json", error, remedy)
    yield from _metrics(run, finished)
    for name in ("cost.json", "environment.json"):
        if problem := _fact_problem(run, name, finished):
            yield _aside(run.path / name, problem, "renamed; the result does not depend on it")
    if os.path.lexists(run.weights):
        try:
            run.check_weights_unchanged()
        except DamagedFile as error:
            yield _aside(run.weights, error, "renamed; the result stays valid, the trained model is lost")
    if finished is None:
        yield from _checkpoints(run.checkpoints, "renamed; the previous checkpoint is used")
    else:
        for path in checkpoint_paths(run.checkpoints):
            yield Finding(path, "the run is done", "removed", partial(shutil.rmtree, path))


def _checkpoints(folder: Path, remedy: str) -> Iterator[Finding]:
    """Find damaged checkpoints."""
    for path in checkpoint_paths(folder):
        try:
            read_checkpoint(path)
        except UnreadableFile as error:
            yield _aside(path, error, remedy)


def _kept(trunk: RunDirectory, steps: set[int], done: set[int]) -> Iterator[Finding]:
    """Check the checkpoints that a trunk keeps at `steps` until each of its branches has a result, as those in `done`."""
    if steps and steps <= done:
        remove = partial(shutil.rmtree, trunk.branches)
        yield Finding(trunk.branches, "the branches of this trunk are done", "removed", remove)
    else:
        yield from _checkpoints(trunk.branches, "renamed; its branch repeats the trunk's steps")


def _fact_problem(run: RunDirectory, name: str, result: RunResult | None) -> str:
    """Return what is wrong with cost.json or environment.json, or an empty string."""
    try:
        found = run.document(name)
        if name == "cost.json":
            return validate_cost(read_cost(found), result)
    except UnreadableFile as error:
        return "" if isinstance(error, MissingFile) else _cause(error)
    except ValueError as error:
        return str(error)
    return "" if run.environments() else "no environments"


def _metrics(run: RunDirectory, finished: RunResult | None) -> Iterator[Finding]:
    path = run.path / "metrics.jsonl"
    with suppress(OSError, UnreadableFile):
        if finished is not None and run.costs().metrics_sha256 == digest_file(path):
            return  # complete lines when the run ended, and the same bytes now
    damage: list[str] = []
    rows = run.logged_rows(damage=damage)
    if damage and not rows:
        yield _aside(path, _cause(damage[0]), "renamed; the result does not depend on it")
        return
    if rows and finished is not None:
        try:
            run.check_metrics_unchanged(finished)
        except DamagedFile as error:
            yield Finding(path, _cause(error), "reports leave out its curve; the result is not affected")
    if damage and (finished is not None or run.owner() is None):
        yield Finding(path, _cause(damage[0]), "those rows are dropped", run.keep_rows)


def _lock(lock: Path) -> Iterator[Finding]:
    try:
        idle = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return
    owner = owner_of(lock)

    def release() -> str | None:
        return None if released(lock) else _TAKEN_OVER

    if owner is not None and owner.dead:
        yield Finding(lock, f"{owner} is dead", "removed", release)
    elif idle > _OLD_SECONDS and owner is None:
        yield Finding(lock, "no owner", "removed", release)
    elif idle > _OLD_SECONDS and owner is not None and not owner.here:
        yield Finding(lock, f"{owner} has not updated it for {idle / 3600:.0f} hours", _TAKEN_OVER)


def _entries_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: path.name) if folder.is_dir() else []


def _temporaries(*folders: Path) -> Iterator[Finding]:
    """Find temporary files of processes that died during a write."""
    for path in (path for folder in folders for path in _entries_of(folder)):
        if _TEMPORARY.fullmatch(path.name) and time.time() - path.lstat().st_mtime >= _OLD_SECONDS:
            whole = path.is_dir() and not path.is_symlink()
            remove = partial(shutil.rmtree, path) if whole else path.unlink
            yield Finding(path, "unfinished write", "removed", remove)


def _aside(path: Path, error: UserError | str, remedy: str) -> Finding:
    problem = error if isinstance(error, str) else _cause(error)
    return Finding(path, problem, f"{remedy} (kept as {path.name}{DAMAGED})", partial(set_aside, path))


def _cause(error: UserError | str) -> str:
    """Return an error message without the path at its start."""
    return str(error).partition(": ")[2] or str(error)
