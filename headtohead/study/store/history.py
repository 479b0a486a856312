"""history.jsonl: append-only record of what a study planned to compare and what it reported.

A verdict is weaker if seeds, arms or settings were changed after results could be seen. Each start of a study whose plan
differs from the last one appends a row `plan`, with the contests that had results by then. Each report whose comparisons
differ from the last one appends a row `report`. Each import appends a row `import`, and runs copied from another study a row
`copy`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from headtohead.common.errors import DamagedFile, MissingFile, UnreadableFile
from headtohead.common.files import append, digest, read_file
from headtohead.common.schema import read_document
from headtohead.study.store.manifest import Entry, Manifest, read_manifest
from headtohead.study.store.shared import exclusive

NAME = "history.jsonl"
MAX_BYTES = 16 * 2**20
_FREE = (
    *("name", "arms", "seeds", "baseline", "primary", "probes"),
    *("corpus", "tasks", "size", "shape", "length", "context", "branches"),
)
"""Settings that change no run, or that a plan records separately as arms, seeds, contests and definitions."""
_FOLDERS = re.compile(r"[^\s*+()=]*/")
"""The folders of a file in the text of an arm."""


class Comparison(Struct, frozen=True):
    """A reported comparison of two arms in a contest, by their labels."""

    contest: str
    arm: str
    baseline: str
    p: Annotated[float, Meta(ge=0, le=1)]


class ArmDefinition(Struct, frozen=True):
    """What defines an arm, besides its label and the settings of the study."""

    mechanism: str
    settings: dict[str, Any]
    """Its own settings."""
    code: list[str]
    """Digests of its user code: of the text, and of the program that the text is parsed to. Code is the same if one of them
    is: comments change the text, and another version of Python changes the digest of the program."""

    @classmethod
    def of(cls, text: str, settings: Mapping[str, Any], code: list[str]) -> ArmDefinition:
        """Return the definition of an arm given as text, without the folders of its files."""
        return cls(_FOLDERS.sub("", text), _portable(dict(settings)), code)

    def changes(self, now: ArmDefinition) -> list[str]:
        """Return what differs in `now`."""
        found = []
        if self.mechanism != now.mechanism:
            found.append("its mechanism")
        elif self.code != now.code and not set(self.code) & set(now.code):
            found.append("its code")
        keys = {*self.settings, *now.settings}
        return found + sorted(key for key in keys if self.settings.get(key) != now.settings.get(key))


class Definitions(Struct, frozen=True):
    """What labels and titles do not say."""

    arms: dict[str, ArmDefinition]
    """By label."""
    contexts: dict[str, int]
    """Tokens in a window by contest, where the title does not include them."""


class PlanEvent(Struct, frozen=True, tag_field="event", tag="plan"):
    """A plan that differs from the one before."""

    arms: list[str]
    baseline: str
    seeds: list[int]
    contests: list[str]
    settings: dict[str, Any]
    finished: list[str]
    """The contests that had results by then."""
    primary: str | None = None
    recovered: bool | UnsetType = UNSET
    """Taken from study.json, because the study is older than its history."""
    definitions: Definitions | UnsetType = UNSET
    """Older versions did not record them."""

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        settings: Mapping[str, Any],
        definitions: Definitions | UnsetType = UNSET,
    ) -> PlanEvent:
        """Return the plan of a study without results."""
        return cls(
            arms=[label for _, label in manifest.arms],
            baseline=manifest.baseline,
            seeds=list(manifest.seeds),
            contests=[contest.title for contest in manifest.contests()],
            settings=_portable({key: value for key, value in settings.items() if key not in _FREE}),
            finished=[],
            primary=manifest.primary,
            definitions=definitions,
        )


class ReportEvent(Struct, frozen=True, tag_field="event", tag="report"):
    """The comparisons of a report."""

    comparisons: list[Comparison]


class ImportEvent(Struct, frozen=True, tag_field="event", tag="import"):
    """An import of runs."""

    file: str
    runs: int = 0
    history: bool = False
    """Whether the imported file had a history."""


class CopyEvent(Struct, frozen=True, tag_field="event", tag="copy"):
    """Runs of another study that were copied instead of trained."""

    study: str
    runs: list[str]
    """Their ids."""


Event = PlanEvent | ReportEvent | ImportEvent | CopyEvent
Kind = TypeVar("Kind", PlanEvent, ReportEvent, ImportEvent, CopyEvent)


@dataclass(frozen=True)
class Row:
    """A line of the history: its event, and all it contains, which exports keep unchanged."""

    event: Event
    content: dict[str, Any]


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
    changed_arms: Mapping[str, str] = field(default_factory=dict)
    """By label: a note on an arm whose mechanism, settings or code were changed."""
    copied: Mapping[str, str] = field(default_factory=dict)
    """By run id: the study from which a run was copied."""


NO_MARKS = Marks()


class History:
    """The rows of one study's history."""

    def __init__(self, path: Path, rows: list[Row], damaged: int = 0) -> None:
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

    def _events(self, kind: type[Kind]) -> list[Kind]:
        return [row.event for row in self.rows if isinstance(row.event, kind)]

    def plan(
        self,
        manifest: Manifest,
        settings: Mapping[str, Any],
        definitions: Definitions,
        done: Callable[[str], bool],
    ) -> None:
        """Append a plan if it differs from the last one. `done` returns whether a run id has a result."""
        before = self._recovered()
        contests = {entry.contest for entry in (*before, *manifest.entries) if done(entry.run)}
        plan = PlanEvent.of(manifest, settings, definitions)
        plans = self._events(PlanEvent)
        if not plans or _change(plans[-1], finished=[], recovered=UNSET) != plan:
            self._append(_change(plan, finished=sorted({contest.title for contest in contests})))

    def report(self, comparisons: list[Comparison]) -> None:
        """Append the comparisons of a report if they differ from those of the last report."""
        report = ReportEvent(comparisons)
        if comparisons and self._events(ReportEvent)[-1:] != [report]:
            self._append(report)

    def imported(self, file: str, runs: int, rows: list[Row]) -> None:
        """Append an import and the history rows of the imported file."""
        for row in rows:
            if row not in self.rows:
                self._write(row.content)
        if runs:
            self._append(ImportEvent(file, runs, bool(rows)))

    def copied(self, study: str, runs: list[str]) -> None:
        """Append a copy of runs, given by id, of another study."""
        self._append(CopyEvent(study, runs))

    def marks(self, manifest: Manifest) -> Marks:
        """Return the qualifications of the verdicts under the current plan."""
        plans = self._events(PlanEvent)
        notes = []
        if not all(event.history for event in self._events(ImportEvent)):
            notes.append("plan unknown: runs were imported without the history of their study")
        if self.damaged:
            notes.append(f"the study's history is damaged: {self.damaged} rows are unreadable")
        if not plans:
            return Marks(notes=tuple(notes), copied=self.origins())
        added_seeds: set[int] = set()
        added_arms: set[tuple[str, str]] = set()
        for contest in {contest.title for contest in manifest.contests()}:
            first, *later = [plan for plan in plans if contest in plan.contests] or plans[:1]
            seeds, arms = set(first.seeds), set(first.arms)
            for plan in later:
                if contest in plan.finished:
                    added_seeds |= set(plan.seeds) - seeds
                    added_arms |= {(contest, label) for label in set(plan.arms) - arms}
                seeds |= set(plan.seeds)
                arms |= set(plan.arms)
        start = max((index for index, plan in enumerate(plans) if not plan.finished), default=0)
        planned, defined = plans[start], [plan.definitions for plan in plans[start:] if plan.definitions]
        then, now = planned.settings, plans[-1].settings
        changed = {key for key in {*then, *now} if then.get(key) != now.get(key)}
        if _context_changed(defined):
            changed.add("context")
        if changed:
            notes.append(f"settings were changed after results existed: {', '.join(sorted(changed))}")
        if planned.baseline != manifest.baseline:
            notes.append(f"the baseline was changed after results existed (it was {planned.baseline})")
        return Marks(
            frozenset(added_seeds & set(manifest.seeds)),
            frozenset(added_arms),
            planned.primary,
            self._dropped(manifest),
            tuple(notes),
            _changed_arms(defined),
            self.origins(),
        )

    def origins(self) -> dict[str, str]:
        """Return the runs that were copied, each with the study it was first copied from."""
        found: dict[str, str] = {}
        for event in self._events(CopyEvent):
            for run in event.runs:
                found.setdefault(run, event.study)
        return found

    def _dropped(self, manifest: Manifest) -> dict[str, tuple[float, ...]]:
        latest: dict[str, dict[frozenset[str], float]] = {}
        for report in self._events(ReportEvent):
            for found in report.comparisons:
                latest.setdefault(found.contest, {})[frozenset((found.arm, found.baseline))] = found.p
        current = {frozenset((label, manifest.baseline)) for _, label in manifest.arms}
        return {
            contest: tuple(p for pair, p in pairs.items() if pair not in current)
            for contest, pairs in latest.items()
        }

    def _recovered(self) -> tuple[Entry, ...]:
        """Return the entries of the previous plan; if the study is older than its history, record that plan first."""
        try:
            study = self.path.with_name("study.json")
            manifest, added = read_manifest(study)
            settings = read_document(study).get("settings", {})
        except UnreadableFile:  # none yet, or damaged: it is written again
            return ()
        if not self._events(PlanEvent):
            plan = _change(PlanEvent.of(manifest, settings), recovered=True)
            self._append(_change(plan, seeds=[seed for seed in manifest.seeds if seed not in added]))
            if added:
                self._append(_change(plan, finished=sorted(set(plan.contests))))
        return manifest.entries

    def _append(self, event: Event) -> None:
        """Append an event with its date and its checksum."""
        content = msgspec.to_builtins(event) | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
        self._write(content | {"checksum": _checksum(content)})

    def _write(self, content: dict[str, Any]) -> None:
        line = json.dumps(content, sort_keys=True).encode() + b"\n"
        append(self.path, line, sync=True)
        self.rows += parse_rows(line)[0]


