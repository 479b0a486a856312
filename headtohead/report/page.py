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

from headtohead.common.errors import UserError
from headtohead.common.files import digest, read_json, write_atomic, write_json
from headtohead.common.version import VERSION
from headtohead.data.shards import cache_dir
from headtohead.report import charts
from headtohead.report.advice import advice
from headtohead.report.gather import ArmFacts, arm_rows, configuration, environments, gather
from headtohead.report.pictures import draw
from headtohead.report.templates import beside, templates
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
            bundle=chart_library(),
            style=beside("page.css"),
            script=beside("page.js"),
            version=VERSION,
            stamp=stamp,
        )
    )
    target = path / "report.html"
    write_atomic(target, page)
    return target


def _contest(outline: Outline, contest: Contest, arms: list[ArmFacts], rows: list[Verdict]) -> dict[str, Any]:
    equal, different = configuration(arms)
    pictures = draw(outline, contest, arms, rows)
    return {
        "contest": contest,
        "verdicts": rows,
        "count": _count(rows),
        "sentences": [(row.verdict, sentence(row)) for row in rows],
        "arms": arm_rows(arms),
        "charts": {name: definition_text(chart) for name, chart in pictures.items()},
        "advice": advice(rows, arms, outline.baseline),
        "equal": equal,
        "different": different,
        "solved": [row for row in outline.solved if row.contest == contest],
        "size": arms[0].record.get("size", {}) if arms else {},
    }


def _count(rows: list[Verdict]) -> list[tuple[str, int]]:
    """Return how many arms got each verdict, those that decide something first."""
    found = [(verdict, sum(row.verdict == verdict for row in rows)) for verdict in charts.VERDICTS]
    return [(verdict, number) for verdict, number in found if number]


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


def definition_text(definition: dict[str, Any]) -> str:
    """Return a chart as JSON that is safe inside a script tag."""
    text = json.dumps(definition | {"config": _THEME}, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


# The style sheet's own variables: a chart changes between light, dark and print without being drawn again.
_THEME = charts.theme("var(--ink)", "var(--line)", "system-ui, sans-serif")
_MAKE_BUNDLE = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").encode())
"""


@cache
def chart_library() -> str:
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
