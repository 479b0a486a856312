"""Charts of the toy, as files and on one page without scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from headtohead.common import VERSION
from headtohead.common.errors import UserError
from headtohead.common.files import write_atomic
from headtohead.papers.faster_qk.measure import EDGES
from headtohead.papers.faster_qk.theory import Point, Reduced
from headtohead.papers.faster_qk.train import ToyResult
from headtohead.papers.faster_qk.work import Toy
from headtohead.report.charts import PAGE, PALETTE, Row
from headtohead.report.figures import PAPER, as_svg
from headtohead.report.templates import asset, templates

CAPTIONS = {
    "heat": "Attention on distinct tokens and probability of the label at the last mark. Percent of test sequences, mean over seeds.",
    "alpha-at-loss": "Attention at equal loss. Mean mass on distinct tokens against the mean loss of the epoch, every seed.",
    "adam": "Adam (dashed) and SGD (solid), every seed. Theory, tables and claims are for SGD only.",
    "alpha-over-time": "Reduced equations: attention over time for several ratios lr_QK / lr_OV.",
    "phases": "Reduced equations: paths of both circuits. Dots mark equal losses, reached at a different point for each ratio.",
    "fixed": "Fixed attention: loss of the output circuit, and the loss reduction per unit of added attention.",
}
_SHADES = ("#8C6BB1", "#3a7cab", "#35b779", "#E69F00", "#D55E00")
"""Visible on white and on black."""
_PNG_SCALE = 3
_ADAM = "Adam "


def draw_toy(toy: Toy) -> dict[str, Row]:
    """Return the definitions of the toy's charts by name; charts without data are left out."""
    found: dict[str, Any] = {}
    marked = [result for result in toy.results if result.run.share is None and result.marks]
    shown = [result for result in marked if result.run.adam is None]
    compared = [result for result in shown if "sweep" not in result.run.name]
    with debug_mode(False):
        if shown:
            found["heat"] = heat_maps(shown)
        if compared:
            found["alpha-at-loss"] = alpha_at_loss(compared)
        if len(marked) > len(shown):
            found["adam"] = adam_and_sgd(marked)
        found["alpha-over-time"] = alpha_over_time(toy)
        found["phases"] = phases(toy)
        if any(result.gain for result in toy.results):
            found["fixed"] = fixed(toy.results)
        return {name: chart.to_dict(validate=False) for name, chart in found.items()}


def write_toy(path: Path, toy: Toy, progress: Callable[[str, float], None]) -> Path:
    """Write the charts as SVG and PNG into the folder `charts`, and the page toy.html; return the page."""
    import vl_convert

    folder = path / "charts"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    pictures = []
    definitions = draw_toy(toy)
    for count, (name, definition) in enumerate(definitions.items()):
        progress("drawing", count / len(definitions))
        width = definition.pop("width", 560)
        svg = as_svg(definition, PAPER, width)
        write_atomic(folder / f"toy-{name}.svg", svg)
        write_atomic(folder / f"toy-{name}.png", vl_convert.svg_to_png(svg, scale=_PNG_SCALE))
        pictures.append((CAPTIONS[name], as_svg(definition, PAGE, width)))
    template = templates().get_template("toy.html.jinja")
    failed = [finding for finding in toy.findings if not finding.holds]
    shown = {"toy": toy, "pictures": pictures, "failed": failed}
    target = path / "toy.html"
    write_atomic(target, template.render(shown, style=asset("page.css"), version=VERSION))
    return target


def _names(results: Iterable[ToyResult]) -> list[str]:
    return list(dict.fromkeys(result.run.name for result in results))


def _color(field: str, names: list[str], shades: Sequence[str] = PALETTE, **legend: Any) -> alt.Color:
    """Return the color of each name; the shades repeat if there are more names."""
    scale = alt.Scale(domain=names, range=[shades[index % len(shades)] for index in range(len(names))])
    return alt.Color(f"{field}:N", scale=scale, legend=alt.Legend(**{"title": None, **legend}))


def _bin(index: int) -> str:
    return "–".join(f"{edge:g}".removeprefix("0") or "0" for edge in EDGES[index : index + 2])


