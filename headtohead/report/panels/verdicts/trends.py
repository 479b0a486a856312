"""The gap to the baseline against size, tokens per parameter or context, with its trend."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from headtohead.report.charts import Chart, Choice, Row, layered, legend, line_layers, named, tips
from headtohead.report.panels.base import Figure, Table, View, interval, number
from headtohead.study.judge.trends import OVER, Reach, Trend
from headtohead.study.store.manifest import Contest

_ROOM = 1.5
"""How far an interval may extend the y axis beyond the range of the seeds, in units of that range."""
_APART = 0.008
"""Share of the x axis between two arms at the same value, so that they do not overlap."""
_DECISIONS = {"undecided": "undecided", "turns": "the gap changes sign"}


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
    chart = gap_chart(trends, over, views[0])
    known = any(trend.line for trend in trends) or len({tuple(trend.notes) for trend in trends}) > 1
    return Figure(
        f"Gap to the baseline against {what}.", words, chart, table=_table(trends) if known else None
    )


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
        words, numbers, ahead = "points only", ["–", "–"], "–"
        if trend.line:
            slope, end = trend.line.slope, trend.line.beyond[-1]
            words = _DECISIONS.get(trend.decision, f"the gap {trend.decision}")
            numbers = [f"{slope.difference:+.4f}", interval(slope.ci_low, slope.ci_high, "+.4f")]
            ahead = interval(end.low, end.high, "+.4f")
        text = "; ".join([words, *trend.notes])
        place = [names[trend.where]] if several else []
        rows.append([trend.label, *place, text, *numbers, number(trend.p_holm, ".3g"), str(trend.n), ahead])
    head = ["arm", *(["contests"] if several else []), "trend"]
    numbers = ["slope per doubling", "95 % interval", "p (Holm)", "seeds", "prediction at 4 x"]
    return Table([*head, *numbers], rows, left=len(head))


def gap_chart(trends: list[Trend], over: str, view: View) -> Chart:
    """Return the gaps of every arm with their lines; buttons select a group of contests."""
    short = _apart(trends)
    keys = {name: str(number) for number, name in enumerate(short, 1)}
    choice = Choice({key: (short[name], "") for name, key in keys.items()}, group="group")
    rows: dict[str, list[Row]] = {"points": [], "seeds": [], "lines": [], "beyond": []}
    ends: dict[str, list[list[float]]] = {}
    ticks: dict[str, list[float]] = {}
    for name, key in keys.items():
        here = [trend for trend in trends if trend.where == name]
        ends[key] = _ends(here)
        ticks[key] = sorted({point.value for trend in here for point in trend.points})
        left, right = ends[key][0]
        for trend in here:
            apart = (view.labels.index(trend.label) - len(view.labels) / 2) * _APART
            base = {"group": key, "arm": trend.label}
            for point in trend.points:
                there = base | {"x": point.value * (right / left) ** apart, "at": point.name}
                facts = {"gap": point.mean, "low": point.ci_low, "high": point.ci_high}
                rows["points"].append(there | facts | {"value": point.value})
                rows["seeds"] += [
                    there | {"gap": gap, "seed": seed}
                    for seed, gap in zip(point.seeds, point.gaps, strict=True)
                ]
            if trend.line:
                rows["lines"] += [base | _reach(reach) for reach in trend.line.within]
                rows["beyond"] += [base | _reach(reach) for reach in trend.line.beyond]
        ticks[key] += [row["x"] for row in rows["beyond"] if row["group"] == key][-1:]
    form = {"size": ".3~s", "context": "d"}.get(over, ",.3~r")
    axis = alt.Axis(values=choice.by_name(ticks), format=form, grid=False, labelOverlap=True)
    scale = alt.Scale(type="log", domain=_domain(choice, ends, 0), nice=False)
    x = alt.X("x:Q", title=OVER[over].axis, scale=scale, axis=axis)
    y_scale = alt.Scale(domain=_domain(choice, ends, 1), nice=True, zero=False)
    y = alt.Y("gap:Q", title="gap to the baseline, bits per byte", scale=y_scale)
    color = view.color(legend(lines=True))
    data = {name: named(name, choice) for name in rows}
    seeds = data["seeds"].mark_circle(size=20, opacity=0.5, clip=True)
    about = [*tips("arm"), alt.Tooltip("at:N", title=OVER[over].field)]
    value = alt.Tooltip("value:Q", title=OVER[over].words, format=",.4~g")
    hover = [*about, value, *tips(gap="+.4f", low="+.4f", high="+.4f")]
    layers = [
        alt.Chart(alt.Data(values=[{"gap": 0.0}])).mark_rule(color="#7f7f7f").encode(y=y),
        *line_layers(data["beyond"], x, y, color, band=0.08, dash=[5, 4], width=1.5),
        *line_layers(data["lines"], x, y, color, band=0.18),
        seeds.encode(x=x, y=y, color=color, tooltip=[*about, *tips("seed", gap="+.4f")]),
        *line_layers(data["points"], x, y, color, hover, bars=True, points=90, width=0),
    ]
    return layered(layers, rows, 320, choice)


def _reach(reach: Reach) -> Row:
    return {"x": reach.value, "gap": reach.gap, "low": reach.low, "high": reach.high}


def _ends(trends: list[Trend]) -> list[list[float]]:
    """Return the limits of both axes: all seeds, the line, and intervals as far as seeds stay distinguishable."""
    beyond = [reach for trend in trends if trend.line for reach in trend.line.beyond]
    values = [point.value for trend in trends for point in trend.points] + [reach.value for reach in beyond]
    seeds = [gap for trend in trends for point in trend.points for gap in point.gaps]
    seeds += [reach.gap for reach in beyond] + [0.0]
    room = _ROOM * max(max(seeds) - min(seeds), 1e-4)
    intervals = [end for trend in trends for one in trend.points for end in (one.ci_low, one.ci_high)]
    intervals += [end for reach in beyond for end in (reach.low, reach.high)]
    known = [*seeds, *(end for end in intervals if end is not None)]
    low, high = max(min(known), min(seeds) - room), min(max(known), max(seeds) + room)
    return [[min(values) / 1.15, max(values) * 1.15], [low, high]]


def _domain(choice: Choice, ends: dict[str, list[list[float]]], axis: int) -> list[alt.ExprRef]:
    """Return the limits of an axis for the selected group."""
    return [choice.by_name({key: pair[axis][side] for key, pair in ends.items()}) for side in (0, 1)]
