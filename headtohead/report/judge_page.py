"""Page for runs trained elsewhere: verdicts and the score of every seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headtohead.common.files import write_atomic
from headtohead.report.facts import study_facts
from headtohead.report.figures import drawn
from headtohead.report.gather import arms_with_results
from headtohead.report.panels import Figure, View
from headtohead.report.panels.verdicts import forest, seeds
from headtohead.report.templates import render
from headtohead.study.judge.headline import headline
from headtohead.study.judge.runs_csv import Judged
from headtohead.study.judge.verdict import sentence


def write_judged(path: Path, judged: Judged, source: str) -> Path:
    """Write the page of a judged table into a directory; return its path. `source` is the table's name."""
    places = judged.manifest.contests()
    measures = {contest.corpus_label: judged.measure for contest in places}
    manifest = replace(judged.manifest, measures=measures)
    contests = []
    for contest in places:
        rows = [row for row in judged.verdicts if row.of(contest)]
        view = View(path, manifest, contest, arms_with_results(manifest, contest, judged.results), rows)
        sentences = [(row.verdict, sentence(row)) for row in rows]
        figures = drawn({"forest": forest.figure, "seeds": _seeds}, view)
        part = {"contest": contest, "verdicts": rows, "sentences": sentences, "figures": figures}
        contests.append(part | {"headline": headline(rows)})
    notes = [f"{row.label}: {note}" for row in judged.verdicts for note in row.notes if note != "exploratory"]
    page = render(
        "judged.html.jinja",
        manifest=manifest,
        headline=headline(judged.verdicts),
        facts=study_facts(manifest, (), ()),
        measure=judged.measure,
        contests=contests,
        source=source,
        warnings=list(dict.fromkeys(notes)),
    )
    write_atomic(path / "report.html", page)
    return path / "report.html"


def _seeds(view: View) -> Figure | None:
    rows = seeds.seed_rows(view.arms, view.measure.name)
    words = "One dot per run; the bar is the mean."
    return Figure("Scores by seed.", words, seeds.seed_values(rows, view, view.unit, {})) if rows else None
