"""The report page: one self-contained HTML file without network requests."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.files import digest, read_json, write_atomic, write_json
from headtohead.common.version import VERSION
from headtohead.data.shards import cache_dir
from headtohead.report.advice import advice
from headtohead.report.figures import draw, draw_study
from headtohead.report.gather import arm_rows, configuration, drawn_labels, environments, gather
from headtohead.report.panels import View
from headtohead.report.panels.verdicts.forest import VERDICTS
from headtohead.report.templates import asset, templates
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.verdict import Verdict, headlines, sentence
from headtohead.study.store.manifest import Manifest, metric_label


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
    views = []
    for contest in manifest.contests():
        rows = [row for row in verdicts if row.of(contest)]
        arms = gather(path, manifest, contest, analysis.results, damage, rows)
        views.append(View(path, manifest, contest, arms, rows, analysis))
    places = manifest.contests()
    contests = [{**_contest(view), "short": view.contest.title_among(places)} for view in views]
    page = (
        templates()
        .get_template("page.html.jinja")
        .render(
            manifest=manifest,
            contests=contests,
            pictures=draw_study(views),
            verdicts=verdicts,
            headlines=headlines(verdicts),
            primary=_primary(verdicts, manifest),
            better=_better(manifest),
            environments=environments(path, manifest, damage),
            warnings=[*dict.fromkeys(damage), *manifest.notes, *warnings(verdicts, contests)],
            bundle=chart_library(),
            style=asset("page.css"),
            script=asset("theme.js") + asset("page.js"),
            version=VERSION,
            stamp=stamp,
            folded=any(part["drawn"] for part in contests),
        )
    )
    target = path / "report.html"
    write_atomic(target, page)
    return target


def _better(manifest: Manifest) -> str:
    """Return which direction of the study's metrics is better, as text."""
    found = [manifest.measure(contest) for contest in manifest.contests()]
    names = list(dict.fromkeys(metric_label(row.name) for row in found)) or ["bits per byte"]
    way = "Higher" if any(row.better == "higher" for row in found) else "Lower"
    return f"{way} {', '.join(names)} is better"


def _contest(view: View) -> dict[str, Any]:
    manifest, contest, arms, rows = view.manifest, view.contest, view.arms, view.verdicts
    equal, different = configuration(arms)
    return {
        "contest": contest,
        "verdicts": rows,
        "count": _count(rows),
        "sentences": [(row.verdict, sentence(row)) for row in rows],
        "arms": arm_rows(arms, view.measure.name),
        "unit": view.unit,
        "others": [metric_label(name) for name in _others(view)],
        "drawn": _drawn(view),
        "task": view.contest.corpus_label in manifest.measures,
        "pictures": draw(view),
        "advice": advice(rows, arms, manifest.baseline),
        "equal": equal,
        "different": different,
        "solved": [row for row in manifest.solved if row.contest == contest],
        "size": arms[0].record.get("size", {}) if arms else {},
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
    return next(
        (
            f"{row.label} at {contest.title_among(places)}"
            for contest in places
            for row in verdicts
            if row.primary and row.of(contest)
        ),
        "none",
    )


def _others(view: View) -> list[str]:
    """Return a task's further metrics, if a run has them."""
    return next(iter(arm_rows(view.arms, view.measure.name)), {"others": []})["others"]


def _count(rows: list[Verdict]) -> list[tuple[str, int]]:
    """Return the number of arms per verdict, undecided last."""
    found = [(verdict, sum(row.verdict == verdict for row in rows)) for verdict in VERDICTS]
    return [(verdict, number) for verdict, number in found if number]


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


_NEAR = 0.005
"""Relative mismatch of a budget above which the page warns."""

_MAKE_BUNDLE = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").encode())
"""


@cache
def chart_library() -> str:
    """Return the chart library as one script; built once per version, in a subprocess since it needs 100 MB."""
    kept = cache_dir() / "pages" / f"charts-{version('vl-convert-python')}.json"
    try:
        found = read_json(kept)
        if digest(found["script"]) == found["sha256"]:
            return str(found["script"])
    except (UserError, KeyError, TypeError, AttributeError):
        pass
    made = subprocess.run([sys.executable, "-c", _MAKE_BUNDLE], capture_output=True, check=True)
    script = made.stdout.decode().replace("</script", "<\\/script")
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, {"sha256": digest(script), "script": script})
    return script
