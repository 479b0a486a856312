"""The run store: one directory per run, named after the hash of its spec; `result.json` present = done.

runs/ID/spec.json         what the run is
        environment.json  versions, device, commit and attention backend of every start
        metrics.jsonl     one row per logged interval
        checkpoint/       training state; when the run is done, the trained weights, their checksum, and whether they are
                          kept for probes only
        cost.json         time, memory, throughput: not reproducible
        probes/           measurements on the trained run other than its loss, one file each
        result.json       written last: only reproducible numbers
        branches/         the checkpoints a trunk keeps until its branches are done
        lock              the process that works on it

Every JSON file has a checksum and the id of its run, so that neither a changed file nor the file of another run is
read as this run's. Files of older versions have no id; they are compared with the spec and the result.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from headtohead.common.errors import DamagedFile, MissingFile, UnreadableFile, UserError
from headtohead.common.files import (
    append,
    digest,
    digest_file,
    finite,
    read_file,
    read_text,
    write_atomic,
)
from headtohead.common.memory import gc_paused
from headtohead.common.schema import read_document, write_document
from headtohead.data.tasks.base import OWN_TOKENS
from headtohead.data.tokenizers import MAX_TOKENIZER, BytePairs, Bytes, Tokenizer
from headtohead.evaluation.logged_row import LoggedRow
from headtohead.study.environment import Environment
from headtohead.study.probes import Found, read_found
from headtohead.study.store.lease import Owner, owner_of
from headtohead.study.store.manifest import read_manifest
from headtohead.study.store.result import (
    NO_COST,
    Cost,
    RunResult,
    read_cost,
    read_result,
    validate_cost,
    validate_match,
    validate_metrics,
)
from headtohead.study.store.run_names import RunNames, names_of_runs, names_of_study
from headtohead.study.store.run_spec import InvalidSpec, RunSpec, run_spec_from

T = TypeVar("T")
KeptWeights = Literal["yes", "until probed", "no"]
"""Whether the trained weights of a run are kept."""
DAMAGED = ".damaged"
PROBES = "probes"
RUN_ID = re.compile(r"[0-9a-f]{16}")
_LONGEST_METRICS = 16 * 2**20


class _Starts(Struct, frozen=True):
    """The content of environment.json."""

    stretches: list[Environment]


class RunDirectory:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def id(self) -> str:
        """The run's id."""
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """The directory of its checkpoints."""
        return self.path / "checkpoint"

    @property
    def weights(self) -> Path:
        """The trained weights of a finished run."""
        return self.checkpoints / "final.safetensors"

    @property
    def branches(self) -> Path:
        """The directory in which a trunk keeps the checkpoints of its branches."""
        return self.path / "branches"

    def open(self, spec: RunSpec) -> None:
        """Create the directory and write its spec if missing; a damaged spec is renamed and written again."""
        try:
            self.path.mkdir(
                exist_ok=True
            )  # without parents: a study that is deleted while it runs stays deleted
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None
        path = self.path / "spec.json"
        if path.is_file():
            try:
                self.spec()
                return
            except DamagedFile:
                set_aside(path)
        write_document(path, spec.as_dict())

    def spec(self) -> RunSpec:
        """Return the spec; raise DamagedFile if it does not match the run id."""
        path = self.path / "spec.json"
        try:
            return run_spec_from(read_document(path), self.id)
        except InvalidSpec as error:
            raise DamagedFile(f"damaged file {path}: {error}") from None

    def finished(self) -> bool:
        """Return whether a result exists, without checking its content."""
        return (self.path / "result.json").is_file()

    def started(self) -> bool:
        """Return whether the run has a result or a directory of checkpoints."""
        return self.finished() or self.checkpoints.is_dir()

    def result(self) -> RunResult | None:
        """Return the result, or None if there is none; raise DamagedFile if damaged."""
        path = self.path / "result.json"
        try:
            result = read_result(self.document(path.name))
        except MissingFile:
            return None
        except ValueError as error:
            raise DamagedFile(f"damaged file {path}: {error}") from None
        if not result.run and (problem := self._mismatch(result)):
            raise DamagedFile(f"damaged file {path}: {problem}")
        return result

    def _mismatch(self, result: RunResult) -> str:
        """Return how a result without a run id contradicts the spec, or an empty string."""
        try:
            return validate_match(self.spec(), result)
        except UnreadableFile:
            return ""

    def finish(self, result: RunResult) -> None:
        """Write the result, which marks the run as done."""
        self._keep("result.json", result.as_dict())

    def keep_cost(self, cost: Cost) -> None:
        """Write the costs."""
        self._keep("cost.json", cost.as_dict())

    def keep_environments(self, starts: list[Environment]) -> None:
        """Write the environment of each start."""
        self._keep("environment.json", msgspec.to_builtins(_Starts(starts)))

    def _keep(self, name: str, value: Mapping[str, Any]) -> None:
        """Write one of the run's documents with the run's id."""
        write_document(self.path / name, {"run": self.id, **value})

    def owner(self) -> Owner | None:
        """Return the process that works on the run, or None if there is none or it is dead."""
        lock = self.path / "lock"
        found = owner_of(lock) if lock.is_file() else None
        return None if found is None or found.dead else found

    def state(self, result: RunResult | None = None) -> str:
        """Return done, diverged, failed, out of memory, damaged, running, stopped or waiting."""
        try:
            if (result := result or self.result()) is not None:
                return result.status
        except DamagedFile:
            return "damaged"
        if self.owner() is not None:
            return "running"
        return "stopped" if self.checkpoints.is_dir() else "waiting"

    def keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Save a copy of a trained tokenizer in the run directory."""
        if isinstance(tokenizer, BytePairs):
            write_atomic(self.path / "tokenizer.json", tokenizer.content)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer the run was trained with."""
        name = self.spec().corpus.tokenizer
        if name == "bytes":
            return Bytes()
        if name == OWN_TOKENS:
            raise UserError(
                f"run {self.id} was trained on a task with tokens of its own and has no tokenizer"
            )
        path = self.path / "tokenizer.json"
        try:
            return BytePairs(name, read_text(path, MAX_TOKENIZER))
        except MissingFile:
            raise UserError(f"run {self.id} was trained with {name}, but {path} is missing") from None

    def logged_rows(self, every: int = 1, damage: list[str] | None = None) -> list[LoggedRow]:
        """Return the logged rows, or every `every`-th row counted back from the last.

        Truncated and invalid rows are left out; `damage` receives one message about them.
        """
        return [row for _, row in self._logged(every, damage)]

    def _logged(self, every: int = 1, damage: list[str] | None = None) -> list[tuple[bytes, LoggedRow]]:
        """Return the lines of valid rows with their rows."""
        path = self.path / "metrics.jsonl"
        damage = [] if damage is None else damage
        try:
            lines = read_file(path, _LONGEST_METRICS).split(b"\n")
        except MissingFile:
            return []
        except UnreadableFile as error:
            damage.append(str(error))
            return []
        last = lines.pop()
        if last and (_row(last) is not None or self.owner() is None):  # else it is being written
            lines.append(last)
        if every > 1:
            lines = lines[::-every][::-1]
        try:  # one call for the whole file is three times faster than one per line
            found: Sequence[LoggedRow | None] = _ROWS.decode(b"[%b]" % b",".join(lines))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            found = []
        if len(found) != len(lines):
            found = [_row(line) for line in lines]
        rows = [(line, row) for line, row in zip(lines, found, strict=True) if row is not None]
        if len(rows) < len(lines):
            damage.append(
                f"damaged file {path}: {len(lines) - len(rows)} of {len(lines)} rows are truncated or invalid, and "
                "left out"
            )
        return rows

    def curve(
        self, result: RunResult | None, every: int = 1, damage: list[str] | None = None
    ) -> list[LoggedRow]:
        """Return the logged rows as `logged_rows`; raise DamagedFile if they are not those of the run with this result.

        None: the run is not finished, and any rows are accepted.
        """
        if result is not None:
            self.check_metrics_unchanged(result)
        return self.logged_rows(every, damage)

    def log(self, row: dict[str, Any]) -> None:
        """Append one row."""
        append(self.path / "metrics.jsonl", json.dumps(finite(row), allow_nan=False).encode() + b"\n")

    def rewind(self, step: int) -> None:
        """Drop rows after `step`, and its evaluation, because those steps will be repeated."""
        if os.path.lexists(self.path / "metrics.jsonl"):
            self.keep_rows(lambda row: (row.step, row.valid is not None) <= (step, False))

    def keep_rows(
        self, wanted: Callable[[LoggedRow], bool] = lambda row: True, source: RunDirectory | None = None
    ) -> None:
        """Write those of its valid rows, or of another run's, that are wanted to metrics.jsonl."""
        lines = [line + b"\n" for line, row in (source or self)._logged() if wanted(row)]
        write_atomic(self.path / "metrics.jsonl", b"".join(lines))

    def reset(self) -> None:
        """Delete everything except the spec, so that the run starts again."""
        for path in self.path.iterdir():
            if path.name not in ("spec.json", "lock"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def costs(self, result: RunResult | None = None, damage: list[str] | None = None) -> Cost:
        """Return the content of cost.json; NO_COST if missing, damaged, or in contradiction to the given result.

        Damage is added to `damage`.
        """
        cost = self._facts("cost.json", read_cost, NO_COST, damage)
        return NO_COST if validate_cost(cost, result) else cost

    def check_metrics_unchanged(self, result: RunResult) -> None:
        """Raise DamagedFile if metrics.jsonl is not the one of the finished run with this result."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return
        if wanted := self.costs().metrics_sha256:
            problem = "" if digest_file(path) == wanted else "changed since the run ended"
        else:
            problem = validate_metrics(self.logged_rows(), result)
        if problem:
            raise DamagedFile(f"damaged file {path}: {problem}")

    def environments(self, damage: list[str] | None = None) -> list[Environment]:
        """Return the environment of each start; empty if missing or damaged, which is added to `damage`."""
        return self._facts(
            "environment.json", lambda facts: msgspec.convert(facts, _Starts), _Starts([]), damage
        ).stretches

    def probe(self, name: str) -> Found | None:
        """Return the result of a probe, or None if it has not run; raise DamagedFile if damaged."""
        path = self.probe_path(name)
        try:
            stored = self.document(f"{PROBES}/{path.name}")
        except MissingFile:
            return None
        try:
            if stored.get("probe") == name:
                return read_found(name, stored.get("found"))
        except ValueError:
            pass
        raise DamagedFile(f"damaged file {path}: not a valid result of probe {name}")

    def missing_probes(self, names: Sequence[str]) -> list[str]:
        """Return the probes that have not been taken; a damaged file counts as not taken."""
        found = []
        for name in names:
            try:
                if self.probe(name) is None:
                    found.append(name)
            except DamagedFile:
                found.append(name)
        return found

    def keep_probe(self, name: str, found: Found) -> None:
        """Write the result of a probe."""
        path = self.probe_path(name)
        path.parent.mkdir(exist_ok=True)
        self._keep(f"{PROBES}/{path.name}", {"probe": name, "found": msgspec.to_builtins(found)})

    def probe_path(self, name: str) -> Path:
        """Return the file of a probe: its name and a digest of its argument."""
        short, _, argument = name.partition(":")
        ending = f"-{digest(argument)[:8]}" if argument else ""
        return self.path / PROBES / f"{short}{ending}.json"

    def _facts(self, name: str, parse: Callable[[dict[str, Any]], T], none: T, damage: list[str] | None) -> T:
        """Return a parsed document, or `none` if it is missing or damaged."""
        try:
            return parse(self.document(name))
        except MissingFile:
            return none
        except (UnreadableFile, ValueError) as error:
            invalid = f"damaged file {self.path / name}: invalid numbers; it is left out"
            if damage is not None:
                damage.append(str(error) if isinstance(error, UnreadableFile) else invalid)
            return none

    def document(self, name: str) -> dict[str, Any]:
        """Return one of the run's documents; raise DamagedFile if it is damaged or belongs to another run."""
        value = read_document(self.path / name)
        if problem := validate_owner(value, self.id):
            raise DamagedFile(f"damaged file {self.path / name}: {problem}")
        return dict(value)

    def keep_weights(self, content: bytes) -> None:
        """Write the trained weights and a file with their checksum."""
        self.checkpoints.mkdir(exist_ok=True)
        self._until_probed.unlink(missing_ok=True)
        write_atomic(self.weights.with_suffix(".sha256"), digest(content) + "\n")
        write_atomic(self.weights, content)

    def keep_weights_until_probed(self) -> None:
        """Record that the weights are kept for probes only."""
        write_atomic(self._until_probed, "these weights are deleted when all probes are taken\n")

    @property
    def weights_are_temporary(self) -> bool:
        """Whether the weights are kept for probes only."""
        return self._until_probed.is_file()

    @property
    def _until_probed(self) -> Path:
        return self.weights.with_suffix(".until_probed")

    def delete_weights(self) -> None:
        """Delete the trained weights and the files about them."""
        for path in (self.weights, self.weights.with_suffix(".sha256"), self._until_probed):
            path.unlink(missing_ok=True)

    def check_weights_unchanged(self) -> None:
        """Raise DamagedFile if the weights do not match their checksum."""
        path = self.weights.with_suffix(".sha256")
        try:
            wanted = read_file(path, 1024)
        except MissingFile:
            return
        if wanted.strip() != digest_file(self.weights).encode():
            raise DamagedFile(f"damaged file {self.weights}: checksum mismatch")


_ROW, _ROWS = msgspec.json.Decoder(LoggedRow), msgspec.json.Decoder(list[LoggedRow])


def _row(line: bytes) -> LoggedRow | None:
    """Return the row in a line, or None if it is invalid."""
    try:
        return _ROW.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def validate_owner(document: Any, run_id: str) -> str:
    """Return the problem of a run's document that names another run, or an empty string.

    Documents of older versions name none; `validate_match` compares their content with the spec.
    """
    if not isinstance(document, dict):
        return "not an object"
    named = document.get("run", run_id)
    return "" if named == run_id else f"it belongs to run {str(named)[:40]}"


def set_aside(path: Path) -> Path:
    """Rename a damaged file to NAME.damaged, keeping its content; return the new path."""
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
        """Create the directory; raise UserError if it is not writable."""
        try:
            (self.path / "runs").mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink(missing_ok=True)  # a process of this number on another host may be first
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None

    def check_present(self) -> None:
        """Raise UserError if the directory was deleted."""
        if not (self.path / "runs").is_dir():
            raise UserError(f"{self.path} was deleted while the study was running; nothing is left to judge")

    def run(self, run_id: str) -> RunDirectory:
        """Return the directory of a run; raise UserError if `run_id` is not a valid id."""
        if not RUN_ID.fullmatch(run_id):
            raise UserError(f"'{run_id}' is not a run id; expected 16 hexadecimal digits")
        return RunDirectory(self.path / "runs" / run_id)

    def runs(self) -> list[RunDirectory]:
        """Return all runs of the study, sorted by id."""
        folder = self.path / "runs"
        if not folder.is_dir():
            return []
        return [
            RunDirectory(path)
            for path in sorted(folder.iterdir(), key=lambda path: path.name)
            if RUN_ID.fullmatch(path.name) and path.is_dir()
        ]

    @gc_paused()
    def results(self, ids: list[str], damage: dict[str, str] | None = None) -> dict[str, RunResult]:
        """Return the existing results by run id. `damage` receives a message for each damaged one."""
        found = {}
        for run_id in ids:
            try:
                result = self.run(run_id).result()
            except DamagedFile as error:
                if damage is not None:
                    damage[run_id] = str(error)
                continue
            if result is not None:
                found[run_id] = result
        return found


def run_names(store: Store) -> RunNames:
    """Return the readable names of a study's runs: those of study.json, or of the runs found if there is none."""
    try:
        return names_of_study(read_manifest(store.path / "study.json")[0])
    except UnreadableFile:
        specs = []
        for run in store.runs():
            with suppress(UnreadableFile):
                specs.append(run.spec())
        return names_of_runs(specs)


def find_run(given: str | Path) -> RunDirectory:
    """Return the run at `given`: its directory, STUDY/PREFIX of its id, or its name STUDY/ARM/SEED (`run_names.py`)."""
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
                    f"'{given}' matches {len(matches)} runs: {', '.join(run.name for run in matches[:4])}, ..."
                )
    if (path / "runs").is_dir():
        raise UserError(
            f"{path} is a study; give one of its runs as {path}/ARM/SEED or {path}/ID (h2h runs {path} lists them)"
        )
    return _named_run(str(given))


def _named_run(given: str) -> RunDirectory:
    """Return the run named STUDY/ARM/SEED; the study is the longest part of the name that has runs."""
    parts = given.split("/")
    for count in range(len(parts) - 1, 0, -1):
        study, name = "/".join(parts[:count]) or "/", "/".join(parts[count:])
        store = Store(Path(study).expanduser())
        if (store.path / "runs").is_dir():
            run = store.run(run_names(store).find(name, study))
            if not (run.path / "spec.json").is_file():
                raise UserError(
                    f"'{given}' (run {run.id}) has not started; h2h runs {study} lists what there is"
                )
            return run
    raise UserError(f"no run at '{given}': give STUDY/ARM/SEED, STUDY/ID or its directory")


def check_trained_weights(folder: RunDirectory) -> None:
    """Raise UserError if a run has no trained weights."""
    result = folder.result()
    if result is None:
        raise UserError(f"run {folder.id} is not finished ({folder.state()})")
    if result.status != "done" or not folder.weights.is_file():
        raise UserError(f"run {folder.id} has no trained weights ({result.status})")
