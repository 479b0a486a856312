"""Shared parts of all charts: colors, axes, legends. One Vega-Lite definition is used for pages and image files."""

from __future__ import annotations

import json
from typing import Any

import altair as alt

Row = dict[str, Any]
Chart = alt.LayerChart | alt.FacetChart
# The Okabe-Ito palette, distinguishable with color vision deficiency; the baseline is gray.
BASELINE = "#7f7f7f"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#A6761D")
AXIS = "axis"
"""The parameter that selects a chart's x axis."""
# Phone width; outside a page a chart has no container and is not narrow.
NARROW = "containerSize()[0] < 500"


def theme(ink: str, line: str, font: str) -> Row:
    """Return the theme of a chart: text color, line color and font."""
    axis = {"labelColor": ink, "titleColor": ink, "gridColor": line, "domainColor": line, "tickColor": line}
    plain = {"fontWeight": "normal", "fontSize": 12}
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "axis": axis | {"titleFontWeight": "normal", "labelFontSize": 12, "titleFontSize": 12},
        "legend": {"labelColor": ink, "titleColor": ink, "labelFontSize": 13},
        "header": {"labelColor": ink, "titleColor": ink},
        "text": {"color": ink},
        "title": {"color": ink} | plain,
    }


def colors(labels: list[str], baseline: str) -> alt.Scale:
    """Return one color per arm, the same in every chart."""
    others = [label for label in labels if label != baseline]
    shades = {label: PALETTE[index % len(PALETTE)] for index, label in enumerate(others)} | {
        baseline: BASELINE
    }
    return alt.Scale(domain=labels, range=[shades[label] for label in labels])


def at_axis_rows(name: str) -> alt.Chart:
    """Return a chart of the named rows with the selected field as x; rows without that field are left out."""
    rows = alt.Chart(alt.NamedData(name)).transform_calculate(x=f"datum[{AXIS}]")
    return rows.transform_filter("isValid(datum.x)")


def switched(
    layers: list[alt.Chart],
    axes: dict[str, tuple[str, str]],
    axis: alt.Parameter,
    rows: dict[str, list[Row]],
    height: int,
) -> Chart:
    """Return the layers as one chart whose x axis is selected by a parameter; `usermeta` lists the choices."""
    # An axis title cannot depend on a parameter; a chart title, placed below the chart, can.
    titles = json.dumps({name: title for name, (_, title) in axes.items()})
    title = alt.TitleParams(
        alt.ExprRef(f"({titles})[{AXIS}]"), orient="bottom", anchor="middle", frame="group"
    )
    choices = {name: short for name, (short, _) in axes.items()}
    chart = alt.layer(*layers).add_params(axis)
    chart = chart.properties(width="container", height=height, title=title, usermeta={"axes": choices})
    chart.datasets = rows  # set last and by name: altair copies a chart with its rows at every step
    return chart


def legend() -> alt.Legend:
    """Return the legend of arms drawn as lines."""
    return alt.Legend(
        title=None,
        orient="top",
        symbolType="stroke",
        symbolStrokeWidth=3,
        symbolOpacity=1,
        labelLimit=alt.ExprRef(f"{NARROW} ? 120 : 240"),
        columns=alt.ExprRef(f"{NARROW} ? 2 : containerSize()[0] >= 900 ? 4 : 3"),
    )


def arm_axis() -> alt.Axis:
    """Return the axis that names the arms."""
    return alt.Axis(
        labelFontSize=13, labelLimit=alt.ExprRef(f"{NARROW} ? 120 : 220"), domain=False, ticks=False
    )
