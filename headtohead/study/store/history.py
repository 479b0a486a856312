"""history.jsonl: append-only record of what a study planned to compare and what it reported.

A verdict is weaker if seeds, arms or settings were changed after results could be seen. Each start of a study whose plan
differs from the last one appends a row `plan`, with the contests that had results by then. Each report whose comparisons
differ from the last one appends a row `report`. Each import appends a row `import`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headtohead.common.errors import DamagedFile, MissingFile, UnreadableFile
from headtohead.common.files import append, digest, read_file
from headtohead.common.schema import read_document
from headtohead.study.store.manifest import Entry, Manifest, read_manifest
from headtohead.study.store.shared import exclusive

NAME = "history.jsonl"
MAX_BYTES = 16 * 2**20
_EVENTS = ("plan", "report", "import")
_FREE = (
    *("name", "arms", "seeds", "baseline", "primary", "probes"),
    *("corpus", "tasks", "size", "shape", "length", "context", "branches"),
)
"""Settings that change no run, or that a plan row records separately as arms, seeds and contests."""


@dataclass(frozen=True)
class Marks:
    """Qualifications of a study's verdicts: everything that was changed after results existed."""

    added_seeds: frozenset[int] = frozenset()
    added_arms: frozenset[tuple[str, str]] = frozenset()
    """(contest, label) of arms that were added to a contest with results."""
    primary: str | None = ""
    """The label of the planned primary comparison; empty: the study's current one."""
    dropped: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By contest: p values of comparisons that were reported and are no longer in the study."""
    notes: tuple[str, ...] = ()
    """Notes that apply to every verdict."""


NO_MARKS = Marks()


class History:
    """The rows of one study's history."""

    def __init__(self, path: Path, rows: list[dict[str, Any]], damaged: int = 0) -> None:
        self.path, self.rows, self.damaged = path, rows, damaged

    @classmethod
    def read(cls, folder: Path) -> History:
        """Return the history in a study's directory, empty if there is none; damaged rows are counted and skipped."""
        path = folder / NAME
        try:
            return cls(path, *parse_rows(read_file(path, MAX_BYTES)))
        except MissingFile:
            return cls(path, [])
        except DamagedFile as error:
            raise DamagedFile(f"{error}; h2h doctor {folder} renames it") from None

    @classmethod
    @contextmanager
    def changing(cls, folder: Path) -> Iterator[History]:
        """Yield the history for appending; no other process appends in between."""
        with exclusive(folder):
            yield cls.read(folder)

    def plan(self, manifest: Manifest, settings: Mapping[str, Any], done: Callable[[str], bool]) -> None:
        """Append a plan if it differs from the last one. `done` returns whether a run id has a result."""
        before = self._recovered()
        finished = {
            contest.title
            for contest in {entry.contest for entry in (*before, *manifest.entries) if done(entry.run)}
        }
        row = _plan_row(manifest, settings)
        plans = self._events("plan")
        if not plans or {key: plans[-1].get(key) for key in row} != row:
            self._append({"event": "plan", **row, "finished": sorted(finished)})

    def report(self, comparisons: list[dict[str, Any]]) -> None:
        """Append the comparisons of a report if they differ from those of the last report."""
        reports = self._events("report")
        if comparisons and not (reports and reports[-1].get("comparisons") == comparisons):
            self._append({"event": "report", "comparisons": comparisons})

    def imported(self, file: str, runs: int, rows: list[dict[str, Any]]) -> None:
        """Append an import and the history rows of the imported file."""
        for row in rows:
            if row not in self.rows:
                self._append(row)
        if runs:
            self._append({"event": "import", "file": file, "runs": runs, "history": bool(rows)})

    def marks(self, manifest: Manifest) -> Marks:
        """Return the qualifications of the verdicts under the current plan."""
        plans = self._events("plan")
        notes = []
        if any(not row.get("history") for row in self._events("import")):
            notes.append("plan unknown: runs were imported without the history of their study")
        if self.damaged:
            notes.append(f"the study's history is damaged: {self.damaged} rows are unreadable")
        if not plans:
            return Marks(notes=tuple(notes))
        contests = [contest.title for contest in manifest.contests()]
        added_seeds: set[int] = set()
        added_arms: set[tuple[str, str]] = set()
        for contest in contests:
            own = [row for row in plans if contest in row["contests"]]
            for index, row in enumerate(own):
                late = index > 0 and contest in row["finished"]
                earlier = own[:index]
                if late:
                    added_seeds |= set(row["seeds"]) - {seed for other in earlier for seed in other["seeds"]}
                    known = {label for other in earlier for label in other["arms"]}
                    added_arms |= {(contest, label) for label in row["arms"] if label not in known}
        planned = [row for row in plans if not row["finished"]] or plans[:1]
        first, last = planned[-1], plans[-1]
        changed = sorted(
            key
            for key in {*first["settings"], *last["settings"]}
            if first["settings"].get(key) != last["settings"].get(key)
        )
        if changed:
            notes.append(f"settings were changed after results existed: {', '.join(changed)}")
        if first["baseline"] != manifest.baseline:
            notes.append(f"the baseline was changed after results existed (it was {first['baseline']})")
        return Marks(
            frozenset(added_seeds & set(manifest.seeds)),
            frozenset(added_arms),
            first["primary"],
            self._dropped(manifest),
            tuple(notes),
        )

    def _dropped(self, manifest: Manifest) -> dict[str, tuple[float, ...]]:
        latest: dict[str, dict[frozenset[str], float]] = {}
        for row in self._events("report"):
            for found in row["comparisons"]:
                pair = frozenset((found["arm"], found["baseline"]))
                latest.setdefault(found["contest"], {})[pair] = float(found["p"])
        current = {frozenset((label, manifest.baseline)) for _, label in manifest.arms}
        return {
            contest: tuple(p for pair, p in pairs.items() if pair not in current)
            for contest, pairs in latest.items()
        }

    def _events(self, event: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["event"] == event]

    def _recovered(self) -> tuple[Entry, ...]:
        """Return the entries of the previous plan; if the study is older than its history, record that plan first."""
        try:
            study = self.path.with_name("study.json")
            manifest, added = read_manifest(study)
            settings = read_document(study).get("settings", {})
        except UnreadableFile:  # none yet, or damaged: it is written again
            return ()
        if not self._events("plan"):
            contests = sorted({contest.title for contest in manifest.contests()})
            row = _plan_row(manifest, settings)
            planned = [seed for seed in manifest.seeds if seed not in added]
            self._append({"event": "plan", **row, "seeds": planned, "finished": [], "recovered": True})
            if added:
                self._append({"event": "plan", **row, "finished": contests, "recovered": True})
        return manifest.entries

    def _append(self, row: dict[str, Any]) -> None:
        """Append a row and sync it; a new row gets its date and its checksum."""
        if "date" not in row:
            row = row | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
            row["checksum"] = _checksum(row)
        line = json.dumps(row, sort_keys=True).encode() + b"\n"
        append(self.path, line, sync=True)
        self.rows.append(json.loads(line))


