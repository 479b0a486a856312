"""Status of a running study: finished runs, progress of the others, time left, curves so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtohead.common.errors import UnreadableFile
from headtohead.common.numbers import short_count, short_time
from headtohead.report.figures import Definition, at_axis, draw
from headtohead.report.gather import drawn_labels, gather
from headtohead.report.panels import View
from headtohead.study.judge.verdict import sentence, study_verdicts
from headtohead.study.store.history import study_marks
from headtohead.study.store.manifest import Entry, Manifest, read_manifest
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import Store

Row = dict[str, Any]
_GOING = ("running", "stopped", "waiting")


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
        """Return the current status of the study."""
        manifest, added = read_manifest(self.path / "study.json")
        store = Store(self.path)
        names = {entry.run: entry for entry in (*manifest.trunks, *manifest.entries)}
        judged = {entry.run for entry in manifest.entries}
        # A run that is retried (--retry failed) has no result while it is running.
        known = {run: row for run, row in self.finished.items() if run in names and store.run(run).finished()}
        results = self.finished = known | store.results([run for run in names if run not in known])
        runs = [_run_facts(store, run, entry, results.get(run)) for run, entry in names.items()]
        curves = []
        for contest in manifest.contests():
            arms = gather(self.path, manifest, contest, results, [])
            picture = draw(View(self.path, manifest, contest, arms, []), ["curves"]).get("curves")
            chart = picture.chart if picture else None
            axes = chart["usermeta"]["axes"] if chart else {}
            curves.append({axis: at_axis(chart, axis) for axis in axes} if chart else {})
        # No verdicts before the last planned run: they would invite early stopping.
        over = all(row["state"] not in _GOING for row in runs if row["run"] in judged)
        verdicts = study_verdicts(manifest, results, study_marks(self.path, manifest, added)) if over else []
        return StudyStatus(
            {
                "name": manifest.name,
                "counts": _counts(runs),
                "share": _share(runs),
                "left": _left(runs),
                "active": [row for row in runs if row["state"] in ("running", "stopped")],
                "sentences": [{"verdict": row.verdict, "words": sentence(row)} for row in verdicts],
                "contests": _contests(manifest, curves),
            },
            curves,
        )


def _contests(manifest: Manifest, curves: list[dict[str, Definition]]) -> list[Row]:
    count, total = len(drawn_labels(manifest, ())), len(manifest.arms)
    shown = f" (the first {count} of {total} arms)" if count < total else ""
    return [
        {"title": f"{contest.title}{shown}", "axes": list(charts)}
        for contest, charts in zip(manifest.contests(), curves, strict=True)
    ]


def _run_facts(store: Store, run_id: str, entry: Entry, result: RunResult | None) -> Row:
    """Return a run's state, progress and speed."""
    run = store.run(run_id)
    branch = f"{entry.contest.branch} tokens, " if entry.contest.branch else ""
    facts: Row = {
        "run": run_id,
        "title": f"{entry.label}, {branch}seed {entry.seed}",
        "state": run.state(result),
        "first": 0,
        "step": 0,
        "steps": None,
        "tokens": None,
        "rate": None,
        "words": "",
    }
    try:
        spec = run.spec() if (run.path / "spec.json").is_file() else None
    except UnreadableFile:
        spec = None
    if spec is None:
        return facts
    training = spec["training"]
    # A branch starts at the trunk step it leaves from.
    facts["first"] = facts["step"] = spec.get("parent", {}).get("step", 0)
    # Steps of a task hold whole examples; their number is in its record.
    steps = spec.get("steps")
    facts["steps"] = steps if isinstance(steps, int) else max(1, training["tokens"] // training["batch"])
    facts["tokens"] = training["tokens"] - facts["first"] * training["batch"]
    if facts["state"] not in _GOING:
        facts["step"] = facts["steps"]
        return facts
    rows = [row for row in run.metrics() if row.get("nats") is not None]
    if rows:
        last = rows[-1]
        facts["step"] = max(facts["first"], min(last["step"], facts["steps"]))
        if seconds := last.get("seconds"):
            facts["rate"] = (last.get("tokens") or last["step"] * training["batch"]) / seconds
    facts["words"] = _progress(facts)
    return facts


def _progress(facts: Row) -> str:
    if facts["step"] >= facts["steps"]:
        return "trained, evaluating" if facts["state"] == "running" else "trained, not evaluated"
    text = f"step {facts['step']:,} of {facts['steps']:,}"
    if not facts["rate"] or facts["state"] != "running":
        return text
    left = _left_of(facts) * facts["tokens"] / facts["rate"]
    return f"{text}, {short_count(facts['rate'])} tokens/s, about {short_time(left)} left"


def _left_of(facts: Row) -> float:
    """Return the share of a run's own steps that remain."""
    if not facts["steps"]:
        return 1.0
    own = max(1, facts["steps"] - facts["first"])
    return float(1 - (facts["step"] - facts["first"]) / own)


def _counts(runs: list[Row]) -> Row:
    states = [row["state"] for row in runs]
    counts = {"done": states.count("done"), "running": states.count("running")}
    counts["waiting"] = states.count("waiting") + states.count("stopped")
    others = {state: states.count(state) for state in states if state not in (*_GOING, "done")}
    return {**counts, **others, "all": len(states)}


def _budget(runs: list[Row]) -> tuple[float, float]:
    """Return the tokens of all runs and the remaining ones; a run not started counts as the mean of the others."""
    known = [row["tokens"] for row in runs if row["tokens"]]
    usual = sum(known) / len(known) if known else 1.0
    total = left = 0.0
    for row in runs:
        tokens = row["tokens"] or usual
        over = row["state"] not in _GOING
        total += tokens
        left += 0.0 if over else tokens * _left_of(row)
    return total, left


def _share(runs: list[Row]) -> float:
    total, left = _budget(runs)
    return 1 - left / total if total else 1.0


def _left(runs: list[Row]) -> str:
    """Return the training time left as text: remaining tokens over the speed of the running runs."""
    if all(row["state"] not in _GOING for row in runs):
        return "finished"
    speed = sum(row["rate"] or 0.0 for row in runs if row["state"] == "running")
    if not any(row["state"] == "running" for row in runs):
        return "no run is active"
    if not (left := _budget(runs)[1]):
        return "evaluating"
    return f"about {short_time(left / speed)} of training left" if speed else "time left unknown"
