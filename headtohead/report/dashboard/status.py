"""Status of a running study: finished runs, progress of the others, time left, curves so far."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtohead.common.errors import UnreadableFile
from headtohead.common.numbers import short_count, short_time
from headtohead.report.figures import choices, draw
from headtohead.report.gather import drawn_labels, gather
from headtohead.report.panels import View
from headtohead.report.panels.base import Definition
from headtohead.study.judge.headline import headline
from headtohead.study.judge.verdict import sentence, study_verdicts
from headtohead.study.store.history import study_marks
from headtohead.study.store.manifest import Entry, Manifest, read_manifest
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import Store

Row = dict[str, Any]
REPORT = "report.html"
_WAITING = "No study in {0} yet. This page follows it as soon as it begins: h2h race ... --out {0}"


@dataclass
class StudyStatus:
    """Status of a study: the values shown on the page, and the curves of each contest."""

    facts: Row
    curves: list[dict[str, Definition]] = field(default_factory=list)
    """By contest: the learning curves by x axis."""


@dataclass
class StatusReader:
    """Reads a study repeatedly; finished runs are read once."""

    path: Path
    finished: dict[str, RunResult] = field(default_factory=dict)

    def look(self) -> StudyStatus:
        """Return the current status of the study; before it begins, what is waited for."""
        if not os.path.lexists(self.path / "study.json"):
            return StudyStatus({"waiting": _WAITING.format(self.path), "contests": []})
        manifest, added = read_manifest(self.path / "study.json")
        store = Store(self.path)
        names = {entry.run: entry for entry in (*manifest.trunks, *manifest.entries)}
        judged = {entry.run for entry in manifest.entries}
        # A run that is retried (--retry failed) has no result while it is running.
        known = {run: row for run, row in self.finished.items() if run in names and store.run(run).finished()}
        results = self.finished = known | store.results([run for run in names if run not in known])
        runs = [_run_status(store, run, entry, results.get(run)) for run, entry in names.items()]
        curves = []
        for contest in manifest.contests():
            arms = gather(self.path, manifest, contest, results, [])
            figure = draw(View(self.path, manifest, contest, arms, []), ["curves"]).get("curves")
            curves.append(choices(figure.definition) if figure and figure.definition else {})
        # No verdicts before the last planned run: they would invite early stopping.
        over = not any(run.going for run in runs if run.run in judged)
        verdicts = study_verdicts(manifest, results, study_marks(self.path, manifest, added)) if over else []
        active = [run for run in runs if run.state in ("running", "stopped")]
        total, left = _budget(runs)
        facts = {
            "name": manifest.name,
            "counts": _counts(runs),
            "share": 1 - left / total if total else 1.0,
            "left": _time_left(runs, left),
            "active": [{"title": run.title, "state": run.state, "words": run.progress()} for run in active],
            "headline": headline(verdicts) if over else "",
            "report": over and (self.path / REPORT).is_file(),
            "sentences": [{"verdict": row.verdict, "words": sentence(row, verdicts)} for row in verdicts],
            "contests": _contests(manifest, curves),
        }
        return StudyStatus(facts, curves)


def _contests(manifest: Manifest, curves: list[dict[str, Definition]]) -> list[Row]:
    count, total = len(drawn_labels(manifest, ())), len(manifest.arms)
    shown = f" (the first {count} of {total} arms)" if count < total else ""
    return [
        {"title": f"{contest.title}{shown}", "axes": list(charts)}
        for contest, charts in zip(manifest.contests(), curves, strict=True)
    ]


@dataclass
class _Run:
    """State, progress and speed of one run."""

    run: str
    title: str
    state: str
    first: int = 0
    """The step it starts at: a branch starts at the trunk step it leaves from."""
    step: int = 0
    steps: int = 0
    """0: not known before the run starts."""
    tokens: int = 0
    """Of its own steps."""
    rate: float = 0.0
    """Tokens per second; 0: not known."""

    @property
    def going(self) -> bool:
        """Whether the run has no result yet."""
        return self.state in ("running", "stopped", "waiting")

    def left(self) -> float:
        """Return the share of its own steps that remain."""
        own = max(1, self.steps - self.first)
        return 1 - (self.step - self.first) / own if self.steps else 1.0

    def progress(self) -> str:
        """Return its progress as text; empty for a run that has not started."""
        if not self.steps:
            return ""
        if self.step >= self.steps:
            return "trained, evaluating" if self.state == "running" else "trained, not evaluated"
        text = f"step {self.step:,} of {self.steps:,}"
        if not self.rate or self.state != "running":
            return text
        left = short_time(self.left() * self.tokens / self.rate)
        return f"{text}, {short_count(self.rate)} tokens/s, about {left} left"


def _run_status(store: Store, run_id: str, entry: Entry, result: RunResult | None) -> _Run:
    run = store.run(run_id)
    branch = f"{entry.contest.branch} tokens, " if entry.contest.branch else ""
    found = _Run(run_id, f"{entry.label}, {branch}seed {entry.seed}", run.state(result))
    if not (run.path / "spec.json").is_file():
        return found
    try:
        spec = run.spec()
    except UnreadableFile:
        return found
    tokens, batch = spec.training.tokens, spec.training.batch
    found.first = found.step = spec.parent.step if spec.parent else 0
    found.steps = max(1, spec.steps)
    found.tokens = tokens - found.first * batch
    if not found.going:
        found.step = found.steps
    elif rows := [row for row in run.logged_rows() if row.nats is not None]:
        last = rows[-1]
        found.step = max(found.first, min(last.step, found.steps))
        if last.seconds:
            found.rate = (last.tokens or last.step * batch) / last.seconds
    return found


def _counts(runs: list[_Run]) -> Row:
    found = Counter(run.state for run in runs)
    waiting = found.pop("waiting", 0) + found.pop("stopped", 0)
    counts = {"done": found.pop("done", 0), "running": found.pop("running", 0), "waiting": waiting}
    return {**counts, **found, "all": len(runs)}


def _budget(runs: list[_Run]) -> tuple[float, float]:
    """Return the tokens of all runs and the remaining ones; a run not started counts as the mean of the others."""
    known = [run.tokens for run in runs if run.tokens]
    usual = sum(known) / len(known) if known else 1.0
    total = sum(run.tokens or usual for run in runs)
    return total, sum((run.tokens or usual) * run.left() for run in runs if run.going)


def _time_left(runs: list[_Run], left: float) -> str:
    """Return the training time left as text: remaining tokens over the speed of the running runs."""
    if not any(run.going for run in runs):
        return "finished"
    running = [run for run in runs if run.state == "running"]
    if not running:
        return "no run is active"
    if not left:
        return "evaluating"
    speed = sum(run.rate for run in running)
    return f"about {short_time(left / speed)} of training left" if speed else "time left unknown"
