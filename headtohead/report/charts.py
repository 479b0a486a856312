"""Charts of all panels: dots with intervals, lines with bands, grids of verdicts; their colors, axes and legends.

One Vega-Lite definition is used for pages and image files. Layers refer to rows by name, so that each row is stored once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

Row = dict[str, Any]
Chart = alt.LayerChart | alt.FacetChart
# The Okabe-Ito palette, distinguishable with color vision deficiency; the baseline is gray.
BASELINE = "#7f7f7f"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#A6761D")
SHADES = (*PALETTE, "#C2185B", "#004D40", "#7B2D26", "#5C6BC0", "#9E9D24", "#00ACC1", "#6D4C41", "#37474F")
"""Colors of arms: those of the palette, then darker ones for studies of many arms."""
VERDICTS = {"better": "#009E73", "worse": "#D55E00", "equivalent": "#0072B2", "undecided": "#8a8a8a"}
OUTCOMES = {"supported": "#009E73", "contradicted": "#D55E00", "open": "#8a8a8a"}
"""The outcomes of a claim, with their colors."""
AXIS = "axis"
"""The parameter that holds what the reader selected with a chart's buttons."""
# Phone width; outside a page a chart has no container and is not narrow.
NARROW = "containerSize()[0] < 500"
LONG_NAME = 20
"""Letters of an arm's name above which two names do not fit beside each other on a phone."""
_NARROW_LABEL = 160
"""Points of an arm's name on a phone: 32 small letters."""
_REFERENCE = "#888"
_MANY_COLUMNS = 6
"""Number of columns of a grid from which labels are rotated."""


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


# CSS variables: a chart switches between light, dark and print without being redrawn.
PAGE = theme("var(--ink)", "var(--line)", "system-ui, sans-serif")


def colors(labels: Sequence[str], baseline: str) -> alt.Scale:
    """Return one color per arm, the same in every chart."""
    others = [label for label in labels if label != baseline]
    shades = {label: SHADES[index % len(SHADES)] for index, label in enumerate(others)}
    return alt.Scale(domain=list(labels), range=[shades.get(label, BASELINE) for label in labels])


def legend(lines: bool = False) -> alt.Legend:
    """Return the legend above a chart of dots, or of lines."""
    if not lines:
        columns = alt.ExprRef(f"{NARROW} ? 2 : 4")
        return alt.Legend(title=None, orient="top", symbolOpacity=1, columns=columns)
    return alt.Legend(
        title=None,
        orient="top",
        symbolType="stroke",
        symbolStrokeWidth=3,
        symbolOpacity=1,
        labelLimit=alt.ExprRef(f"{NARROW} ? {_NARROW_LABEL} : 240"),
        labelFontSize=alt.ExprRef(f"{NARROW} ? 11 : 13"),
        columns=alt.ExprRef(f"{NARROW} ? 2 : containerSize()[0] >= 900 ? 4 : 3"),
    )


def in_one_column(legend: alt.Legend) -> alt.Legend:
    """Return the legend for long names: on a phone one below the other."""
    legend.columns = alt.ExprRef(f"{NARROW} ? 1 : containerSize()[0] >= 900 ? 3 : 2")
    legend.labelLimit = 300
    return legend


def header_size(names: Sequence[str]) -> int:
    """Return the font size of names beside small charts: smaller if one is long."""
    return 10 if any(len(name) > LONG_NAME for name in names) else 13


def verdict_color(orient: Any = "top") -> alt.Color:
    """Return the colors of verdicts, with their legend."""
    shown = legend()
    shown.orient = orient
    scale = alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values()))
    return alt.Color("verdict:N", scale=scale, legend=shown)


def arm_axis(limit: int = 220) -> alt.Axis:
    """Return the axis that names the arms."""
    room = alt.ExprRef(f"{NARROW} ? {_NARROW_LABEL} : {limit}")
    small = [{"test": f"{NARROW} && length(datum.label) > 22", "value": 9}, {"test": NARROW, "value": 11}]
    sizes: Any = {"condition": small, "value": 13}
    return alt.Axis(labelFontSize=sizes, labelLimit=room, domain=False, ticks=False)


