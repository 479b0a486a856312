"""Charts of the toy, as files and on one page without scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from headtohead.common.errors import UserError
from headtohead.common.files import write_atomic
from headtohead.common.version import VERSION
from headtohead.papers.faster_qk.measure import EDGES
from headtohead.papers.faster_qk.theory import Reduced
from headtohead.papers.faster_qk.train import ToyResult
from headtohead.papers.faster_qk.work import Toy
from headtohead.report.charts import PALETTE, Row
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
_SHADES = ("#440154", "#31688e", "#35b779", "#E69F00", "#D55E00")
_PNG_SCALE = 3
_ADAM = "Adam "


def draw_toy(toy: Toy) -> dict[str, Row]:
    """Return the definitions of the toy's charts by name; charts without data are left out."""
    found: dict[str, Any] = {}
    marked = [result for result in toy.results if result.run.share is None and result.marks]
    shown = [result for result in marked if result.run.adam is None]
    with debug_mode(False):
        if shown:
            found["heat"] = heat_maps(shown)
            found["alpha-at-loss"] = alpha_at_loss(shown)
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
        svg = as_svg(definition, PAPER, width=definition.pop("width", 560))
        write_atomic(folder / f"toy-{name}.svg", svg)
        write_atomic(folder / f"toy-{name}.png", vl_convert.svg_to_png(svg, scale=_PNG_SCALE))
        pictures.append((CAPTIONS[name], svg))
    template = templates().get_template("toy.html.jinja")
    failed = [finding for finding in toy.findings if not finding.holds]
    page = template.render(
        toy=toy, pictures=pictures, failed=failed, style=asset("page.css"), version=VERSION
    )
    target = path / "toy.html"
    write_atomic(target, page)
    return target


def _names(results: list[ToyResult]) -> list[str]:
    return list(dict.fromkeys(result.run.name for result in results))


def _scale(names: list[str]) -> alt.Scale:
    return alt.Scale(domain=names, range=[PALETTE[index % len(PALETTE)] for index in range(len(names))])


def heat_maps(results: list[ToyResult]) -> Any:
    """Return a grid per run: mass on distinct tokens (x) and probability of the label (y)."""
    rows: dict[tuple[str, int, int], list[float]] = {}
    titles: dict[str, str] = {}
    for result in results:
        event, mark = list(result.marks.items())[-1]
        name = result.run.name
        titles.setdefault(name, f"{name}, {event}")
        for across, column in enumerate(mark.heat):
            for up, value in enumerate(column):
                rows.setdefault((titles[name], across, up), []).append(value)
    values = [
        {"run": name, "mass": _bin(across), "label": _bin(up), "percent": sum(found) / len(found)}
        for (name, across, up), found in rows.items()
    ]
    bins = [_bin(index) for index in range(len(EDGES) - 1)]
    x = alt.X("mass:O", sort=bins, title="mass on distinct tokens", axis=alt.Axis(labelAngle=0))
    y = alt.Y("label:O", sort=bins[::-1], title="probability of the label")
    base = alt.Chart().encode(x=x, y=y)
    shade = alt.Color(
        "percent:Q",
        scale=alt.Scale(range=["#ffffff", "#08519c"], domain=[0, 100], interpolate="rgb"),
        legend=None,
    )
    text = base.mark_text(fontSize=11).encode(
        text=alt.condition("datum.percent >= 0.05", alt.Text("percent:Q", format=".1f"), alt.value("")),
        color=alt.condition("datum.percent > 55", alt.value("white"), alt.value("#24292f")),
    )
    layered = alt.layer(base.mark_rect(stroke="#d7dae0").encode(color=shade), text)
    names = list(dict.fromkeys(titles.values()))
    return layered.properties(width=200, height=160, data=alt.Data(values=values)).facet(
        facet=alt.Facet("run:N", sort=names, title=None, header=alt.Header(labelFontSize=12)),
        columns=3,
    )


def _bin(index: int) -> str:
    ends = (f"{edge:g}".removeprefix("0") or "0" for edge in EDGES[index : index + 2])
    return "–".join(ends)


def alpha_at_loss(results: list[ToyResult]) -> Any:
    """Return attention against loss, a line per run."""
    results = [result for result in results if "sweep" not in result.run.name]
    rows, names = _paths(results), _names(results)
    y = alt.Y("alpha:Q", title="mass on distinct tokens", scale=alt.Scale(domain=[0.3, 1.0], nice=False))
    color = alt.Color("run:N", scale=_scale(names), legend=alt.Legend(title=None))
    # Beyond the palette, runs are distinguished by dashes.
    dashes = [[1, 0] if index < len(PALETTE) else [4, 3] for index in range(len(names))]
    dash = alt.StrokeDash("run:N", scale=alt.Scale(domain=names, range=dashes), legend=None)
    lines = alt.Chart(alt.Data(values=rows)).mark_line(strokeWidth=1.8, clip=True)
    return lines.encode(
        x=_loss_axis(), y=y, color=color, strokeDash=dash, order="step:Q", detail="seed:N"
    ).properties(height=320)