_change = msgspec.structs.replace


def _changed_arms(defined: list[Definitions]) -> dict[str, str]:
    """Return a note by label on every arm that differs from its first definition."""
    first: dict[str, ArmDefinition] = {}
    for one in defined:
        first = {**one.arms, **first}
    changed = {label: first[label].changes(arm) for label, arm in defined[-1].arms.items()} if defined else {}
    return {
        label: f"{label} was changed after results existed: {', '.join(what)}"
        for label, what in changed.items()
        if what
    }


def _context_changed(defined: list[Definitions]) -> bool:
    """Return whether a contest has another context than at first."""
    first: dict[str, int] = {}
    for one in defined:
        first = {**one.contexts, **first}
    return bool(defined) and any(first[title] != context for title, context in defined[-1].contexts.items())


def _checksum(row: Mapping[str, Any]) -> str:
    content = {key: value for key, value in row.items() if key != "checksum"}
    return digest(json.dumps(content, sort_keys=True))[:16]


def study_marks(folder: Path, manifest: Manifest, added_seeds: frozenset[int]) -> Marks:
    """Return the qualifications of the verdicts of the study in `folder`, including the added seeds of study.json."""
    marks = History.read(folder).marks(manifest)
    return dataclasses.replace(marks, added_seeds=marks.added_seeds | added_seeds)


def parse_rows(content: bytes) -> tuple[list[Row], int]:
    """Return the rows of a history and the number of damaged lines; an unterminated last line is ignored."""
    lines = content.split(b"\n")[:-1]
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
            event: Event = msgspec.convert(row, Event)
        except (ValueError, RecursionError):  # msgspec's error is a ValueError
            continue
        if "checksum" not in row or row["checksum"] == _checksum(row):
            rows.append(Row(event, row))
    return rows, len(lines) - len(rows)


def _portable(value: Any) -> Any:
    """Return settings as JSON values, with paths shortened to their last component: exports include the history."""
    if isinstance(value, dict):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, bool | int | float | None):
        return value
    return str(value).rpartition("/")[2]
