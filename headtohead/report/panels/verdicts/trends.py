"""The gap to the baseline against size, tokens per parameter or context, with its trend."""

from __future__ import annotations

import json
from collections.abc import Sequence

import altair as alt

from headtohead.report.charts import AXIS, Chart, Row, legend, switched
from headtohead.report.panels.base import Figure, Table, View
from headtohead.study.judge.trends import OVER, Reach, Trend
from headtohead.study.store.manifest import Contest

_ROOM = 1.5
"""How far an interval may extend the y axis beyond the range of the seeds, in units of that range."""
_APART = 0.008
"""Share of the x axis between two arms at the same value, so that they do not overlap."""


def figure(over: str, views: Sequence[View]) -> Figure | None:
    """Return the gap against one of `OVER`, if the study has several values of it."""
    analysis = views[0].analysis
    trends = [trend for trend in analysis.trends if trend.over == over] if analysis is not None else []
    if not trends:
        return None
    what = OVER[over].words
    words = (
        "Gap: arm minus baseline in bits per byte; below 0 is better. Large dots are means with 95 % intervals over seeds, "
        "small dots single seeds. "
    )
    if any(trend.line for trend in trends):
        words += (
            "Line: mean of the lines fitted per seed, with its 95 % band. Dashed: extrapolation to four times the largest value; "
            "the lighter band is the prediction interval (at least 95 %) for one further pair of runs, assuming the line "
            "continues, which these runs cannot show. Intervals are clipped at the frame."
        )
    else:
        words += f"A trend line needs at least three values of {what}."
    chart = gap_chart(trends, over, views[0].labels, views[0].scale)
    return Figure(f"Gap to the baseline against {what}.", words, chart, table=_table(trends))


def _apart(trends: list[Trend]) -> dict[str, str]:
    """Return the distinguishing part of each group's title, by full title."""
    groups = {trend.where: Contest("", **_fields(trend.place)) for trend in trends}
    return {where: contest.title_among(list(groups.values())) for where, contest in groups.items()}


def _fields(place: dict[str, str]) -> dict[str, str]:
    empty = dict.fromkeys(("corpus_label", "size", "shape", "length", "context", "branch"), "")
    return empty | {("corpus_label" if name == "corpus" else name): value for name, value in place.items()}


def _table(trends: list[Trend]) -> Table:
    names = _apart(trends)
    several = len(names) > 1
    rows = []
    for trend in trends:
        line = trend.line
        slope = line.slope if line else None
        end = line.beyond[-1] if line else None
        cells = [
            "–" if slope is None else f"{slope.difference:+.4f}",
            "–" if slope is None or slope.ci_low is None else f"{slope.ci_low:+.4f} to {slope.ci_high:+.4f}",
            "–" if trend.p_holm is None else f"{trend.p_holm:.3g}",
            str(trend.n),
            "–" if end is None or end.low is None else f"{end.low:+.4f} to {end.high:+.4f}",
        ]
        verdict = {"undecided": "undecided", "turns": "the gap changes sign"}.get(
            trend.decision, f"the gap {trend.decision}"
        )
        text = "; ".join([verdict if line else "points only", *trend.notes])
        rows.append([trend.label, *([names[trend.where]] if several else []), text, *cells])
    head = ["arm", *(["contests"] if several else []), "trend", "slope per doubling", "95 % interval"]
    return Table([*head, "p (Holm)", "seeds", "prediction at 4 x"], rows, left=3 if several else 2)


