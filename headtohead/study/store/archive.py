"""Export and import of finished runs as one archive without checkpoints. Imported content is not trusted."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shutil
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from headtohead.common.errors import MissingFile, UnreadableFile, UserError, first_line
from headtohead.common.files import open_output, open_regular, sync_directory, with_checksum
from headtohead.common.schema import read_document
from headtohead.study.probes import PROBES as KINDS
from headtohead.study.probes import read_found
from headtohead.study.store.history import MAX_BYTES, History, Row, parse_rows
from headtohead.study.store.history import NAME as HISTORY
from headtohead.study.store.result import NO_COST, read_cost, validate_cost, validate_match
from headtohead.study.store.run_store import PROBES, RUN_ID, RunDirectory, Store, validate_owner
from headtohead.study.store.tar_stream import DAMAGE, TarStream

FILES = {
    "spec.json": 4 * 2**20,
    "environment.json": 16 * 2**20,
    "metrics.jsonl": 16 * 2**20,
    "cost.json": 2**20,
    "tokenizer.json": 256 * 2**20,
    "result.json": 16 * 2**20,
}
"""The files of an exported run in the order in which they are added, and their size limits."""
_PROBE_FILE = re.compile(rf"{PROBES}/(?:{'|'.join(KINDS)})(?:-[0-9a-f]{{8}})?\.json")
_MAX_PROBE_BYTES = 8 * 2**20


def export_runs(store: Store, target: Path, runs: Sequence[RunDirectory] | None = None) -> int:
    """Write the finished runs of a study and its history to a .tar.gz or .tar.xz file; return the number of runs.

    `runs` are those to write; None: all. Damaged runs and files are skipped.
    """
    finished = [run for run in (store.runs() if runs is None else runs) if run.finished() and _whole(run)]
    if not finished:
        raise UserError(f"{store.path} has no finished runs to export")
    mode: Literal["w:xz", "w:gz"] = "w:xz" if target.suffix == ".xz" else "w:gz"
    try:
        with open_output(target) as stream, tarfile.open(target.name, mode, fileobj=stream) as archive:
            for run in finished:
                spec = _portable(run.document("spec.json"))
                _add(archive, f"{run.id}/spec.json", with_checksum(spec).encode())
                for name in (*_probe_files(run), *FILES):
                    if name != "spec.json" and _exportable(run, name):
                        archive.add(run.path / name, f"{run.id}/{name}", recursive=False)
            if rows := History.read(store.path).rows:
                _add(archive, HISTORY, "".join(json.dumps(row.content) + "\n" for row in rows).encode())
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from None
    return len(finished)


def _exportable(run: RunDirectory, name: str) -> bool:
    """Return whether a file of a finished run exists, is undamaged and belongs to the run."""
    path = run.path / name
    if not path.is_file() or path.is_symlink():
        return False
    try:
        if name == "metrics.jsonl":
            result = run.result()
            assert result is not None  # only finished runs are exported
            run.check_metrics_unchanged(result)
        elif name == "cost.json":
            return run.costs(run.result()) != NO_COST
        elif name == "environment.json":
            run.document(name)
        elif name not in FILES:
            return bool(_PROBE_FILE.fullmatch(name)) and not validate_probe(run, name)
    except UnreadableFile:
        return False
    return True


def _portable(record: dict[str, Any]) -> dict[str, Any]:
    """Return a run's record without paths of the local machine; the export includes the tokenizer."""
    record = {name: value for name, value in record.items() if name != "start_path"}
    kind, _, path = record["corpus"]["tokenizer"].partition(":")
    if kind == "file":
        record["corpus"] = record["corpus"] | {"tokenizer": f"file:{Path(path).name}"}
    return record


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(content), int(time.time())
    archive.addfile(entry, io.BytesIO(content))


def _probe_files(run: RunDirectory) -> list[str]:
    """Return the names of a run's probe files."""
    return [f"{PROBES}/{path.name}" for path in sorted((run.path / PROBES).glob("*.json"))]


def validate_probe(run: RunDirectory, name: str) -> str:
    """Return the problem of a probe's file (checksum, name, content), or an empty string."""
    try:
        value = read_document(run.path / name)
    except UnreadableFile as error:
        return str(error).partition(": ")[2]
    if not isinstance(value, dict) or not isinstance(value.get("probe"), str):
        return "no probe name"
    if problem := validate_owner(value, run.id):
        return problem
    try:
        if run.probe_path(value["probe"]) == run.path / name:
            read_found(value["probe"], value.get("found"))
            return ""
    except ValueError:
        pass
    return f"not a result of probe {value['probe'][:80]}"