def adam_and_sgd(results: list[ToyResult]) -> Any:
    """Return attention against loss for the runs with Adam, and for the same runs with SGD."""
    names = [name.removeprefix(_ADAM) for name in _names(results) if name.startswith(_ADAM)]
    results = [result for result in results if result.run.name.removeprefix(_ADAM) in names]
    rows = _paths(results)
    for row in rows:
        row["run"] = row["run"].removeprefix(_ADAM)
    y = alt.Y("alpha:Q", title="mass on distinct tokens", scale=alt.Scale(domain=[0.0, 1.02], nice=False))
    color = alt.Color("run:N", scale=_scale(names), legend=alt.Legend(title=None))
    dash = alt.StrokeDash(
        "optimiser:N",
        scale=alt.Scale(domain=["sgd", "adam"], range=[[1, 0], [5, 3]]),
        legend=alt.Legend(title=None, labelExpr="datum.label == 'sgd' ? 'SGD' : 'Adam'"),
    )
    lines = alt.Chart(alt.Data(values=rows)).mark_line(strokeWidth=1.8, clip=True)
    return lines.encode(
        x=_loss_axis(), y=y, color=color, strokeDash=dash, order="step:Q", detail="seed:N"
    ).properties(height=320)


def _paths(results: list[ToyResult]) -> list[dict[str, Any]]:
    """Return one row per point of the runs' paths."""
    return [
        {"run": result.run.name, "optimiser": result.run.optimizer, "seed": result.run.seed, "step": index}
        | {"loss": point["loss"], "alpha": point["alpha"]}
        for result in results
        for index, point in enumerate(result.path)
        if point["loss"] > 1e-4
    ]


def _loss_axis() -> alt.X:
    return alt.X(
        "loss:Q",
        scale=alt.Scale(type="log", reverse=True, nice=False),
        title="mean loss of the epoch (training proceeds to the right)",
        axis=alt.Axis(format="~g", values=[3, 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0001], grid=False),
    )


def _ratios(toy: Toy) -> tuple[list[str], alt.Scale]:
    names = [f"r = {r:g}" for r in toy.paths]
    return names, alt.Scale(domain=names, range=list(_SHADES[: len(names)]))


def alpha_over_time(toy: Toy) -> Any:
    """Return attention over time in the reduced equations, a line per ratio."""
    _, scale = _ratios(toy)
    rows = [
        {"ratio": f"r = {r:g}", "tau": point.tau, "alpha": point.alpha}
        for r, path in toy.paths.items()
        for point in path
        if point.tau is not None and point.tau >= 100
    ]
    axis = alt.Axis(format="~s", grid=False, values=[10**power for power in range(2, 8)])
    x = alt.X("tau:Q", scale=alt.Scale(type="log", nice=False), axis=axis, title="time, t min(lr_OV, lr_QK)")
    y = alt.Y("alpha:Q", title="mass on informative tokens", scale=alt.Scale(domain=[0, 1]))
    color = alt.Color("ratio:N", scale=scale, legend=alt.Legend(title="lr_QK / lr_OV"))
    lines = alt.Chart(alt.Data(values=rows)).mark_line(strokeWidth=2.2)
    return lines.encode(x=x, y=y, color=color, order="tau:Q").properties(height=300)


def phases(toy: Toy) -> Any:
    """Return the paths of both circuits in the reduced equations, and their states at equal losses."""
    _, scale = _ratios(toy)
    paths = [
        {"ratio": f"r = {r:g}", "ov": point.mu_ov, "qk": point.mu_qk}
        for r, path in toy.paths.items()
        for point in path
    ]
    points = [
        {"ratio": f"r = {point.r:g}", "ov": point.mu_ov, "qk": point.mu_qk, "loss": f"loss {point.loss:g}"}
        for point in toy.solved
    ]
    model = Reduced()
    losses = dict.fromkeys(point.loss for point in toy.solved)
    between = [model.solve(10 ** (tenth / 10), loss) for loss in losses for tenth in range(-20, 21)]
    equal = [{"ov": point.mu_ov, "qk": point.mu_qk, "loss": f"{point.loss:g}"} for point in between]
    x = alt.X("ov:Q", title="mu_OV, progress of the output circuit", axis=alt.Axis(grid=False))
    y = alt.Y("qk:Q", title="mu_QK, progress of attention", scale=alt.Scale(domain=[-0.4, 8]))
    color = alt.Color("ratio:N", scale=scale, legend=alt.Legend(title="lr_QK / lr_OV"))
    last = [row for row in points if row["ratio"] == "r = 0.01"]
    names = alt.Chart(alt.Data(values=last)).mark_text(dy=14, fontSize=11, color="#57606a")
    return alt.layer(
        alt.Chart(alt.Data(values=equal))
        .mark_line(strokeDash=[3, 3], strokeWidth=1, color="#8c959f")
        .encode(x=x, y=y, detail="loss:N", order="qk:Q"),
        alt.Chart(alt.Data(values=paths))
        .mark_line(strokeWidth=2.2)
        .encode(x=x, y=y, color=color, order="ov:Q"),
        alt.Chart(alt.Data(values=points))
        .mark_point(filled=True, size=42, opacity=1)
        .encode(x=x, y=y, color=color),
        names.encode(x=x, y=y, text="loss:N"),
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
    x = alt.X("alpha:Q", title="fixed mass on distinct tokens", axis=alt.Axis(grid=False))
    y = alt.Y("value:Q", scale=alt.Scale(type="log"), title=None, axis=alt.Axis(format="~g"))
    color = alt.Color(
        "output:N", scale=_scale(names), legend=alt.Legend(title=None, orient="bottom", columns=2)
    )
    lines = alt.Chart().mark_line(point=True, strokeWidth=2).encode(x=x, y=y, color=color)
    return lines.properties(width=260, height=240, data=alt.Data(values=rows)).facet(
        column=alt.Column("what:N", title=None, sort=["loss", "gain"])
    )
