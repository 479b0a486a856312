"""The page of runs trained elsewhere: what the judge says, every seed, and nothing it cannot know."""

from __future__ import annotations

from pathlib import Path

from altair.utils.schemapi import debug_mode

from headtohead.common.files import write_atomic
from headtohead.common.version import VERSION
from headtohead.report import charts
from headtohead.report.page import chart_library, definition_text
from headtohead.report.templates import beside, templates
from headtohead.study.table import Judged
from headtohead.study.verdict import metric_words, sentence


def write_judged(path: Path, judged: Judged, source: str) -> Path:
    """Write the page of a judged table into a directory; return where it is. `source` names the table."""
    outline, measure = judged.outline, judged.measure
    labels = [label for _, label in outline.arms]
    scale = charts.colours(labels, outline.baseline)
    unit, side = metric_words(measure.name), "left" if measure.better == "lower" else "right"
    contests = []
    for contest in outline.contests():
        rows = [row for row in judged.verdicts if row.of(contest)]
        seeds = [
            {"arm": label, "seed": seed, "value": judged.results[run]["test"][measure.name]}
            for label in labels
            for seed, run in sorted(outline.runs(contest, label).items())
            if judged.results.get(run, {}).get("status") == "done"
        ]
        pictures = {}
        with debug_mode(False):
            if any(row.difference is not None for row in rows):
                pictures["forest"] = definition_text(charts.forest(rows).to_dict(validate=False))
            if seeds:
                chart = charts.seed_values(seeds, labels, scale, f"{unit} ({side} is better)")
                pictures["seeds"] = definition_text(chart.to_dict(validate=False))
        sentences = [(row.verdict, sentence(row)) for row in rows]
        contests.append({"contest": contest, "verdicts": rows, "sentences": sentences, "charts": pictures})
    warnings = [
        f"{row.label}: {note}" for row in judged.verdicts for note in row.notes if note != "exploratory"
    ]
    page = (
        templates()
        .get_template("judged.html.jinja")
        .render(
            outline=outline,
            contests=contests,
            measure=measure,
            unit=unit,
            source=source,
            warnings=list(dict.fromkeys(warnings)),
            bundle=chart_library(),
            style=beside("page.css"),
            script=beside("page.js"),
            version=VERSION,
        )
    )
    target = path / "report.html"
    write_atomic(target, page)
    return target