def _checksum(row: Mapping[str, Any]) -> str:
    content = {key: value for key, value in row.items() if key != "checksum"}
    return digest(json.dumps(content, sort_keys=True))[:16]


def study_marks(folder: Path, manifest: Manifest, added_seeds: frozenset[int]) -> Marks:
    """Return the qualifications of the verdicts of the study in `folder`, including the added seeds of study.json."""
    marks = History.read(folder).marks(manifest)
    return dataclasses.replace(marks, added_seeds=marks.added_seeds | added_seeds)


def parse_rows(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a history and the number of damaged lines; an unterminated last line is ignored."""
    lines = content.split(b"\n")[:-1]
    rows: list[dict[str, Any]] = []
    damaged = 0
    for line in lines:
        try:
            row = json.loads(line)
            if not _is_valid(row):
                raise ValueError
            rows.append(row)
        except (ValueError, RecursionError):
            damaged += 1
    return rows, damaged


def _plan_row(manifest: Manifest, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "arms": [label for _, label in manifest.arms],
        "baseline": manifest.baseline,
        "primary": manifest.primary,
        "seeds": list(manifest.seeds),
        "contests": [contest.title for contest in manifest.contests()],
        "settings": _portable({key: value for key, value in settings.items() if key not in _FREE}),
    }


def _portable(value: Any) -> Any:
    """Return settings as JSON values, with paths shortened to their last component: exports include the history."""
    if isinstance(value, dict):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, bool | int | float | None):
        return value
    return str(value).rpartition("/")[2]


def _is_valid(row: Any) -> bool:
    """Return whether a row has the fields of its event."""

    def strings(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)

    if not isinstance(row, dict) or row.get("event") not in _EVENTS:
        return False
    if "checksum" in row and row["checksum"] != _checksum(row):
        return False
    if row["event"] == "plan":
        return (
            all(strings(row.get(key)) for key in ("arms", "contests", "finished"))
            and isinstance(row.get("baseline"), str)
            and isinstance(row.get("primary"), str | None)
            and isinstance(row.get("settings"), dict)
            and isinstance(row.get("seeds"), list)
            and all(isinstance(seed, int) for seed in row["seeds"])
        )
    if row["event"] == "report":
        found = row.get("comparisons")
        return isinstance(found, list) and all(
            isinstance(item, dict)
            and all(isinstance(item.get(key), str) for key in ("contest", "arm", "baseline"))
            and isinstance(item.get("p"), float | int)
            and 0 <= item["p"] <= 1
            for item in found
        )
    return isinstance(row.get("file"), str)
