"""The run store: one directory per run, named after the hash of its spec; `result.json` present = done.

runs/ID/spec.json         what the run is
        environment.json  versions, device, commit, attention backend, of every stretch of work
        metrics.jsonl     one row per logged interval
        checkpoint/       where it stands
        cost.json         clock, memory, throughput: what a repeat does not give again
        result.json       written last: only what a repeat gives again
        lock              who works on it now
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import SoftFileLease, Timeout

from headtohead.common.errors import UserError
from headtohead.common.files import finite, read_json, write_atomic, write_json
from headtohead.data.tokenizers import BytePairs, Bytes, Tokenizer

RUN_ID = re.compile(r"[0-9a-f]{16}")
_LEASE_SECONDS = 60.0


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

    def open(self, record: dict[str, Any]) -> None:
        """Make the directory and write its spec, unless it is there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None
        if not (self.path / "spec.json").is_file():
            write_json(self.path / "spec.json", record)

    def spec(self) -> dict[str, Any]:
        """Return what the run is."""
        record = read_json(self.path / "spec.json")
        if not isinstance(record, dict):
            raise UserError(f"damaged file {self.path / 'spec.json'}: not an object")
        return record

    def result(self) -> dict[str, Any] | None:
        """Return the result of a finished run, or None."""
        path = self.path / "result.json"
        if not path.is_file():
            return None
        result = read_json(path)
        if not isinstance(result, dict) or "status" not in result:
            raise UserError(f"damaged file {path}: no status")
        return result

    def state(self) -> str:
        """Return done, diverged, failed, running, stopped or waiting."""
        if (result := self.result()) is not None:
            return str(result["status"])
        if (self.path / "lock").exists():
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
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"run {self.id} was trained with {name}, and {path} is missing")
        return BytePairs(name, path.read_text(encoding="utf-8"))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the logged rows; a line that was cut short by a crash is passed over."""
        path = self.path / "metrics.jsonl"
        rows = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
        return rows

    def log(self, row: dict[str, Any]) -> None:
        """Append one row."""
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as stream:
            stream.write(json.dumps(finite(row), allow_nan=False) + "\n")

    def rewind(self, step: int) -> None:
        """Drop rows after `step`: they are of work that will be repeated."""
        path = self.path / "metrics.jsonl"
        if path.is_file():
            rows = [row for row in self.metrics() if row["step"] <= step]
            write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))

    def forget(self) -> None:
        """Drop everything but the spec, so that the run starts anew."""
        for path in self.path.iterdir():
            if path.name not in ("spec.json", "lock"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Yield whether this process may do the run: true while nobody else holds it.

        The lock is a file made by exclusive creation, which also holds on network file systems. One whose owner is
        dead on this host is taken over at once; one from another host after its heartbeat has ended.
        """
        lease = SoftFileLease(self.path / "lock", lease_duration=_LEASE_SECONDS)
        try:
            lease.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lease.release()


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

    def results(self, ids: list[str]) -> dict[str, dict[str, Any]]:
        """Return the results at hand by run id."""
        found = {run_id: self.run(run_id).result() for run_id in ids}
        return {run_id: result for run_id, result in found.items() if result is not None}


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
