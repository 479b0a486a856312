"""The page: one self-contained HTML file that asks the network for nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from headtohead.common.errors import UserError
from headtohead.common.files import digest, read_json, write_atomic, write_json
from headtohead.common.version import VERSION
from headtohead.data.shards import cache_dir
from headtohead.report import charts
from headtohead.report.gather import (
    ArmFacts,
    arm_rows,
    configuration,
    curve_rows,
    environments,
    gather,
    seed_rows,
)
from headtohead.report.templates import style, templates
from headtohead.study.outline import Contest, Outline
from headtohead.study.verdict import Verdict, headlines, sentence


def write_report(
    path: Path,
    outline: Outline,
    verdicts: list[Verdict],
    results: dict[str, Any],
    damage: list[str],
    stamp: str,
) -> Path:
    """Write the page of a study into its directory; return where it is.

    `damage` names files left out; `stamp` stands in the page's head and tells its content from another's.
    """
    contests, damage = [], list(damage)
    for contest in outline.contests():
        arms = gather(path, outline, contest, results, damage)
        rows = [row for row in verdicts if row.of(contest)]
        contests.append(_contest(outline, contest, arms, rows))
    page = (
        templates()
        .get_template("page.html.jinja")
        .render(
            outline=outline,
            contests=contests,
            verdicts=verdicts,
            headlines=headlines(verdicts),
            environments=environments(path, outline),
            warnings=[*dict.fromkeys(damage), *_warnings(verdicts, contests)],
            bundle=_bundle(),
            style=style(),
            version=VERSION,
            stamp=stamp,
        )
    )
    target = path / "report.html"
    write_atomic(target, page)
    return target


def _contest(outline: Outline, contest: Contest, arms: list[ArmFacts], rows: list[Verdict]) -> dict[str, Any]:
    labels = [label for _, label in outline.arms]
    scale = charts.colours(labels, outline.baseline)
    references = outline.references.get(contest.corpus_label, {})
    equal, different = configuration(arms)
    curves, seeds = curve_rows(arms), seed_rows(arms)
    pictures = {}
    with debug_mode(
        False
    ):  # the tests validate the charts; ten thousand rows of data would take seconds here
        if any(row.difference is not None for row in rows):
            pictures["forest"] = _definition(charts.forest(rows))
        if curves:
            pictures["curves"] = _definition(charts.learning_curves(curves, references, scale))
        if seeds:
            pictures["seeds"] = _definition(charts.seed_values(seeds, labels, scale))
    return {
        "contest": contest,
        "verdicts": rows,
        "sentences": [(row.verdict, sentence(row)) for row in rows],
        "arms": arm_rows(arms),
        "charts": pictures,
        "equal": equal,
        "different": different,
        "references": references,
        "solved": [row for row in outline.solved if row.contest == contest],
        "size": arms[0].record.get("size", {}) if arms else {},
    }


def _warnings(verdicts: list[Verdict], contests: list[dict[str, Any]]) -> list[str]:
    """Return what a careful reader should know before believing a number."""
    found = []
    several = len(contests) > 1
    for contest in contests:
        place = f" ({contest['contest'].title})" if several else ""
        for row in contest["verdicts"]:
            words = [note for note in row.notes if note != "exploratory"]
            found += [f"{row.label}{place}: {note}" for note in words]
    if any(row.n < 3 for row in verdicts):
        found.append("fewer than three paired seeds: intervals are wide or missing")
    for contest in contests:
        epochs = max((row["epochs"] or 0 for row in contest["arms"]), default=0)
        if epochs > 1:
            found.append(f"{contest['contest'].corpus_label}: the train split was seen {epochs:.1f} times")
        counts = {row["parameters"] for row in contest["arms"] if row["parameters"]}
        if len(counts) > 1 and contest["contest"].shape != "params":
            low, high = min(counts), max(counts)
            if high / low > 1.005:
                found.append(
                    f"parameters are not matched (shape {contest['contest'].shape}): {low:,} to {high:,}"
                )
    return list(dict.fromkeys(found))


def _definition(chart: alt.TopLevelMixin) -> str:
    """Return a chart as JSON that is safe inside a script tag."""
    text = json.dumps(chart.to_dict(validate=False), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


_MAKE_BUNDLE = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").encode())
"""


@cache
def _bundle() -> str:
    """Return the chart library as one script; made once per version, in a process of its own: it takes 100 MB."""
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
