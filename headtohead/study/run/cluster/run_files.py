"""Copies of run directories: what changed in the one of a task, and the same changes applied to the store.

The parts of a directory depend on each other: a checkpoint needs the rows of metrics.jsonl up to its step, and
result.json means that everything else is there. They are therefore read in one order and written in the opposite one:
a task reads result.json first and metrics.jsonl last, and the driver writes result.json last.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from headtohead.common.errors import UnreadableFile, UserError
from headtohead.common.files import read_file, sync_directory, write_atomic
from headtohead.study.run.cluster.messages import Changes, Unit
from headtohead.study.store.run_store import RunDirectory

_FOLDERS = ("checkpoint", "branches", "probes")
_KNOWN = re.compile(
    r"(metrics\.jsonl|environment\.json|cost\.json|tokenizer\.json|failure\.txt|result\.json"
    r"|probes/[\w.-]+\.json|checkpoint/(step-\d{10}|final\.(safetensors|sha256|until_probed))|branches/step-\d{10})"
)
"""The units of a run directory that are copied: all but spec.json, which the driver wrote, and the lock."""
_DELETED = re.compile(
    r"checkpoint/(step-\d{10}|final\.(safetensors|sha256|until_probed))|branches/step-\d{10}"
)
"""The units that a task may delete: checkpoints, and weights that were kept for probes only."""
_FILE = re.compile(r"[\w-][\w.-]*")
_MAX_BYTES = 2**40
Signature = tuple[int, int, int]


def units_of(folder: Path) -> dict[str, Signature]:
    """Return the units of a run directory with what changes when they are written again."""
    paths = [path for path in _listed(folder) if path.is_file()]
    for name in _FOLDERS:
        paths += _listed(folder / name)
    found = {}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if _KNOWN.fullmatch(name) and (signature := _signature(path)):
            found[name] = signature
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _signature(path: Path) -> Signature | None:
    try:
        facts = path.stat()
    except OSError:  # deleted meanwhile
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


class SentFiles:
    """What of a run's directory the driver already has."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._sent = units_of(run.path)
        self._next = dict(self._sent)

    def changes(self) -> Changes | None:
        """Return what changed since the last `sent`, or None."""
        now = units_of(self.run.path)
        changed = [name for name in now if now[name] != self._sent.get(name)]
        units = []
        for name in sorted(changed, key=_order, reverse=True):
            unit = _read(self.run.path, name)
            if unit is None:  # deleted or replaced while it was read; the next call finds what is there then
                now.pop(name)
            else:
                units.append(unit)
        present = [name for name in now if _DELETED.fullmatch(name)]
        self._next = now
        return Changes(self.run.id, units, present) if units or now.keys() != self._sent.keys() else None

    def sent(self) -> None:
        """Record that the driver has the last changes."""
        self._sent = self._next


def apply_changes(run: RunDirectory, changes: Changes) -> None:
    """Write the changed units of a run to its directory in the store, each atomically."""
    for unit in changes.units:
        if not _KNOWN.fullmatch(unit.name):
            raise UserError(f"'{unit.name[:80]}' is not a file of a run")
    last = [unit for unit in changes.units if unit.name == "result.json"]
    for unit in sorted(
        (unit for unit in changes.units if unit not in last), key=lambda unit: _order(unit.name)
    ):
        _write(run.path / unit.name, unit)
    # The last checkpoint is deleted only with the result: the task may die between the two.
    newer = last or run.finished() or any(name.startswith("checkpoint/") for name in changes.present)
    for name in filter(_DELETED.fullmatch, units_of(run.path)):
        if name in changes.present or not (newer or name.startswith("branches/")):
            continue
        if (path := run.path / name).is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for unit in last:
        _write(run.path / unit.name, unit)


def _order(name: str) -> tuple[int, str]:
    """Return the position at which a unit is written."""
    kinds = ("metrics.jsonl", "environment.json", "probes/", "checkpoint/", "branches/", "result.json")
    place = next((index for index, start in enumerate(kinds) if name.startswith(start)), 1)
    # A checksum is written before the weights it is for, as `RunDirectory.keep_weights` does.
    return place, name.replace(".sha256", ".a")


def _read(folder: Path, name: str) -> Unit | None:
    path = folder / name
    before = _signature(path)
    try:
        if path.is_dir():
            files = {file.name: read_file(file, _MAX_BYTES) for file in sorted(path.iterdir())}
        else:
            files = {"": read_file(path, _MAX_BYTES)}
    except (OSError, UnreadableFile):
        return None
    # Growing files such as metrics.jsonl may have changed; what was read is then newer than the signature says.
    return (
        Unit(name, files) if before is not None and (path.is_file() or _signature(path) == before) else None
    )


def _write(path: Path, unit: Unit) -> None:
    path.parent.mkdir(exist_ok=True)
    if unit.files.keys() == {""}:
        write_atomic(path, unit.files[""])
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for name, content in unit.files.items():
            if not _FILE.fullmatch(name):
                raise UserError(f"'{name[:80]}' is not a file of a checkpoint")
            write_atomic(temporary / name, content)
        if path.is_dir():
            shutil.rmtree(path)
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(path.parent)
