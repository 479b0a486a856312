"""Files that travel from the driver to the nodes: what a study's runs read, and the state of runs that continue.

Every file is known by its sha256. A node uses its own file at the same path if the content is equal, then its cache,
and asks the driver only for what it lacks, so a file travels to a node once.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from headtohead.common.errors import UnreadableFile, UserError
from headtohead.common.files import canonical_json, digest, digest_file, read_file, replacing, write_atomic
from headtohead.data.locate import cache_dir, data_folder
from headtohead.data.shards import Prepared, prepare, prepared_place
from headtohead.data.tasks.registry import task_files, task_kind
from headtohead.data.tasks.synthetic import SYNTHETIC
from headtohead.study.plan.dataset import data_of
from headtohead.study.plan.plan import Plan
from headtohead.study.probes import PROBES
from headtohead.study.run.cluster.messages import ShippedFile
from headtohead.study.run.cluster.run_files import units_of
from headtohead.study.store.lease import Owner, this_host
from headtohead.study.store.programs import FILE, user_files
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import RunDirectory, Store

DATA = "data"
"""The data directory among the places of inputs."""
Fetch = Callable[[dict[str, Path]], None]
"""Writes the contents with these sha256, from the driver, to these paths."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The files that the runs of a study read, and where specs name them."""

    files: tuple[ShippedFile, ...]
    moved: dict[str, str]


def study_inputs(plan: Plan, runs: Sequence[RunSpec], data_dir: str) -> Inputs:
    """Return the files that runs of a plan read: prepared corpora, tasks, tokenizers, mechanisms, initial weights."""
    files: dict[str, ShippedFile] = {}
    moved: dict[str, str] = {}

    def add(place: str, path: Path) -> None:
        files[place] = shipped_file(place, path)

    def add_corpus(corpus: Prepared, name: str, tokenizer: str) -> None:
        for path in sorted(corpus.folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                add(f"{DATA}/{prepared_place(name, tokenizer)}/{path.name}", path)

    def add_task(name: str) -> None:
        for path in task_files(name, data_dir or None).values():
            with suppress(ValueError):  # files of older versions lie in the cache; such a task is read there
                add(f"{DATA}/{path.relative_to(data_folder(data_dir or None)).as_posix()}", path)

    for run in {(run.corpus.name, run.corpus.tokenizer): run for run in runs}.values():
        data = data_of(plan.dataset(run))
        if isinstance(data, Prepared):
            add_corpus(data, run.corpus.name, run.corpus.tokenizer)
            continue
        if run.corpus.name.partition(":")[0] not in SYNTHETIC:
            add_task(run.corpus.name)
        if run.corpus.tokenizer.startswith("file:"):
            given = run.corpus.tokenizer.removeprefix("file:")
            moved[given] = f"tokenizers/{digest_file(Path(given), links=True)[:16]}.json"
            add(moved[given], Path(given))
    for probe in plan.spec.probes:
        name, _, argument = probe.partition(":")
        needs = PROBES[name].needs
        for source in needs(argument) if needs else ():
            if task_kind(source) is not None:
                add_task(source)
            else:
                add_corpus(prepare(source, data_dir=data_dir or None), source, "bytes")
    for given in {path for run in runs for path in user_files(run)}:
        path = Path(given).expanduser().resolve()
        moved[given] = f"mechanisms/{digest_file(path, links=True)[:16]}/{path.name}"
        add(moved[given], path)
    for folder in {run.start_path: run.start for run in runs if run.start}:
        start = RunDirectory(Path(folder))
        moved[folder] = f"starts/{start.id}"
        for name in ("spec.json", "checkpoint/final.safetensors", "checkpoint/final.sha256"):
            if (start.path / name).is_file():
                add(f"{moved[folder]}/{name}", start.path / name)
    return Inputs(tuple(files[place] for place in sorted(files)), moved)


def run_state(store: Store, group: Sequence[RunSpec]) -> tuple[tuple[ShippedFile, ...], dict[str, bytes]]:
    """Return the files of unfinished runs and the checkpoints that branches start from; and the other files of trunks.

    A trunk may still be training, so that its metrics.jsonl changes; a copy of today's is sent.
    """
    found: list[ShippedFile] = []

    def add(run: RunDirectory, name: str) -> None:
        path = run.path / name
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            found.append(shipped_file(_stored(run, file), file, keep=False))

    for run in (store.run(run.id) for run in group):
        for name in units_of(run.path):
            add(run, name)
    copies: dict[str, bytes] = {}
    for trunk, step in {(run.parent.run, run.parent.step) for run in group if run.parent}:
        folder = store.run(trunk)
        if (checkpoint := f"branches/step-{step:010d}") in units_of(folder.path):
            add(folder, checkpoint)
        for name in ("metrics.jsonl", "environment.json"):
            if (folder.path / name).is_file():
                copies[_stored(folder, folder.path / name)] = read_file(folder.path / name)
    return tuple(found), copies


def _stored(run: RunDirectory, path: Path) -> str:
    """Return the place of a run's file in a store."""
    return f"runs/{run.id}/{path.relative_to(run.path).as_posix()}"


def shipped_file(place: str, path: Path, keep: bool = True) -> ShippedFile:
    """Return a file of the driver as it is announced to the nodes."""
    path = path.resolve()
    facts = path.stat()
    sha256 = _digest(path, facts.st_mtime_ns, facts.st_size) if keep else digest_file(path)
    return ShippedFile(place, str(path), sha256, facts.st_size)


@lru_cache(maxsize=4096)
def _digest(path: Path, changed: int, size: int) -> str:
    return digest_file(path)


def may_share() -> bool:
    """Return whether this node may use files of the driver that it sees at the same path.

    H2H_SHARED=off on a node prevents that, for mounts that cannot rename or create files atomically.
    """
    return os.environ.get("H2H_SHARED", "on") != "off"


def unpack_inputs(files: Sequence[ShippedFile], fetch: Fetch) -> Path:
    """Return a directory of this node with the given files; made once, by one process at a time."""
    root = cache_dir() / "cluster"
    folder = root / "inputs" / digest(canonical_json([[file.place, file.sha256] for file in files]))[:20]
    kept = root / "files"
    for path in (folder.parent, kept):
        path.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "lock"):
        if (folder / ".complete").is_file():
            return folder
        found = {file.sha256: path for file in files for path in _candidates(file, kept) if _same(path, file)}
        lacking = {file.sha256: kept / file.sha256 for file in files if file.sha256 not in found}
        if lacking:
            fetch(lacking)
        for file in files:
            source = found.get(file.sha256, kept / file.sha256)
            _place(source, folder / file.place)
            _check(folder / file.place, file)
        (folder / ".complete").touch()
    return folder


