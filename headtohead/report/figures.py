"""Panels as Vega-Lite definitions, for the page, the image files and the dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from altair.utils.schemapi import debug_mode

from headtohead.common.errors import UserError
from headtohead.common.files import write_atomic
from headtohead.report import charts
from headtohead.report.gather import gather
from headtohead.report.panels import CONTEST, STUDY, Figure, Table, View
from headtohead.study.judge.analysis import Analysis

Definition = dict[str, Any]
_FONT = "Liberation Sans, Arial, sans-serif"
PAPER = charts.theme("#24292f", "#e3e6ea", _FONT) | {"background": "#ffffff"}
NIGHT = charts.theme("#d7dae0", "#3a3f47", _FONT) | {"background": "#14171c"}
_WIDTH = 640
_PNG_SCALE = 3  # 640 points wide at 216 dots per inch


@dataclass(frozen=True)
class Picture:
    """A figure whose chart is a Vega-Lite definition, ready for a page or a file."""

    title: str
    words: str
    hint: str
    chart: Definition | None
    table: Table | None
    links: Sequence[tuple[str, str]] = ()


def draw(view: View, only: Sequence[str] = tuple(CONTEST)) -> dict[str, Picture]:
    """Return a contest's figures by name, with at most `MAX_DRAWN` arms; figures without data are left out."""
    shown = view.drawn()
    return drawn({name: CONTEST[name](shown) for name in only})


def draw_study(views: Sequence[View]) -> dict[str, Picture]:
    """Return the figures of the whole study by name."""
    return drawn({name: figure(views) for name, figure in STUDY.items()})


def drawn(figures: dict[str, Figure | None]) -> dict[str, Picture]:
    """Return figures with their charts as definitions; those without data are left out."""
    # Charts are validated in tests; validating ten thousand rows here would take seconds.
    with debug_mode(False):
        return {
            name: Picture(
                figure.title,
                figure.words,
                figure.hint,
                None if figure.chart is None else figure.chart.to_dict(validate=False),
                figure.table,
                figure.links,
            )
            for name, figure in figures.items()
            if figure is not None
        }


def variants(name: str, definition: Definition) -> dict[str, Definition]:
    """Return one chart per x axis it offers, by name."""
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
    analysis: Analysis,
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
    manifest, verdicts = analysis.manifest, analysis.verdicts
    contests = manifest.contests()
    views = []
    for number, contest in enumerate(contests, start=1):
        rows = [row for row in verdicts if row.of(contest)]
        arms = gather(path, manifest, contest, analysis.results, [], rows)
        # Corpus names are user input; only letters and digits go into file names.
        slug = re.sub(r"[^a-z0-9]+", "-", contest.title.lower()).strip("-")[:60]
        prefix = f"{number}-{slug}-" if len(contests) > 1 else ""
        views.append(View(path, manifest, contest, arms, rows, analysis))
        wanted |= _files(draw(views[-1]), prefix)
    wanted |= _files(draw_study(views), "")
    written = []
    for count, (name, definition) in enumerate(wanted.items()):
        progress("drawing", count / len(wanted))
        svg = as_svg(definition, PAPER)
        for ending, content in ((".svg", svg), (".png", vl_convert.svg_to_png(svg, scale=_PNG_SCALE))):
            write_atomic(folder / f"{name}{ending}", content)
            written.append(folder / f"{name}{ending}")
    return written


def _files(pictures: dict[str, Picture], prefix: str) -> dict[str, Definition]:
    """Return every chart by file name."""
    return {
        f"{prefix}{key}": value
        for name, picture in pictures.items()
        if picture.chart is not None
        for key, value in variants(name, picture.chart).items()
    }