def tips(*names: str, **forms: str) -> list[alt.Tooltip]:
    """Return the fields shown on hover: texts, and numbers with their formats."""
    texts = [alt.Tooltip(f"{name}:N") for name in names]
    return texts + [alt.Tooltip(f"{name}:Q", format=form) for name, form in forms.items()]


@dataclass(frozen=True)
class Choice:
    """Buttons above a chart. Each selects the field of the rows that is drawn, or the group of rows."""

    names: Mapping[str, tuple[str, str]]
    """By field or group: button label and title."""
    into: str = "x"
    """The field that holds the selected one: x, or mean (the y axis)."""
    group: str = ""
    """The field with a row's group, if buttons select groups."""
    first: str = ""
    """What is selected at the beginning; the first by default."""

    def apply(self, data: alt.Chart) -> alt.Chart:
        """Return the selected rows, or the rows that have the selected field."""
        if self.group:
            return data.transform_filter(f"datum.{self.group} == {AXIS}")
        chosen = data.transform_calculate(**{self.into: f"datum[{AXIS}]"})
        return chosen.transform_filter(f"isValid(datum.{self.into})")

    def by_name(self, values: Mapping[str, Any]) -> alt.ExprRef:
        """Return the value that belongs to what is selected."""
        return alt.ExprRef(f"({json.dumps(values)})[{AXIS}]")

    def offered(self, chart: Chart) -> Chart:
        """Return the chart with the parameter, the title of what is selected, and the buttons in `usermeta`."""
        chart = chart.add_params(alt.param(name=AXIS, value=self.first or next(iter(self.names))))
        if not self.group:
            # An axis title cannot depend on a parameter; a chart title can.
            title = self.by_name({name: title for name, (_, title) in self.names.items()})
            below: Row = {"orient": "bottom", "anchor": "middle"}
            placed = below if self.into == "x" else {"anchor": "start", "offset": 8}
            chart.title = alt.TitleParams(title, frame="group", **placed)
        if len(self.names) > 1 or not self.group:
            chart.usermeta = {"axes": {name: button for name, (button, _) in self.names.items()}}
        return chart


def named(name: str, choice: Choice | None = None) -> alt.Chart:
    """Return a chart of the named rows, or of the selected ones among them."""
    data = alt.Chart(alt.NamedData(name))
    return choice.apply(data) if choice else data


def layered(
    layers: Sequence[alt.Chart], rows: Mapping[str, Sequence[Row]], height: int, choice: Choice | None = None
) -> Chart:
    """Return the layers as one chart with its named rows."""
    chart: Chart = alt.layer(*layers).properties(width="container", height=height)
    if choice:
        chart = choice.offered(chart)
    chart.datasets = dict(rows)  # set last and by name: altair copies a chart with its rows at every step
    return chart


def rule(value: float, axis: str = "x", scale: Any = alt.Undefined) -> alt.Chart:
    """Return a dashed line at a value of the x or y axis."""
    base = alt.Chart(alt.Data(values=[{"rule": value}])).mark_rule(strokeDash=[4, 3], color=_REFERENCE)
    return base.encode(x=alt.X("rule:Q", scale=scale)) if axis == "x" else base.encode(y="rule:Q")


def references(values: Mapping[str, float], form: str) -> alt.Chart:
    """Return a chart of named reference values: `value`, and `words` with the formatted value."""
    rows = [{"value": value, "words": f"{name} {value:{form}}"} for name, value in values.items()]
    return alt.Chart(alt.Data(values=rows))


def category(field: str, order: Sequence[str], axis: alt.Axis | None = None) -> alt.Y:
    """Return the y axis of a chart of dots; | in a label starts a new line."""
    axis = axis or arm_axis()
    if any("|" in name for name in order):
        axis.labelExpr = "split(datum.label, '|')"
    return alt.Y(f"{field}:N", sort=list(order), title=None, axis=axis)