def _candidates(file: ShippedFile, kept: Path) -> list[Path]:
    """Return where this node may have a file: at the driver's path, or in its cache."""
    return [*([Path(file.path)] if may_share() else []), kept / file.sha256]


def _same(path: Path, file: ShippedFile) -> bool:
    """Return whether a file of this node has the announced content."""
    try:
        return path.stat().st_size == file.size and digest_file(path) == file.sha256
    except (OSError, UnreadableFile):
        return False


def _check(path: Path, file: ShippedFile) -> None:
    if not _same(path, file):
        path.unlink(missing_ok=True)
        raise UserError(f"{file.path} changed on the driver while it was sent; start the study again")


def _place(source: Path, target: Path) -> None:
    """Link a file of the cache, which never changes; copy any other file, and across file systems."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if source.is_relative_to(cache_dir().resolve()):
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def unpack_state(files: Sequence[ShippedFile], copies: dict[str, bytes], folder: Path, fetch: Fetch) -> None:
    """Write the files of runs below `folder`."""
    for place, content in copies.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / place, content)
    lacking = {}
    for file in files:
        target = folder / file.place
        target.parent.mkdir(parents=True, exist_ok=True)
        if may_share() and _same(Path(file.path), file):
            shutil.copyfile(file.path, target)
        else:
            lacking[file.sha256] = target
    if lacking:
        fetch(lacking)
    for file in files:
        if not (folder / file.place).is_file():  # another one has the same content
            shutil.copyfile(lacking[file.sha256], folder / file.place)
        _check(folder / file.place, file)


def localized(spec: RunSpec, moved: dict[str, str], folder: Path) -> RunSpec:
    """Return a run with the paths of this node in place of the driver's."""

    def here(path: str) -> str:
        return str(folder / moved[path]) if path in moved else path

    layers = tuple(
        FILE.sub(lambda found: found[0].replace(found[1], here(found[1]), 1), text) for text in spec.layers
    )
    tokenizer = spec.corpus.tokenizer
    if tokenizer.startswith("file:"):
        tokenizer = f"file:{here(tokenizer.removeprefix('file:'))}"
    corpus = dataclasses.replace(spec.corpus, tokenizer=tokenizer)
    changed = dataclasses.replace(spec, layers=layers, corpus=corpus, start_path=here(spec.start_path))
    changed.__dict__["identity"] = spec.identity
    return changed


def write_chunks(path: Path, chunks: Iterable[bytes]) -> None:
    """Write the content of a fetched file."""
    with replacing(path) as stream:
        for chunk in chunks:
            stream.write(chunk)


def owned_name(prefix: str) -> str:
    """Return a name by which `remove_abandoned` recognizes what a process left behind when it was killed."""
    return f"{prefix}-{digest(this_host())[:8]}-{os.getpid()}-{secrets.token_hex(8)}"


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Delete what killed processes of this host and container left under names of `owned_name`."""
    for path in folder.glob(f"{prefix}-{digest(this_host())[:8]}-*"):
        pid = path.name.split("-")[-2]
        if not Owner(this_host(), int(pid) if pid.isdecimal() else 0).dead:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