def gap_chart(trends: list[Trend], over: str, order: list[str], scale: alt.Scale) -> Chart:
    """Return the gaps of every arm with their lines; the parameter `axis` selects a group of contests."""
    names = list(dict.fromkeys(trend.where for trend in trends))
    keys = {name: str(number) for number, name in enumerate(names, 1)}
    rows: dict[str, list[Row]] = {"points": [], "seeds": [], "lines": [], "beyond": []}
    ends: dict[str, list[list[float]]] = {}
    for name, key in keys.items():
        here = [trend for trend in trends if trend.where == name]
        ends[key] = _ends(here)
        left, right = ends[key][0]
        for trend in here:
            apart = (order.index(trend.label) - len(order) / 2) * _APART
            base = {"group": key, "arm": trend.label}
            for point in trend.points:
                x = point.value * (right / left) ** apart
                facts = {"gap": point.mean, "low": point.ci_low, "high": point.ci_high}
                rows["points"].append(base | facts | {"x": x, "at": point.name, "value": point.value})
                rows["seeds"] += [
                    base | {"x": x, "gap": gap, "seed": seed, "at": point.name}
                    for seed, gap in zip(point.seeds, point.gaps, strict=True)
                ]
            if trend.line:
                rows["lines"] += [base | _reach(reach) for reach in trend.line.within]
                rows["beyond"] += [base | _reach(reach) for reach in trend.line.beyond]
    data = {name: alt.Chart(alt.NamedData(name)).transform_filter(f"datum.group == {AXIS}") for name in rows}
    ticks = {
        key: sorted({row["value"] for row in rows["points"] if row["group"] == key})
        + [row["x"] for row in rows["beyond"] if row["group"] == key][-1:]
        for key in keys.values()
    }
    form = {"size": ".3~s", "context": "d"}.get(over, ",.3~r")
    x = alt.X(
        "x:Q",
        title=None,
        scale=alt.Scale(type="log", domain=_domain(ends, 0), nice=False),
        axis=alt.Axis(
            values=alt.ExprRef(f"({json.dumps(ticks)})[{AXIS}]"), format=form, grid=False, labelOverlap=True
        ),
    )
    y_scale = alt.Scale(domain=_domain(ends, 1), nice=True, zero=False)
    title = "gap to the baseline, bits per byte"
    y = alt.Y("gap:Q", title=title, scale=y_scale)
    low, high = alt.Y("low:Q", scale=y_scale, title=title), alt.Y2("high:Q")
    color = alt.Color("arm:N", scale=scale, legend=legend())
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("at:N", title=OVER[over].field)]
    tips += [alt.Tooltip("value:Q", title=OVER[over].words, format=",.4~g")]
    tips += [alt.Tooltip(f"{name}:Q", format="+.4f") for name in ("gap", "low", "high")]
    seed_tips = [*tips[:2], alt.Tooltip("seed:O"), alt.Tooltip("gap:Q", format="+.4f")]
    layers = [
        alt.Chart(alt.Data(values=[{"gap": 0.0}])).mark_rule(color="#7f7f7f").encode(y=y),
        data["beyond"].mark_area(opacity=0.08, clip=True).encode(x=x, y=low, y2=high, color=color),
        data["lines"].mark_area(opacity=0.18, clip=True).encode(x=x, y=low, y2=high, color=color),
        data["beyond"].mark_line(strokeDash=[5, 4], strokeWidth=1.5, clip=True).encode(x=x, y=y, color=color),
        data["lines"].mark_line(strokeWidth=2, clip=True).encode(x=x, y=y, color=color),
        data["seeds"]
        .mark_circle(size=20, opacity=0.5, clip=True)
        .encode(x=x, y=y, color=color, tooltip=seed_tips),
        data["points"].mark_rule(strokeWidth=2, clip=True).encode(x=x, y=low, y2=high, color=color),
        data["points"]
        .mark_point(filled=True, size=90, opacity=1)
        .encode(x=x, y=y, color=color, tooltip=tips),
    ]
    short = _apart(trends)
    axes = {key: (short[name], OVER[over].axis) for name, key in keys.items()}
    chart = switched(layers, axes, alt.param(name=AXIS, value="1"), rows, height=320)
    if len(axes) == 1:
        chart.usermeta = {}
    return chart


def _reach(reach: Reach) -> Row:
    return {"x": reach.value, "gap": reach.gap, "low": reach.low, "high": reach.high}


def _ends(trends: list[Trend]) -> list[list[float]]:
    """Return the limits of both axes: all seeds, the line, and intervals as far as seeds stay distinguishable."""
    values = [point.value for trend in trends for point in trend.points]
    values += [reach.value for trend in trends if trend.line for reach in trend.line.beyond]
    seeds = [gap for trend in trends for point in trend.points for gap in point.gaps]
    seeds += [reach.gap for trend in trends if trend.line for reach in trend.line.beyond] + [0.0]
    room = _ROOM * max(max(seeds) - min(seeds), 1e-4)
    intervals = [
        end
        for trend in trends
        for one in [*trend.points, *(trend.line.beyond if trend.line else ())]
        for end in ((one.ci_low, one.ci_high) if hasattr(one, "ci_low") else (one.low, one.high))
        if end is not None
    ]
    low = max(min([*intervals, *seeds]), min(seeds) - room)
    high = min(max([*intervals, *seeds]), max(seeds) + room)
    return [[min(values) / 1.15, max(values) * 1.15], [low, high]]


def _domain(ends: dict[str, list[list[float]]], axis: int) -> list[alt.ExprRef]:
    """Return the limits of an axis for the selected group."""
    tables = [json.dumps({key: pair[axis][side] for key, pair in ends.items()}) for side in (0, 1)]
    return [alt.ExprRef(f"({table})[{AXIS}]") for table in tables]