def dots(
    means: Sequence[Row],
    seeds: Sequence[Row],
    order: Sequence[str],
    color: alt.Color,
    title: str | list[str],
    *,
    field: str = "arm",
    offset: alt.YOffset | None = None,
    form: str = ".4f",
    about: Sequence[str] = ("arm",),
    scale: alt.Scale | None = None,
    axis: alt.Axis | None = None,
    names: alt.Axis | None = None,
    under: Sequence[alt.Chart] = (),
    height: int = 36,
    choice: Choice | None = None,
    bold: bool = False,
) -> Chart:
    """Return dots with intervals, one line per value of `field`; `order` lists these values.

    `means` have `mean`, `low` and `high`, and `words` for a label; without them, the means of `seeds` are drawn. `seeds` have
    `value` and `seed`. Means are ticks among the dots of seeds; with `bold`, dots among the thin ticks of seeds. `about` lists
    the text fields shown on hover, `form` is the format of all numbers, `axis` and `names` are the axes of values and of
    lines, `under` are layers below, `height` is per line.
    """
    y = category(field, order, names)
    place: Row = {"y": y} | ({"yOffset": offset} if offset else {})

    def x(name: str) -> alt.X:
        fitted = scale or alt.Scale(zero=False, nice=True)
        return alt.X(name, title=title, scale=fitted, axis=axis or alt.Axis())

    layers = list(under)
    one = named("seeds", choice)
    if seeds and bold:
        mark = one.mark_tick(thickness=1.5, size=14, opacity=0.45, color=_REFERENCE)
        layers.append(mark.encode(x=x("value:Q"), tooltip=tips("arm", "seed", value=form), **place))
    mean, hover = named("means", choice), tips(*about, mean=form, low=form, high=form)
    # An arm without an interval (one seed, or no spread) has no rule; Vega warns about a layer without numbers.
    if any(row["low"] is not None for row in means):
        known = mean.transform_filter("isValid(datum.low)")
        bar = (
            known.mark_rule(strokeWidth=3) if bold else known.mark_rule(strokeWidth=2, opacity=0.5, clip=True)
        )
        layers.append(bar.encode(x=x("low:Q"), x2="high:Q", color=color, tooltip=hover, **place))
    if seeds and not bold:
        circle = one.mark_circle(size=46 if offset else 80, opacity=0.75)
        shown = tips(*about, "seed", value=form)
        layers.append(circle.encode(x=x("value:Q"), color=color, tooltip=shown, **place))
    if bold:
        point = mean.mark_point(filled=True, size=110, opacity=1)
        layers.append(point.encode(x=x("mean:Q"), color=color, tooltip=hover, **place))
        if "words" in means[0]:
            text = mean.mark_text(dy=-13, fontSize=12)
            layers.append(text.encode(x=x("mean:Q"), text="words:N", color=color, **place))
    else:
        at, source = ("mean:Q", mean) if means else ("mean(value):Q", one)
        tick = source.mark_tick(thickness=2.5, size=16 if offset else 26)
        layers.append(tick.encode(x=x(at), color=color, **place, **({"tooltip": hover} if means else {})))
    rows = {name: list(given) for name, given in (("means", means), ("seeds", seeds)) if given}
    return layered(layers, rows, height * len(order), choice)


def line_layers(
    data: alt.Chart,
    x: alt.X,
    y: alt.Y,
    color: alt.Color,
    hover: Sequence[alt.Tooltip] = (),
    *,
    band: float = 0.0,
    bars: bool = False,
    width: float = 2,
    dash: Sequence[float] = (),
    points: int = 0,
    filled: bool = True,
    pick: bool = False,
) -> list[alt.Chart]:
    """Return the layers of lines: `low` to `high` as a band of this opacity or as bars, a line, and points of this size.

    A line of width 0 is left out. With `pick`, a click in the legend selects arms, and the nearest point shows its numbers.
    """
    low = {"y": alt.Y("low:Q", title=y["title"], scale=y["scale"]), "y2": alt.Y2("high:Q")}
    layers = []
    arms = alt.selection_point(name="arms", fields=["arm"], bind="legend", toggle="true")
    near = alt.selection_point(name="near", nearest=True, on="pointermove", clear="pointerout", empty=False)

    def shown(selected: alt.Parameter, yes: float, no: float) -> Row:
        return {"opacity": alt.condition(selected, alt.value(yes), alt.value(no))} if pick else {}

    if band:
        area = data.mark_area(opacity=band, clip=True)
        layers.append(area.encode(x=x, color=color, **low, **shown(arms, band, 0)))
    if bars:
        layers.append(data.mark_rule(strokeWidth=2, clip=True).encode(x=x, color=color, **low))
    if width:
        line = data.mark_line(strokeWidth=width, clip=True, strokeDash=list(dash) or alt.Undefined)
        tooltip = {"tooltip": list(hover)} if hover and (pick or not points) else {}
        encoded = line.encode(x=x, y=y, color=color, **tooltip, **shown(arms, 1.0, 0.07))
        layers.append(encoded.add_params(arms) if pick else encoded)
    if points:
        mark = data.mark_point(filled=filled, size=points, opacity=1)
        encoded = mark.encode(x=x, y=y, color=color, tooltip=list(hover), **shown(near, 1, 0))
        layers.append(encoded.add_params(near) if pick else encoded)
    return layers


