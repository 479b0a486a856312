"""Panels as Vega-Lite definitions, for the page, the image files and the dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from altair.utils.schemapi import debug_mode

from headtohead.common.errors import UserError
from headtohead.common.files import write_atomic
from headtohead.report import charts
from headtohead.report.panels import CONTEST, STUDY, Figure, View
from headtohead.report.panels.base import Definition, study_views
from headtohead.study.judge.analysis import Analysis

_FONT = "Liberation Sans, Arial, sans-serif"
PAPER = charts.theme("#24292f", "#e3e6ea", _FONT) | {"background": "#ffffff"}
NIGHT = charts.theme("#d7dae0", "#3a3f47", _FONT) | {"background": "#14171c"}
_WIDTH = 640
_PNG_SCALE = 3  # 640 points wide at 216 dots per inch


def draw(view: View, only: Sequence[str] = tuple(CONTEST)) -> dict[str, Figure]:
    """Return a contest's figures by name, with at most `MAX_DRAWN` arms; figures without data are left out."""
    shown = view.drawn()
    return drawn({name: CONTEST[name] for name in only}, shown)


def draw_study(views: Sequence[View]) -> dict[str, Figure]:
    """Return the figures of the whole study by name."""
    return drawn(STUDY, views)


def drawn(panels: Mapping[str, Callable[[Any], Figure | None]], data: Any) -> dict[str, Figure]:
    """Return the figures of panels; those without data are left out."""
    # Charts are validated in tests; validating ten thousand rows here would take seconds.
    with debug_mode(False):
        found = {name: panel(data) for name, panel in panels.items()}
    return {name: figure for name, figure in found.items() if figure is not None}


def variants(name: str, definition: Definition) -> dict[str, Definition]:
    """Return one chart per choice it offers, by name."""
    return {f"{name}-{key}": chart for key, chart in choices(definition).items()} or {name: definition}


def choices(definition: Definition) -> dict[str, Definition]:
    """Return one chart per choice it offers, such as an x axis; empty if it offers none."""
    found = {}
    for key in definition.get("usermeta", {}).get("axes", {}):
        params = [
            row | ({"value": key} if row["name"] == charts.AXIS else {}) for row in definition["params"]
        ]
        found[key] = {**definition, "params": params}
    return found


def as_svg(definition: Definition, theme: Definition, width: int = _WIDTH) -> str:
    """Return a chart as SVG."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(json.dumps({**definition, "width": width, "config": theme})))


def write_charts(
    path: Path,
    analysis: Analysis,
    progress: Callable[[str, float], None],
) -> list[Path]:
    """Write every chart of a study as SVG, PDF and PNG into its folder `charts`; return the files."""
    import vl_convert

    folder = path / "charts"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    views = study_views(path, analysis, [])
    wanted = _files(draw_study(views), "")
    for number, view in enumerate(views, start=1):
        # Corpus names are user input; only letters and digits go into file names.
        slug = re.sub(r"[^a-z0-9]+", "-", view.contest.title.lower()).strip("-")[:60]
        wanted |= _files(draw(view), f"{number}-{slug}-" if len(views) > 1 else "")
    written = []
    for count, (name, definition) in enumerate(wanted.items()):
        progress("drawing", count / len(wanted))
        svg = as_svg(definition, PAPER)
        contents: dict[str, str | bytes] = {
            ".svg": svg,
            ".pdf": vl_convert.svg_to_pdf(svg),
            ".png": vl_convert.svg_to_png(svg, scale=_PNG_SCALE),
        }
        for ending, content in contents.items():
            write_atomic(folder / f"{name}{ending}", content)
            written.append(folder / f"{name}{ending}")
    return written


def _files(figures: dict[str, Figure], prefix: str) -> dict[str, Definition]:
    """Return every chart by file name."""
    return {
        f"{prefix}{key}": value
        for name, figure in figures.items()
        if figure.definition
        for key, value in variants(name, figure.definition).items()
    }
