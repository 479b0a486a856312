"""The charts of a contest, drawn once: the page, the picture files and the watched study all take them from here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from altair.utils.schemapi import debug_mode

from headtohead.common.errors import UserError
from headtohead.common.files import write_atomic
from headtohead.report import charts
from headtohead.report.gather import ArmFacts, cost_rows, curve_rows, gather, rate_rows, ratio_rows, seed_rows
from headtohead.study.outline import Contest, Outline
from headtohead.study.verdict import Verdict

Definition = dict[str, Any]
_FONT = "Liberation Sans, Arial, sans-serif"
PAPER = charts.theme("#24292f", "#e3e6ea", _FONT) | {"background": "#ffffff"}
NIGHT = charts.theme("#d7dae0", "#3a3f47", _FONT) | {"background": "#14171c"}
_WIDTH = 640
_PNG_SCALE = 3  # 640 points wide at 216 dots per inch


def draw(
    outline: Outline, contest: Contest, arms: list[ArmFacts], verdicts: list[Verdict]
) -> dict[str, Definition]:
    """Return the definitions of a contest's charts by name; a chart without data is not there."""
    labels = [label for _, label in outline.arms]
    scale = charts.colours(labels, outline.baseline)
    references = outline.references.get(contest.corpus_label, {})
    curves, seeds, (means, dots) = curve_rows(arms), seed_rows(arms), cost_rows(arms)
    found: dict[str, charts.Chart] = {}
    # The tests validate the charts; ten thousand rows of data would take seconds here.
    with debug_mode(False):
        if any(row.difference is not None for row in verdicts):
            found["forest"] = charts.forest(verdicts)
        if curves:
            found["curves"] = charts.learning_curves(curves, references, scale)
        if means:
            found["cost"] = charts.quality_against_cost(means, dots, scale)
        if rates := rate_rows(outline, contest):
            found["rates"] = charts.learning_rates(rates, scale)
        if ratios := ratio_rows(arms):
            found["ratios"] = charts.circuit_ratios(ratios, scale)
        if seeds:
            found["seeds"] = charts.seed_values(seeds, labels, scale)
        return {name: chart.to_dict(validate=False) for name, chart in found.items()}


def variants(name: str, definition: Definition) -> dict[str, Definition]:
    """Return a chart once for each x axis it offers, by a name of its own."""
    axes = definition.get("usermeta", {}).get("axes", {})
    return {f"{name}-{axis}": at_axis(definition, axis) for axis in axes} or {name: definition}


def at_axis(definition: Definition, axis: str) -> Definition:
    """Return the chart with another x axis."""
    changed = [
        {**param, "value": axis} if param["name"] == charts.AXIS else param for param in definition["params"]
    ]
    return {**definition, "params": changed}


def as_svg(definition: Definition, theme: Definition, width: int = _WIDTH) -> str:
    """Return a chart as SVG."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(json.dumps({**definition, "width": width, "config": theme})))


def write_charts(
    path: Path,
    outline: Outline,
    verdicts: list[Verdict],
    results: dict[str, Any],
    progress: Callable[[str, float], None],
) -> list[Path]:
    """Write every chart of a study as SVG and PNG into its folder `charts`; return the files."""
    import vl_convert

    folder = path / "charts"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    wanted: dict[str, Definition] = {}
    contests = outline.contests()
    for place, contest in enumerate(contests, start=1):
        arms = gather(path, outline, contest, results, [])
        # Names of corpora are a user's words: only letters and digits of them come into a file's name.
        words = re.sub(r"[^a-z0-9]+", "-", contest.title.lower()).strip("-")[:60]
        prefix = f"{place}-{words}-" if len(contests) > 1 else ""
        rows = [row for row in verdicts if row.of(contest)]
        for name, definition in draw(outline, contest, arms, rows).items():
            wanted |= {f"{prefix}{key}": value for key, value in variants(name, definition).items()}
    written = []
    for count, (name, definition) in enumerate(wanted.items()):
        progress("drawing", count / len(wanted))
        svg = as_svg(definition, PAPER)
        for ending, content in ((".svg", svg), (".png", vl_convert.svg_to_png(svg, scale=_PNG_SCALE))):
            write_atomic(folder / f"{name}{ending}", content)
            written.append(folder / f"{name}{ending}")
    return written