def _whole(run: RunDirectory) -> bool:
    try:
        return bool(run.spec() and run.result())
    except UnreadableFile:
        return False


def import_runs(store: Store, source: Path) -> tuple[int, int]:
    """Add the missing runs of an archive; return the number of new and of known runs.

    The archive is unpacked into a temporary directory and checked there; if anything in it is rejected, the store does
    not change. A member is unpacked only if its path is a run id and a known file name, and a run is added only if its
    id is the hash of its identity.
    """
    place = next(path for path in (store.path, *store.path.parents) if path.is_dir())
    staging = place / f".import.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        staging.mkdir()
        rows = _unpack(source, staging)
        runs = [RunDirectory(path) for path in sorted(staging.iterdir())]
        for run in runs:
            check_run(run)
        store.make()
        with History.changing(store.path) as history:
            known = sum(_add_run(store.run(run.id), run) for run in runs)
            history.imported(source.name, len(runs) - known, rows)
    except UserError as error:
        raise type(error)(str(error).replace(f"{staging}/", f"{source}: ")) from None
    except OSError as error:
        raise UserError(f"cannot import {source} into {store.path}: {error.strerror}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return len(runs) - known, known


def _unpack(source: Path, staging: Path) -> list[Row]:
    """Write the runs of an archive to `staging` and return the rows of its history; the content is not checked yet."""
    rows: list[Row] = []
    with open_regular(source, links=True) as file:
        stream = TarStream(file)
        try:
            for member, content in stream.members():
                name = member.name
                if name == HISTORY:
                    rows, damaged = parse_rows(b"".join(_limited(member, content, MAX_BYTES)))
                    if damaged:
                        raise UserError(f"{source}: {HISTORY} is damaged")
                    continue
                run_id, _, file_name = name.partition("/")
                limit = _MAX_PROBE_BYTES if _PROBE_FILE.fullmatch(file_name) else FILES.get(file_name, 0)
                if not RUN_ID.fullmatch(run_id) or not limit:
                    raise UserError(f"{source} is not an export of runs: it contains {name[:80]!a}")
                path = staging / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "xb") as target:
                    target.writelines(_limited(member, content, limit))
                    target.flush()
                    os.fsync(target.fileno())
                _check_newer(path)
        except DAMAGE as error:
            raise UserError(f"{source} cannot be read as an export of runs: {first_line(error)}") from None
    return rows


def _limited(member: tarfile.TarInfo, content: IO[bytes], limit: int) -> Iterator[bytes]:
    if not 0 <= member.size <= limit:
        raise tarfile.ReadError(f"{member.name} claims {member.size:,} bytes; the limit is {limit:,}")
    while chunk := content.read(2**16):
        yield chunk


def _check_newer(path: Path) -> None:
    """Raise NewerFile if a file has a newer schema; damaged files are reported later."""
    if path.suffix == ".json" and path.name != "tokenizer.json":
        with suppress(UnreadableFile):
            read_document(path)


def check_run(run: RunDirectory) -> None:
    """Raise UserError if a finished run is incomplete, damaged, or does not match its id."""
    try:
        spec, result = run.spec(), run.result()
        problem = "no result.json" if result is None else validate_match(spec, result)
    except UnreadableFile as error:
        problem = str(error)
    if problem:
        raise UserError(f"{run.path} is damaged or does not match its id: {problem}")
    assert result is not None
    try:
        with suppress(MissingFile):
            if problem := validate_cost(read_cost(run.document("cost.json")), result):
                raise UserError(f"{run.path / 'cost.json'} is damaged: {problem}")
        with suppress(MissingFile):
            run.document("environment.json")
        run.check_metrics_unchanged(result)
    except UnreadableFile as error:
        raise UserError(str(error)) from None
    except ValueError as error:
        raise UserError(f"{run.path / 'cost.json'} is damaged: {error}") from None
    for name in _probe_files(run):
        if problem := validate_probe(run, name):
            raise UserError(f"{run.path / name} is damaged: {problem}")


def _add_run(run: RunDirectory, staged: RunDirectory) -> bool:
    """Move the missing files of an unpacked run into the store; return whether the run already has a result.

    A finished run receives its missing probes only; result.json is moved last.
    """
    known = run.finished()
    probes = [name for name in _probe_files(staged) if not (run.path / name).exists()]
    for name in [*probes, *(() if known else FILES)]:
        if (staged.path / name).exists():
            target = run.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged.path / name, target)
            sync_directory(target.parent)
    return known