def heat_maps(results: list[ToyResult]) -> Any:
    """Return a grid per run: mass on distinct tokens (x) and probability of the label (y)."""
    cells: dict[tuple[str, int, int], list[float]] = {}
    titles: dict[str, str] = {}
    for result in results:
        event, mark = list(result.marks.items())[-1]
        title = titles.setdefault(result.run.name, f"{result.run.name}, {event}")
        for across, column in enumerate(mark.heat):
            for up, value in enumerate(column):
                cells.setdefault((title, across, up), []).append(value)
    values = [
        {"run": name, "mass": _bin(across), "label": _bin(up), "percent": sum(found) / len(found)}
        for (name, across, up), found in cells.items()
    ]
    bins = [_bin(index) for index in range(len(EDGES) - 1)]
    base = alt.Chart().encode(
        x=alt.X("mass:O", sort=bins, title="mass on distinct tokens", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("label:O", sort=bins[::-1], title="probability of the label"),
    )
    blues = alt.Scale(range=["#ffffff", "#08519c"], domain=[0, 100], interpolate="rgb")
    squares = base.mark_rect(stroke="#d7dae0").encode(color=alt.Color("percent:Q", scale=blues, legend=None))
    text = base.mark_text(fontSize=11).encode(
        text=alt.condition("datum.percent >= 0.05", alt.Text("percent:Q", format=".1f"), alt.value("")),
        color=alt.condition("datum.percent > 55", alt.value("white"), alt.value("#24292f")),
    )
    header = alt.Header(labelFontSize=12)
    facet = alt.Facet("run:N", sort=list(titles.values()), title=None, header=header)
    grid = alt.layer(squares, text).properties(width=200, height=160, data=alt.Data(values=values))
    return grid.facet(facet=facet, columns=3)


def alpha_at_loss(results: list[ToyResult]) -> Any:
    """Return attention against loss, a line per run."""
    names = _names(results)
    # Beyond the palette, runs are distinguished by dashes.
    dashes = [[1, 0] if index < len(PALETTE) else [4, 3] for index in range(len(names))]
    dash = alt.StrokeDash("run:N", scale=alt.Scale(domain=names, range=dashes), legend=None)
    return _against_loss(results, names, dash, [0.3, 1.0])


def adam_and_sgd(results: list[ToyResult]) -> Any:
    """Return attention against loss for the runs with Adam, and for the same runs with SGD."""
    names = [name.removeprefix(_ADAM) for name in _names(results) if name.startswith(_ADAM)]
    results = [result for result in results if result.run.name.removeprefix(_ADAM) in names]
    scale = alt.Scale(domain=["sgd", "adam"], range=[[1, 0], [5, 3]])
    legend = alt.Legend(title=None, labelExpr="datum.label == 'sgd' ? 'SGD' : 'Adam'")
    dash = alt.StrokeDash("optimiser:N", scale=scale, legend=legend)
    return _against_loss(results, names, dash, [0.0, 1.02])


def _against_loss(results: list[ToyResult], names: list[str], dash: Any, domain: list[float]) -> Any:
    rows = [
        {"run": run.name.removeprefix(_ADAM), "optimiser": run.optimizer, "seed": run.seed, "step": index}
        | {"loss": point["loss"], "alpha": point["alpha"]}
        for run, path in ((result.run, result.path) for result in results)
        for index, point in enumerate(path)
        if point["loss"] > 1e-4
    ]
    x = alt.X(
        "loss:Q",
        scale=alt.Scale(type="log", reverse=True, nice=False),
        title="mean loss of the epoch (training proceeds to the right)",
        axis=alt.Axis(format="~g", values=[3, 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0001], grid=False),
    )
    y = alt.Y("alpha:Q", title="mass on distinct tokens", scale=alt.Scale(domain=domain, nice=False))
    lines = alt.Chart(alt.Data(values=rows)).mark_line(strokeWidth=1.8, clip=True)
    lines = lines.encode(
        x=x, y=y, color=_color("run", names), strokeDash=dash, order="step:Q", detail="seed:N"
    )
    return lines.properties(height=320)


def _ratio_color(toy: Toy) -> alt.Color:
    return _color("ratio", [f"r = {r:g}" for r in toy.paths], _SHADES, title="lr_QK / lr_OV")


def alpha_over_time(toy: Toy) -> Any:
    """Return attention over time in the reduced equations, a line per ratio."""
    rows = [
        {"ratio": f"r = {r:g}", "tau": point.tau, "alpha": point.alpha}
        for r, path in toy.paths.items()
        for point in path
        if point.tau is not None and point.tau >= 100
    ]
    axis = alt.Axis(format="~s", grid=False, values=[10**power for power in range(2, 8)])
    x = alt.X("tau:Q", scale=alt.Scale(type="log", nice=False), axis=axis, title="time, t min(lr_OV, lr_QK)")
    y = alt.Y("alpha:Q", title="mass on informative tokens", scale=alt.Scale(domain=[0, 1]))
    lines = alt.Chart(alt.Data(values=rows)).mark_line(strokeWidth=2.2)
    return lines.encode(x=x, y=y, color=_ratio_color(toy), order="tau:Q").properties(height=300)


def phases(toy: Toy) -> Any:
    """Return the paths of both circuits in the reduced equations, and their states at equal losses."""

    def row(point: Point, **more: str) -> Row:
        return {"ov": point.mu_ov, "qk": point.mu_qk} | more

    def chart(rows: list[Row]) -> Any:
        x = alt.X("ov:Q", title="mu_OV, progress of the output circuit", axis=alt.Axis(grid=False))
        y = alt.Y("qk:Q", title="mu_QK, progress of attention", scale=alt.Scale(domain=[-0.4, 8]))
        return alt.Chart(alt.Data(values=rows)).encode(x=x, y=y)

    model, color = Reduced(), _ratio_color(toy)
    paths = [row(point, ratio=f"r = {r:g}") for r, path in toy.paths.items() for point in path]
    points = [row(point, ratio=f"r = {point.r:g}", loss=f"loss {point.loss:g}") for point in toy.solved]
    equal = [
        row(model.solve(10 ** (tenth / 10), loss), loss=f"{loss:g}")
        for loss in dict.fromkeys(point.loss for point in toy.solved)
        for tenth in range(-20, 21)
    ]
    labeled = [point for point in points if point["ratio"] == "r = 0.01"]
    contours = chart(equal).mark_line(strokeDash=[3, 3], strokeWidth=1, color="#8c959f")
    return alt.layer(
        contours.encode(detail="loss:N", order="qk:Q"),
        chart(paths).mark_line(strokeWidth=2.2).encode(color=color, order="ov:Q"),
        chart(points).mark_point(filled=True, size=42, opacity=1).encode(color=color),
        chart(labeled).mark_text(dy=14, fontSize=11, color="#8c959f").encode(text="loss:N"),
    ).properties(height=340)


def fixed(results: list[ToyResult]) -> Any:
    """Return loss and gain of the output circuit against fixed attention."""
    found: dict[tuple[str, float, str], list[float]] = {}
    for result in results:
        if result.gain and result.run.share is not None:
            name = result.run.name.split(" alpha=")[0].removeprefix("fixed ")
            for key, value in result.gain.items():
                found.setdefault((name, result.run.share, key), []).append(value)
    rows = [
        {"output": name, "alpha": share, "what": key, "value": sum(values) / len(values)}
        for (name, share, key), values in found.items()
        if sum(values) > 0
    ]
    names = list(dict.fromkeys(str(row["output"]) for row in rows))
    lines = alt.Chart().mark_line(point=True, strokeWidth=2)
    lines = lines.encode(
        x=alt.X("alpha:Q", title="fixed mass on distinct tokens", axis=alt.Axis(grid=False)),
        y=alt.Y("value:Q", scale=alt.Scale(type="log"), title=None, axis=alt.Axis(format="~g")),
        color=_color("output", names, orient="bottom", columns=2),
    )
    column = alt.Column("what:N", title=None, sort=["loss", "gain"])
    return lines.properties(width=260, height=240, data=alt.Data(values=rows)).facet(column=column)
