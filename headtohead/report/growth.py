"""Chart of time per token against context, one line per mechanism."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from headtohead.bench.growth import axis_rows
from headtohead.common.errors import UserError
from headtohead.common.files import write_output
from headtohead.report.charts import BASELINE, PALETTE
from headtohead.report.figures import PAPER, as_svg

Row = dict[str, Any]
GROWS, STAYS, STANDARD = "declared to grow with context", "declared constant", "standard"
_COLORS = {STANDARD: "#24292f", GROWS: PALETTE[1], STAYS: PALETTE[0]}
_HEIGHT, _LINE = 460, 15.0
"""Height of the chart and of a label, in points."""
_LABELS = 0.42
"""Width of the label area relative to the lines."""
_MORE = 1.1
"""Declared FLOPs grow if their ratio between longest and shortest context exceeds this."""


def write_growth(rows: Sequence[Row], path: Path) -> Path:
    """Write the rows of `bench growth` as a PNG or SVG chart; return the path."""
    check_picture(path)
    svg = as_svg(growth_chart(rows), PAPER)
    if path.suffix == ".svg":
        write_output(path, svg)
    else:
        import vl_convert

        write_output(path, vl_convert.svg_to_png(svg, scale=3))
    return path


def check_picture(path: Path) -> None:
    """Raise if no image can be written to this path."""
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"picture={path}: the file must end in .png or .svg")
    if not path.parent.is_dir():
        raise UserError(f"picture={path}: no directory {path.parent}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"picture={path}: this path is not writable")


def growth_chart(rows: Sequence[Row]) -> Row:
    """Return the chart definition; needs two or more contexts with the settings of the last row."""
    points = _points(rows)
    contexts = sorted({point["context"] for point in points})
    if len(contexts) < 2:
        raise UserError("a growth chart needs rows at two contexts or more")
    ends = _labels(points, contexts)
    low, high = contexts[0], contexts[-1]
    beyond = high * (high / low) ** _LABELS
    times = [point["time"] for point in points]
    x = alt.X(
        "context:Q",
        title="context, tokens",
        scale=alt.Scale(type="log", domain=[low / 1.1, beyond], nice=False),
        axis=alt.Axis(values=contexts, format=",d", grid=False, titleAnchor="start"),
    )
    y = alt.Y(
        "time:Q",
        title="µs per token",
        scale=alt.Scale(type="log", domain=_range(times), nice=False),
        axis=alt.Axis(format="~g", values=_ticks(times)),
    )
    color = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=list(_COLORS), range=list(_COLORS.values())),
        legend=alt.Legend(title=None, orient="top", symbolType="stroke", symbolStrokeWidth=3, labelLimit=300),
    )
    # The baseline is drawn last, on top.
    lines = alt.Chart(alt.Data(values=sorted(points, key=lambda point: point["kind"] == STANDARD)))
    labels = alt.Chart(alt.Data(values=ends))
    layers = [
        *(
            lines.transform_filter(f"datum.kind {sign} '{STANDARD}'")
            .mark_line(opacity=0.85, strokeWidth=width)
            .encode(x=x, y=y, color=color, detail="arm:N")
            for sign, width in (("!=", 1.6), ("==", 3.5))
        ),
        lines.mark_point(filled=True, size=28, opacity=1).encode(x=x, y=y, color=color),
        labels.mark_rule(color=BASELINE, strokeWidth=0.6).encode(
            x=x, y=y, x2=alt.X2("beside:Q"), y2=alt.Y2("place:Q")
        ),
        labels.mark_text(align="left", dx=3, fontSize=12).encode(
            x=alt.X("beside:Q"), y=alt.Y("place:Q"), text="label:N", color=color
        ),
    ]
    setting = rows[-1]
    middle = setting["base"]
    title = alt.TitleParams(
        "Training time per token against context",
        subtitle=(
            f"Forward and backward of {setting['size']} reduced to {middle['layers']} layers, "
            f"{middle['context'] * middle['batch']:,} tokens per step at every context, "
            f"{setting['precision']}, {setting['device']}"
        ),
        anchor="start",
        fontSize=16,
        subtitleFontSize=11,
        subtitleColor=BASELINE,
    )
    definition: Row = alt.layer(*layers).properties(height=_HEIGHT, title=title).to_dict()
    return definition


def _points(rows: Sequence[Row]) -> list[Row]:
    """Return a point for each measured row on the context axis."""
    if not rows:
        raise UserError("no rows to draw")
    same = ("size", "device", "precision", "compiled", "base")
    own = [row for row in rows if all(row[key] == rows[-1][key] for key in same)]
    points = []
    for arm in dict.fromkeys(row["arm"] for row in own):
        if not (line := axis_rows(own, "context", arm)):
            continue
        grows = line[-1]["flops"] > _MORE * line[0]["flops"]
        kind = STANDARD if arm == STANDARD else GROWS if grows else STAYS
        for row in line:
            if "seconds" in row:
                time = 1e6 * row["seconds"] / (row["context"] * row["batch"])
                points.append({"arm": arm, "kind": kind, "context": row["context"], "time": time})
    return points


def _labels(points: Sequence[Row], contexts: Sequence[int]) -> list[Row]:
    """Return the end of each line and a non-overlapping position for its label."""
    ends = {point["arm"]: point for point in points}
    low, high = (math.log(value) for value in _range([point["time"] for point in points]))
    least = _LINE * (high - low) / _HEIGHT
    order = sorted(ends.values(), key=lambda point: point["time"])
    places = spread([math.log(point["time"]) for point in order], least, low, high)
    beside = contexts[-1] * (contexts[-1] / contexts[0]) ** 0.06
    return [
        {**point, "label": point["arm"], "beside": beside, "place": math.exp(place)}
        for point, place in zip(order, places, strict=True)
    ]


def spread(wanted: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Return positions near `wanted`, in order, at least `least` apart, within [low, high] if they fit."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + least) if places else max(place, low))
    top = high
    for index in reversed(range(len(places))):
        places[index] = min(places[index], top)
        top = places[index] - least
    return places


def _range(times: Sequence[float]) -> list[float]:
    return [min(times) / 1.15, max(times) * 1.15]


def _ticks(times: Sequence[float]) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten within the range."""
    low, high = _range(times)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        value for power in powers for factor in (1, 2, 5) if low <= (value := factor * 10.0**power) <= high
    ]
