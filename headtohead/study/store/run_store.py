"""The run store: one directory per run, named after the hash of its spec; `result.json` present = done.

runs/ID/spec.json         what the run is
        environment.json  versions, device, commit, attention backend, of every stretch of work
        metrics.jsonl     one row per logged interval
        checkpoint/       where it stands; the trained weights and their checksum when it is done
        cost.json         clock, memory, throughput: what a repeat does not give again
        probes/           what was measured on the trained run besides its loss, a sealed file each
        result.json       written last, sealed with a checksum: only what a repeat gives again
        branches/         the checkpoints a trunk keeps until its branches are done
        lock              who works on it now
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from headtohead.common.errors import DamagedFile, MissingFile, UnreadableFile, UserError
from headtohead.common.files import digest, digest_file, finite, write_atomic
from headtohead.common.schema import read_document, with_schema, write_document
from headtohead.data.tasks.base import OWN_TOKENS
from headtohead.data.tokenizers import BytePairs, Bytes, Tokenizer
from headtohead.study.probes import Found, is_valid
from headtohead.study.store.lease import Owner, owner_of
from headtohead.study.store.validation import (
    RUN_ID,
    validate_result,
    validate_spec,
    verify_checksum,
    with_checksum,
)

DAMAGED = ".damaged"
PROBES = "probes"
_LONGEST_METRICS = 64 * 2**20
_LARGEST = 2**53
"""No count is larger; one that no float holds would end in an error later."""
_ROW_TYPES = {int, float, dict, type(None)}


class RunDirectory:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def id(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints stand."""
        return self.path / "checkpoint"

    @property
    def weights(self) -> Path:
        """The trained weights of a finished run."""
        return self.checkpoints / "final.safetensors"

    @property
    def branches(self) -> Path:
        """Where a trunk keeps the checkpoints that its branches start from."""
        return self.path / "branches"

    def open(self, record: dict[str, Any]) -> None:
        """Make the directory and write its spec, unless it is there; a damaged one is set aside."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None
        path = self.path / "spec.json"
        if path.is_file():
            try:
                self.spec()
                return
            except DamagedFile:
                set_aside(path)
        write_document(path, record)

    def spec(self) -> dict[str, Any]:
        """Return what the run is; a spec that is not what the run's name says is refused."""
        record = read_document(self.path / "spec.json")
        if words := validate_spec(record, self.id):
            raise DamagedFile(f"damaged file {self.path / 'spec.json'}: {words}")
        return dict(record)

    def finished(self) -> bool:
        """Whether there is a result; whether it is whole is known when it is read."""
        return (self.path / "result.json").is_file()

    def result(self, arrays: bool = False) -> dict[str, Any] | None:
        """Return the result of a finished run, or None; a damaged one is named. `arrays`: its blocks as arrays."""
        path = self.path / "result.json"
        try:
            result = read_document(path, verify_checksum)
        except MissingFile:
            return None
        if words := validate_result(result, arrays):
            raise DamagedFile(f"damaged file {path}: {words}")
        return dict(result)

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result, sealed with its checksum: the run is done."""
        write_atomic(self.path / "result.json", with_checksum(with_schema(result)))

    def owner(self) -> Owner | None:
        """Return who works on the run, or None; an owner that is certainly dead is none."""
        lock = self.path / "lock"
        found = owner_of(lock) if lock.is_file() else None
        return None if found is None or found.dead else found

    def state(self, result: dict[str, Any] | None = None) -> str:
        """Return done, diverged, failed, out of memory, damaged, running, stopped or waiting."""
        try:
            if (result := result or self.result()) is not None:
                return str(result["status"])
        except DamagedFile:
            return "damaged"
        if self.owner() is not None:
            return "running"
        return "stopped" if self.checkpoints.is_dir() else "waiting"

    def keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Keep a trained tokenizer beside the weights it belongs to."""
        if isinstance(tokenizer, BytePairs):
            write_atomic(self.path / "tokenizer.json", tokenizer.content)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer the run was trained with."""
        name = str(self.spec()["corpus"]["tokenizer"])
        if name == "bytes":
            return Bytes()
        if name == OWN_TOKENS:
            raise UserError(
                f"run {self.id} was trained on a task that draws tokens of its own: it has no text"
            )
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"run {self.id} was trained with {name}, and {path} is missing")
        return BytePairs(name, path.read_text(encoding="utf-8"))

    def metrics(self, every: int = 1) -> list[dict[str, Any]]:
        """Return the logged rows, or each so-many-th of them and the last.

        A line that was cut short by a crash, or is no row, is passed over.
        """
        path = self.path / "metrics.jsonl"
        if not path.is_file() or path.stat().st_size > _LONGEST_METRICS:
            return []
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if every > 1:
            lines = lines[::-every][::-1]
        try:  # one call for the whole file is three times faster than one per line
            found = json.loads(f"[{','.join(lines)}]")
        except (ValueError, RecursionError):
            found = [_row(line) for line in lines]
        return [row for row in found if _is_row(row)]

    def log(self, row: dict[str, Any]) -> None:
        """Append one row."""
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as stream:
            stream.write(json.dumps(finite(row), allow_nan=False) + "\n")

    def rewind(self, step: int) -> None:
        """Drop rows after `step`, and its evaluation: they are of work that will be repeated."""
        path = self.path / "metrics.jsonl"
        if path.is_file():
            rows = [row for row in self.metrics() if (row["step"], "valid" in row) <= (step, False)]
            write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))

    def reset(self) -> None:
        """Drop everything but the spec, so that the run starts anew."""
        for path in self.path.iterdir():
            if path.name not in ("spec.json", "lock"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def costs(self) -> dict[str, Any]:
        """Return what the run cost, or nothing where that is missing or damaged."""
        return self._facts("cost.json")

    def stretches(self) -> list[dict[str, Any]]:
        """Return where each stretch of the run was done, or nothing where that is missing or damaged."""
        stretches = self._facts("environment.json").get("stretches")
        return [row for row in stretches if isinstance(row, dict)] if isinstance(stretches, list) else []

    def probe(self, name: str) -> dict[str, Any] | None:
        """Return what a probe found in the run, or None where it has not been taken; a damaged file is named."""
        path = self.probe_path(name)
        try:
            found = read_document(path, verify_checksum)
        except MissingFile:
            return None
        if not isinstance(found, dict) or found.get("probe") != name or not isinstance(found["found"], dict):
            raise DamagedFile(f"damaged file {path}: it is not what probe {name} found")
        return dict(found["found"])

    def keep_probe(self, name: str, found: dict[str, Any]) -> None:
        """Keep what a probe found."""
        path = self.probe_path(name)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, with_checksum(with_schema({"probe": name, "found": found})))

    def probe_path(self, name: str) -> Path:
        """Return the file of a probe: its name, and a digest of what stands behind it."""
        short, _, argument = name.partition(":")
        ending = f"-{digest(argument)[:8]}" if argument else ""
        return self.path / PROBES / f"{short}{ending}.json"

    def _facts(self, name: str) -> dict[str, Any]:
        try:
            value = read_document(self.path / name)
        except UnreadableFile:
            return {}
        return value if isinstance(value, dict) else {}

    def keep_weights(self, content: bytes) -> None:
        """Write the trained weights, and their checksum beside them."""
        self.checkpoints.mkdir(exist_ok=True)
        write_atomic(self.weights.with_suffix(".sha256"), digest(content) + "\n")
        write_atomic(self.weights, content)

    def check_weights_unchanged(self) -> None:
        """Refuse weights whose checksum is not the one they were written with."""
        path = self.weights.with_suffix(".sha256")
        if path.is_file() and path.read_text(errors="replace").strip() != digest_file(self.weights):
            raise DamagedFile(f"damaged file {self.weights}: its checksum is not the one it was written with")


def _row(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return False
    known = _ROW_TYPES.issuperset(map(type, row.values()))
    return known and all(type(value) is not int or abs(value) < _LARGEST for value in row.values())


def set_aside(path: Path) -> Path:
    """Rename a damaged file so that it is out of the way and nothing of it is lost; return where it is."""
    target = path.with_name(path.name + DAMAGED)
    count = 1
    while target.exists():
        count += 1
        target = path.with_name(f"{path.name}{DAMAGED}-{count}")
    os.rename(path, target)
    return target


class Store:
    """A study's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the directory, or say why it cannot be."""
        try:
            (self.path / "runs").mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None

    def run(self, run_id: str) -> RunDirectory:
        """Return the directory of a run."""
        if not RUN_ID.fullmatch(run_id):
            raise UserError(f"'{run_id}' is not a run's name: 16 hexadecimal digits")
        return RunDirectory(self.path / "runs" / run_id)

    def runs(self) -> list[RunDirectory]:
        """Return every run here, by name."""
        folder = self.path / "runs"
        if not folder.is_dir():
            return []
        return [RunDirectory(path) for path in sorted(folder.iterdir()) if RUN_ID.fullmatch(path.name)]

    def results(self, ids: list[str], damage: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
        """Return the results at hand by run id; `damage` takes a line about each that cannot be read.

        Blocks of scores are arrays: ten thousand results then fit into a small part of the memory.
        """
        found = {}
        for run_id in ids:
            try:
                result = self.run(run_id).result(arrays=True)
            except DamagedFile as error:
                if damage is not None:
                    damage[run_id] = str(error)
                continue
            if result is not None:
                found[run_id] = result
        return found


def find_run(given: str | Path) -> RunDirectory:
    """Return the run a person means: its directory, or STUDY/PREFIX of its name."""
    path = Path(given).expanduser()
    if (path / "spec.json").is_file():
        return RunDirectory(path)
    for folder in (path.parent / "runs", path.parent):
        if folder.is_dir() and path.name:
            matches = [
                run
                for run in sorted(folder.iterdir())
                if run.name.startswith(path.name) and RUN_ID.fullmatch(run.name)
            ]
            if len(matches) == 1:
                return RunDirectory(matches[0])
            if matches:
                raise UserError(
                    f"'{given}' fits {len(matches)} runs: {', '.join(run.name for run in matches[:4])}, ..."
                )
    if (path / "runs").is_dir():
        raise UserError(f"{path} is a study; name one of its runs: {path}/ID (h2h runs {path} lists them)")
    raise UserError(f"no run at '{given}': give its directory, or STUDY/ID")


def check_trained_weights(folder: RunDirectory) -> None:
    """Refuse a run that has no trained weights, and say why."""
    result = folder.result()
    if result is None:
        raise UserError(f"run {folder.id} is not finished ({folder.state()})")
    if result["status"] != "done" or not folder.weights.is_file():
        raise UserError(f"run {folder.id} has no trained weights ({result['status']})")


def read_probe(run: RunDirectory, name: str) -> Found | None:
    """Return what a probe found in a run, or None where it has not been taken; what has not its form is damaged."""
    found = run.probe(name)
    if found is not None and not is_valid(name, found):
        raise DamagedFile(f"damaged file {run.probe_path(name)}: it has not the form of probe {name}")
    return found