def lines(
    rows: Sequence[Row],
    x: alt.X,
    y: alt.Y,
    color: alt.Color,
    hover: Sequence[alt.Tooltip],
    *,
    under: Sequence[alt.Chart] = (),
    over: Sequence[alt.Chart] = (),
    height: int = 280,
    choice: Choice | None = None,
    **style: Any,
) -> Chart:
    """Return lines with bands; `under` and `over` are layers below and above, `style` as in `line_layers`."""
    layers = [*under, *line_layers(named("points", choice), x, y, color, hover, **style), *over]
    return layered(layers, {"points": rows}, height, choice)


def verdict_cell(arm: str, column: str, row: Any, largest: float) -> Row:
    """Return one cell of a grid of verdicts; its color is stronger for larger decided differences."""
    strength = 0.6 * abs(row.difference) / largest if row.verdict != "undecided" else 0.0
    return {
        "arm": arm,
        "evaluated": column,
        "difference": row.difference,
        "low": row.ci_low,
        "high": row.ci_high,
        "verdict": row.verdict,
        "strength": 0.2 + strength,
        "words": f"{row.difference:+.4f}",
        "interval": "" if row.ci_low is None else f"{row.ci_low:+.3f} to {row.ci_high:+.3f}",
    }


def verdict_grid(rows: Sequence[Row], title: str, seeds: Sequence[Row] = ()) -> Chart:
    """Return the cells as a grid colored by verdict; ← in an arm's name starts a second line.

    `seeds` are dots at the bottom of a cell; `place` is the x position from -1 to 1.
    """
    order = list(dict.fromkeys(row["arm"] for row in rows))
    columns = list(dict.fromkeys(row["evaluated"] for row in rows))
    angle = 0 if len(columns) < _MANY_COLUMNS else -25
    above = alt.Axis(orient="top", labelAngle=angle, labelLimit=200, domain=False, ticks=False)
    x = alt.X("evaluated:N", sort=columns, title=title, scale=alt.Scale(paddingInner=0.02), axis=above)
    names = arm_axis(limit=320)
    names.labelExpr = "split(datum.label, ' ← ')"
    names.labelOffset = -8
    y = alt.Y("arm:N", sort=order, title=None, axis=names, scale=alt.Scale(paddingInner=0.04))
    hover = [*tips("arm"), alt.Tooltip("evaluated:N", title=title)]
    hover += tips("verdict", difference="+.4f", low="+.4f", high="+.4f")
    strength = alt.Opacity("strength:Q", scale=None)
    data = named("cells")
    layers = [
        data.mark_rect().encode(x=x, y=y, color=verdict_color("bottom"), opacity=strength, tooltip=hover),
        data.mark_text(dy=-6, fontSize=13).encode(x=x, y=y, text="words:N"),
        data.mark_text(dy=9, fontSize=alt.ExprRef(f"{NARROW} ? 8 : 10")).encode(x=x, y=y, text="interval:N"),
    ]
    if seeds:
        across = alt.ExprRef(f"datum.place * 0.4 * width / {len(columns)}")
        circle = named("seeds").mark_circle(size=22, opacity=0.6, color="#555", xOffset=across, yOffset=21)
        layers.append(circle.encode(x=x, y=y, tooltip=tips("arm", "seed", difference="+.4f")))
    rows_by_name = {"cells": list(rows)} | ({"seeds": list(seeds)} if seeds else {})
    return layered(layers, rows_by_name, (62 if seeds else 44) * len(order))
