"""Page for runs trained elsewhere: verdicts and the score of every seed."""

from __future__ import annotations

from pathlib import Path

from headtohead.common.files import write_atomic
from headtohead.common.version import VERSION
from headtohead.report.figures import drawn
from headtohead.report.page import chart_library
from headtohead.report.panels import Figure, View
from headtohead.report.panels.verdicts import forest, seeds
from headtohead.report.templates import asset, templates
from headtohead.study.judge.runs_csv import Judged
from headtohead.study.judge.verdict import sentence
from headtohead.study.store.manifest import metric_label


def write_judged(path: Path, judged: Judged, source: str) -> Path:
    """Write the page of a judged table into a directory; return its path. `source` is the table's name."""
    manifest, measure = judged.manifest, judged.measure
    unit, side = metric_label(measure.name), "left" if measure.better == "lower" else "right"
    scores = {run: result.tested for run, result in judged.results.items()}
    contests = []
    for contest in manifest.contests():
        view = View(path, manifest, contest, [], [row for row in judged.verdicts if row.of(contest)])
        rows = [
            {"arm": label, "seed": seed, "value": score.values[measure.name]}
            for label in view.labels
            for seed, run in sorted(manifest.runs(contest, label).items())
            if (score := scores.get(run)) is not None
        ]
        chart = seeds.seed_values(rows, view.labels, view.scale, f"{unit} ({side} is better)")
        figures = {
            "forest": forest.figure(view),
            "seeds": Figure("Scores by seed.", "One dot per run; the bar is the mean.", chart)
            if rows
            else None,
        }
        contests.append(
            {
                "contest": contest,
                "verdicts": view.verdicts,
                "sentences": [(row.verdict, sentence(row)) for row in view.verdicts],
                "pictures": drawn(figures),
            }
        )
    warnings = [
        f"{row.label}: {note}" for row in judged.verdicts for note in row.notes if note != "exploratory"
    ]
    page = (
        templates()
        .get_template("judged.html.jinja")
        .render(
            manifest=manifest,
            contests=contests,
            measure=measure,
            unit=unit,
            source=source,
            warnings=list(dict.fromkeys(warnings)),
            bundle=chart_library(),
            style=asset("page.css"),
            script=asset("theme.js") + asset("page.js"),
            version=VERSION,
        )
    )
    target = path / "report.html"
    write_atomic(target, page)
    return target
