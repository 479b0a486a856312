"""Export and import of finished runs as one archive without checkpoints. Imported content is not trusted."""

from __future__ import annotations

import io
import json
import lzma
import re
import tarfile
import time
import zlib
from pathlib import Path
from typing import Any, Literal

from headtohead.common.errors import UnreadableFile, UserError
from headtohead.common.files import open_output, write_atomic
from headtohead.common.schema import check_schema
from headtohead.study.probes import PROBES, is_valid
from headtohead.study.store.history import MAX_BYTES, History, parse_rows
from headtohead.study.store.history import NAME as HISTORY
from headtohead.study.store.run_store import RUN_ID, RunDirectory, Store
from headtohead.study.store.validation import validate_result, validate_spec, verify_checksum

FILES = ("spec.json", "environment.json", "metrics.jsonl", "cost.json", "tokenizer.json", "result.json")
_PROBE_FILE = re.compile(rf"probes/(?:{'|'.join(PROBES)})(?:-[0-9a-f]{{8}})?\.json")
_MAX_BYTES = 256 * 2**20
_MAX_PROBE_BYTES = 8 * 2**20


def export_runs(store: Store, target: Path) -> int:
    """Write all finished runs of a study and its history to a .tar.gz or .tar.xz file; return the number of runs.

    Damaged runs are skipped.
    """
    finished = [run for run in store.runs() if run.finished() and _whole(run)]
    if not finished:
        raise UserError(f"{store.path} has no finished runs to export")
    mode: Literal["w:xz", "w:gz"] = "w:xz" if target.suffix == ".xz" else "w:gz"
    try:
        with open_output(target) as stream, tarfile.open(target.name, mode, fileobj=stream) as archive:
            for run in finished:
                _add(archive, f"{run.id}/spec.json", json.dumps(_portable(run.spec()), indent=1).encode())
                for name in (*_probe_files(run), *FILES[1:]):
                    if (run.path / name).is_file() and not (run.path / name).is_symlink():
                        archive.add(run.path / name, f"{run.id}/{name}", recursive=False)
            if rows := History.read(store.path).rows:
                _add(archive, HISTORY, "".join(json.dumps(row) + "\n" for row in rows).encode())
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from None
    return len(finished)


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
    """Return the names of a run's undamaged probe files."""
    names = [f"probes/{path.name}" for path in sorted((run.path / "probes").glob("*.json"))]
    return [
        name
        for name in names
        if _PROBE_FILE.fullmatch(name) and not validate_probe(run, name, (run.path / name).read_bytes())
    ]


def validate_probe(run: RunDirectory, name: str, content: bytes) -> str:
    """Return the problem of a probe's file (checksum, name, content), or an empty string."""
    try:
        value = verify_checksum(content)
    except (ValueError, RecursionError) as error:
        return str(error)
    check_schema(value, run.path / name)
    if not isinstance(value, dict) or not isinstance(value.get("probe"), str):
        return "no probe name"
    if run.probe_path(value["probe"]) != run.path / name or not is_valid(value["probe"], value.get("found")):
        return f"not a result of probe {value['probe'][:80]}"
    return ""


def _whole(run: RunDirectory) -> bool:
    try:
        return bool(run.spec() and run.result())
    except UnreadableFile:
        return False


def import_runs(store: Store, source: Path) -> tuple[int, int]:
    """Add the missing runs of an archive; return the number of new and of known runs.

    A member is written only if its path is a run id and a known file name, and a run only if its id is the hash of its
    identity.
    """
    if not source.is_file():
        raise UserError(f"no such file: {source}")
    runs: dict[str, dict[str, bytes]] = {}
    rows: list[dict[str, Any]] = []
    try:
        with tarfile.open(source, "r:*") as archive:
            for member in archive:
                if member.name == HISTORY and member.isfile() and member.size <= MAX_BYTES:
                    rows, damaged = parse_rows((archive.extractfile(member) or io.BytesIO()).read(MAX_BYTES))
                    if damaged:
                        raise UserError(f"{source}: {HISTORY} is damaged")
                    continue
                run_id, _, name = member.name.partition("/")
                if (
                    not member.isfile()
                    or not RUN_ID.fullmatch(run_id)
                    or not (name in FILES or _PROBE_FILE.fullmatch(name))
                ):
                    raise UserError(f"{source} is not an export of runs: it contains '{member.name}'")
                if member.size > (_MAX_BYTES if name in FILES else _MAX_PROBE_BYTES):
                    raise UserError(f"{source}: {member.name} claims {member.size:,} bytes")
                stream = archive.extractfile(member)
                runs.setdefault(run_id, {})[name] = (stream or io.BytesIO()).read(_MAX_BYTES)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{source} cannot be read as an export of runs: {cause}") from None
    store.make()
    known = 0
    for run_id, files in runs.items():
        run = store.run(run_id)
        _check_newer(source, run_id, files)
        _check_archive_rows(source, run, files)
        known += run.finished()
        probes = [name for name in files if name not in FILES]
        if probes:
            (run.path / "probes").mkdir(parents=True, exist_ok=True)
        # A known run receives its missing probes; result.json is written last.
        for name in [*probes, *(() if run.finished() else FILES)]:
            if name in files and not (name in probes and (run.path / name).exists()):
                run.path.mkdir(parents=True, exist_ok=True)
                write_atomic(run.path / name, files[name])
    History.read(store.path).imported(source.name, len(runs) - known, rows)
    return len(runs) - known, known


def _check_newer(source: Path, run_id: str, files: dict[str, bytes]) -> None:
    """Raise NewerFile if a file has a newer schema; damaged files are reported elsewhere."""
    for name, content in files.items():
        if not name.endswith(".json") or name == "tokenizer.json":
            continue
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            continue
        check_schema(value, f"{source}: {run_id}/{name}")


def _check_archive_rows(source: Path, run: RunDirectory, files: dict[str, bytes]) -> None:
    try:
        spec, result = json.loads(files["spec.json"]), verify_checksum(files["result.json"])
        problem = validate_spec(spec, run.id) or validate_result(result)
    except (KeyError, ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise UserError(f"{source}: run {run.id} is damaged or does not match its id: {problem}")
    for name in (name for name in files if name not in FILES):
        if problem := validate_probe(run, name, files[name]):
            raise UserError(f"{source}: {run.id}/{name} is damaged: {problem}")
