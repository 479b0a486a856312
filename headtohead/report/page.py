"""The report page: one self-contained HTML file without network requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headtohead.common.files import write_atomic
from headtohead.report.advice import advice
from headtohead.report.facts import shown_costs, study_facts
from headtohead.report.figures import draw, draw_study
from headtohead.report.gather import arm_rows, configuration, drawn_labels, environments
from headtohead.report.panels import View
from headtohead.report.panels.base import study_views
from headtohead.report.templates import render
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.headline import headline
from headtohead.study.judge.verdict import Verdict, headlines, sentence
from headtohead.study.store.manifest import Manifest, metric_label

_NEAR = 0.005
"""Relative mismatch of a budget above which the page warns."""


def write_report(
    path: Path,
    analysis: Analysis,
    damage: list[str],
    stamp: str,
) -> Path:
    """Write the page of a study into its directory; return its path.

    `damage` lists files left out; `stamp` is a digest of the content, stored in the page's head.
    """
    damage = list(damage)
    manifest, verdicts = analysis.manifest, list(analysis.verdicts)
    views = study_views(path, analysis, damage)
    places = manifest.contests()
    contests = [{**_contest(view), "short": view.contest.title_among(places)} for view in views]
    found = environments(path, manifest, damage)
    specs = [arm.spec for view in views for arm in view.arms if arm.spec]
    page = render(
        "page.html.jinja",
        manifest=manifest,
        headline=headline(verdicts),
        facts=study_facts(manifest, specs, found),
        contests=contests,
        figures=draw_study(views),
        verdicts=verdicts,
        headlines=headlines(verdicts),
        primary=_primary(verdicts, manifest),
        better=_better(manifest),
        environments=found,
        warnings=[*dict.fromkeys(damage), *manifest.notes, *warnings(verdicts, contests)],
        stamp=stamp,
        folded=any(part["drawn"] for part in contests),
    )
    write_atomic(path / "report.html", page)
    return path / "report.html"


def _better(manifest: Manifest) -> str:
    """Return which direction of the study's metrics is better, as text."""
    found = [manifest.measure(contest) for contest in manifest.contests()]
    names = list(dict.fromkeys(metric_label(row.name) for row in found)) or ["bits per byte"]
    way = "Higher" if any(row.better == "higher" for row in found) else "Lower"
    return f"{way} {', '.join(names)} is better"


def _contest(view: View) -> dict[str, Any]:
    arms, rows = view.arms, view.verdicts
    equal, different = configuration(arms)
    shown = arm_rows(arms, view.measure.name)
    return {
        "contest": view.contest,
        "verdicts": rows,
        "headline": headline(rows),
        "costs": shown_costs(arms, view.manifest.baseline),
        "sentences": [(row.verdict, sentence(row)) for row in rows],
        "arms": shown,
        "unit": view.unit,
        # Further metrics of a task.
        "others": [metric_label(name) for name in (shown[0]["others"] if shown else ())],
        "drawn": _drawn(view),
        "task": view.contest.corpus_label in view.manifest.measures,
        "figures": draw(view),
        "advice": advice(rows, arms, view.manifest.baseline),
        "equal": equal,
        "different": different,
        "solved": [row for row in view.manifest.solved if row.contest == view.contest],
    }


def _drawn(view: View) -> str:
    """Return a sentence on the arms that the figures leave out; empty if they show all."""
    shown, total = len(drawn_labels(view.manifest, view.verdicts)), len(view.manifest.arms)
    if shown == total:
        return ""
    return (
        f"Figures show {shown} of {total} arms: the baseline, the primary arm and those with the best means. "
        "The folded tables of verdicts, scores and settings list all arms, and h2h report --stability prints the "
        "stability of all."
    )


def _primary(verdicts: list[Verdict], manifest: Manifest) -> str:
    """Return the planned comparison as text."""
    places = manifest.contests()
    planned = ((row, place) for place in places for row in verdicts if row.primary and row.of(place))
    return next((f"{row.label} at {place.title_among(places)}" for row, place in planned), "none")


def warnings(verdicts: list[Verdict], contests: list[dict[str, Any]]) -> list[str]:
    """Return the warnings of the page."""
    found = []
    several = len(contests) > 1
    for contest in contests:
        place = f" ({contest['contest'].title})" if several else ""
        for row in contest["verdicts"]:
            notes = [note for note in row.notes if note != "exploratory"]
            found += [f"{row.label}{place}: {note}" for note in notes]
    if any(row.n < 3 for row in verdicts):
        found.append("fewer than three paired seeds: intervals are wide or missing")
    for contest in contests:
        place = f" ({contest['contest'].title})" if several else ""
        found += [
            f"{row.label}{place}: {row.held} are {row.match:.1%} of the baseline's, the nearest with whole steps"
            for row in contest["solved"]
            if row.rule.startswith("length") and abs(row.match - 1) > _NEAR
        ]
        epochs = max((row["epochs"] or 0 for row in contest["arms"]), default=0)
        if epochs > 1:
            found.append(f"{contest['contest'].corpus_label}: {epochs:.1f} epochs over the train split")
        counts = {row["parameters"] for row in contest["arms"] if row["parameters"]}
        if len(counts) > 1 and contest["contest"].shape != "params":
            low, high = min(counts), max(counts)
            if high / low > 1.005:
                found.append(
                    f"parameters are not matched (shape {contest['contest'].shape}): {low:,} to {high:,}"
                )
    return list(dict.fromkeys(found))
