"""The figures of docs/speed.md, each drawn from its rows, or None where rows are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt
from speed_rows import Measured, Row

from headtohead.common.numbers import short_bytes, short_count
from headtohead.report.charts import BASELINE, PALETTE

BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = PALETTE[:6]
WIDTH = 620
_INK = "#24292f"
_BIG = {"labelFontSize": 14, "titleFontSize": 14}
_REFERENCE = "plain reference, compiled"


def kernels(measured: Measured) -> Any:
    """The share of its roofline bound that each fused kernel reaches, next to its compiled plain reference."""
    rows: list[Row] = []
    for row in measured.timed_kernels():
        roof = row.get("roof_seconds", row["floor_seconds"])
        name = _kernel_name(row, measured)
        for who, seconds in (("ours", row["seconds"]), (_REFERENCE, row.get("peer_seconds"))):
            if seconds:
                text = f"{roof / seconds:.0%}, {1e3 * seconds:.3g} ms"
                rows.append({"kernel": name, "who": who, "share": roof / seconds, "text": text})
    if not rows:
        return None
    return _bars(
        rows,
        group="kernel",
        value="share",
        title="share of the roofline: bytes at copy speed, or products at a large product's speed",
        colors={"ours": BLUE, _REFERENCE: BASELINE},
        form="%",
        whole=1.0,
    )


def _kernel_name(row: Row, measured: Measured) -> str:
    """Return a kernel's name, with its shape where another row has the same name."""
    same = [other for other in measured.timed_kernels() if other["case"] == row["case"]]
    return row["case"] if len(same) == 1 else f"{row['case']}, {' x '.join(map(str, row['shape']))}"


def roofline(measured: Measured) -> Any:
    """The achieved rate of each fused kernel against its arithmetic intensity, under the measured roofline."""
    rows = [
        {
            "kernel": _kernel_name(row, measured),
            "intensity": row["flops"] / row["bytes"],
            "rate": row["flops"] / row["seconds"] / 1e12,
        }
        for row in measured.timed_kernels()
        if "flops" in row
    ]
    if not rows:
        return None
    for index, row in enumerate(sorted(rows, key=lambda row: row["intensity"])):
        row["number"] = index + 1
    document = measured.documents["kernels"]
    copy, product = document["copy_bytes_per_second"] / 1e12, document["product_flops_per_second"] / 1e12
    ordered = sorted(rows, key=lambda row: row["intensity"])
    reach = [0.5 * ordered[0]["intensity"], 3 * max(ordered[-1]["intensity"], product / copy)]
    roof = [
        {"intensity": intensity, "rate": min(copy * intensity, product)}
        for intensity in (reach[0], product / copy, reach[1])
    ]
    x = alt.X(
        "intensity:Q",
        title="operations per byte moved",
        scale=alt.Scale(type="log", domain=reach, nice=False),
        axis=alt.Axis(tickCount=4, grid=False, **_BIG),
    )
    y = alt.Y(
        "rate:Q",
        title="TFLOP/s",
        scale=alt.Scale(type="log", domain=[0.2 * min(row["rate"] for row in rows), 3 * product], nice=False),
        axis=alt.Axis(tickCount=4, grid=False, **_BIG),
    )
    names = [f"{number}  {row['kernel']}" for number, row in enumerate(ordered, start=1)]
    dots = [
        {**row, "kernel": name, "number": number}
        for number, (row, name) in enumerate(zip(ordered, names, strict=True), start=1)
    ]
    color = alt.Color(
        "kernel:N",
        sort=names,
        scale=alt.Scale(domain=names, range=[PALETTE[index % len(PALETTE)] for index in range(len(names))]),
        legend=alt.Legend(title=None, labelFontSize=14, labelLimit=420, orient="right", symbolSize=120),
    )
    labels = [
        {"intensity": 12, "rate": 12 * copy, "text": f"copy {copy:.2f} TB/s"},
        {"intensity": reach[1], "rate": 1.4 * product, "text": f"bf16 products {product:.0f} TFLOP/s"},
    ]
    roof_labels = alt.Chart(alt.Data(values=labels)).mark_text(fontSize=14, align="right", dx=-12)
    layers = [
        alt.Chart(alt.Data(values=roof)).mark_line(color=_INK).encode(x=x, y=y),
        roof_labels.encode(x=x, y=y, text="text:N"),
        alt.Chart(alt.Data(values=dots)).mark_circle(size=90, opacity=0.8).encode(x=x, y=y, color=color),
    ]
    # Numbers alternate between three sides: neighbors in intensity are often neighbors in speed.
    for side, offset in enumerate(({"dx": 13}, {"dy": 17}, {"dx": -13})):
        part = [dot for dot in dots if dot["number"] % 3 == side]
        base = alt.Chart(alt.Data(values=part)).mark_text(fontSize=14, **offset)
        layers.append(base.encode(x=x, y=y, text="number:Q"))
    return alt.layer(*layers).properties(width=480, height=400)


def train(measured: Measured) -> Any:
    """Training tokens/s of standard, litgpt and transformers at three sizes."""
    rows: list[Row] = []
    for size in ("51m", "124m", "360m"):
        found = measured.training(size, 32_768)
        if found is None or found["better_peer"] is None:
            continue
        better = found["results"][found["better_peer"]]["tokens_per_second"]
        for name, result in found["results"].items():
            if rate := result.get("tokens_per_second"):
                who = "headtohead" if name == "standard" else name
                rows.append({"size": size, "who": who, "rate": rate / better, "text": short_count(rate)})
    if not rows:
        return None
    return _bars(
        rows,
        group="size",
        value="rate",
        title="tokens per second, the better peer at each size = 1",
        colors={"headtohead": BLUE, "litgpt": ORANGE, "transformers": BASELINE},
        whole=1.3,
    )


def mechanisms(measured: Measured) -> Any:
    """The training step time of each mechanism relative to standard."""
    rows = [
        {
            "arm": row["arm"],
            "over": row["over"],
            "size": row["size"],
            "context": row["context"],
            "at": f"{row['size']}, context {row['context']}{', equal parameters' if row['matched'] else ''}",
        }
        for row in measured.steps()
        if row["arm"] != "standard" and "over" in row
    ]
    if not rows:
        return None
    settings = [row["at"] for row in sorted(rows, key=lambda row: (row["size"], row["context"]))]
    settings = list(dict.fromkeys(settings))
    best = {
        arm: min(row["over"] for row in rows if row["arm"] == arm) for arm in {row["arm"] for row in rows}
    }
    reach = [min(1.0, *best.values()) - 0.03, 1.06 * max(row["over"] for row in rows)]
    x = alt.X(
        "over:Q",
        title="time of a training step, standard = 1",
        scale=alt.Scale(domain=reach, nice=False),
        axis=alt.Axis(tickCount=7, format=".2~f", **_BIG),
    )
    y = alt.Y(
        "arm:N",
        title=None,
        sort=sorted(best, key=lambda arm: best[arm]),
        axis=alt.Axis(labelLimit=320, grid=True, **_BIG),
    )
    color = alt.Color(
        "at:N",
        scale=alt.Scale(domain=settings, range=list(PALETTE[: len(settings)])),
        legend=alt.Legend(
            title=None, orient="top", labelFontSize=14, labelLimit=400, columns=2, symbolSize=120
        ),
    )
    dots = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y)
    standard = alt.Chart(alt.Data(values=[{"over": 1.0}])).mark_rule(strokeDash=[5, 4]).encode(x=x)
    return alt.layer(
        standard,
        dots.mark_circle(size=110, opacity=1).encode(color=color),
        dots.mark_text(dx=9, align="left", fontSize=13).encode(text=alt.Text("over:Q", format=".2f")),
    ).properties(width=WIDTH - 100, height=32 * len(best))


def decode(measured: Measured) -> Any:
    """Decoding time against context, with the time needed to read its bytes."""
    found = measured.decoding(lambda row: (row["batch"], row["heads"], row["dim"]) == (64, 8, 64))
    if len({row["keys"] for row in found}) < 3:
        return None
    rows: list[Row] = []
    for row in found:
        lines: dict[str, float] = {f"ours, {_ROTATION[row['turned']]}": row["seconds"]}
        if row["turned"] == "nothing":
            lines |= {
                "cuDNN, K and V": row["peer_seconds"],
                "cuDNN, the same tensor twice": row["peer_same_tensor_seconds"],
                "floor: one tensor at copy speed": row["floor_seconds"],
            }
        rows += [
            {"keys": row["keys"], "line": line, "milliseconds": 1e3 * seconds}
            for line, seconds in lines.items()
        ]
    shades = {
        "cuDNN, K and V": BASELINE,
        "cuDNN, the same tensor twice": YELLOW,
        "ours, rotated in the score": PINK,
        "ours, output rotated back": SKY,
        "ours, no rotation": BLUE,
        "floor: one tensor at copy speed": _INK,
    }
    contexts = sorted({row["keys"] for row in rows})
    least, most = (edge(row["milliseconds"] for row in rows) for edge in (min, max))
    x = alt.X(
        "keys:Q",
        title="cached tokens",
        scale=alt.Scale(type="log", base=2, domain=[contexts[0], contexts[-1]]),
        axis=alt.Axis(values=contexts, format="~s", labelExpr="datum.value / 1024 + 'k'", **_BIG),
    )
    y = alt.Y(
        "milliseconds:Q",
        title="milliseconds per step",
        scale=alt.Scale(type="log", domain=[0.8 * least, 1.3 * most], nice=False),
        axis=alt.Axis(format="~g", tickCount=6, **_BIG),
    )
    color = alt.Color(
        "line:N",
        scale=alt.Scale(domain=list(shades), range=list(shades.values())),
        legend=alt.Legend(title=None, orient="right", labelFontSize=14, labelLimit=300, symbolStrokeWidth=3),
    )
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y, color=color)

    # Rotating back costs almost nothing: a thin line on a thick one shows both.
    thick, floor = "datum.line == 'ours, no rotation'", "indexof(datum.line, 'floor') == 0"
    dots = alt.OverlayMarkDef(size=60)
    return alt.layer(
        base.transform_filter(thick).mark_line(strokeWidth=7),
        base.transform_filter(f"!({thick}) && !({floor})").mark_line(strokeWidth=2.5, point=dots),
        base.transform_filter(floor).mark_line(strokeWidth=1.5, strokeDash=[6, 4]),
    ).properties(width=460, height=360)


_ROTATION = {"nothing": "no rotation", "roundtrip": "output rotated back", "score": "rotated in the score"}


_STACK_AIMS = {5: 15.0, 16: 20.0}
"""Target in million tokens per second, by the number of seeds."""


def stack(measured: Measured) -> Any:
    """Total tokens/s of several seeds: a single run, separate processes, a population."""
    rows: list[Row] = []
    aims: dict[str, float] = {}
    for row in measured.stacked():
        name = f"{row['seeds']} seeds of {row['size']}"
        for who, key in (
            ("a single run", "single_tokens_per_second"),
            ("separate processes", "separate_tokens_per_second"),
            ("population", "stacked_tokens_per_second"),
        ):
            if row[key]:
                text = f"{row[key] / 1e6:.1f} M"
                rows.append({"seeds": name, "who": who, "rate": row[key] / 1e6, "text": text})
        if row["size"] == "1m" and row["seeds"] in _STACK_AIMS:
            aims[name] = _STACK_AIMS[row["seeds"]]
    if not rows:
        return None
    colors = {"a single run": BASELINE, "separate processes": ORANGE, "population": BLUE}
    return _bars(
        rows,
        group="seeds",
        value="rate",
        title="million tokens per second, all seeds together",
        colors=colors,
        aims=aims,
    )


def generate(measured: Measured) -> Any:
    """Tokens/s of a whole model generating from a long prompt, and the bytes of its cache."""
    rows = [
        {
            "contender": row["contender"],
            "who": "transformers" if row["contender"].startswith("transformers") else "headtohead",
            "rate": row["tokens_per_second"] / 1e3,
            "text": f"{short_count(row['tokens_per_second'])}, cache {short_bytes(row['cache_bytes'])}",
        }
        for row in measured.generation()
    ]
    if not rows:
        return None
    colors = {"headtohead": BLUE, "transformers": BASELINE}
    return _bars(
        rows,
        group="contender",
        value="rate",
        title="thousand tokens per second",
        colors=colors,
        apart=False,
    )


def _bars(
    rows: list[Row],
    *,
    group: str,
    value: str,
    title: str,
    colors: dict[str, str],
    form: str = ".3~f",
    aims: dict[str, float] | None = None,
    whole: float = 0.0,
    apart: bool = True,
) -> Any:
    """Return grouped bars, each followed by its text; groups are in the order of the rows.

    `aims` are marked in their group, and `whole` across all groups. `apart` places the bars of a group side by side.
    """
    order = list(dict.fromkeys(row[group] for row in rows))
    here = [who for who in colors if any(row["who"] == who for row in rows)]
    most = max(*(row[value] for row in rows), whole, *(aims or {}).values())
    height = 22 * (len(here) if apart else 1) + 16
    x = alt.X(
        f"{value}:Q",
        title=title,
        scale=alt.Scale(domain=[0, 1.22 * most], nice=False),
        axis=alt.Axis(format=form, titleLimit=700, tickCount=7, **_BIG),
    )
    y = alt.Y(
        f"{group}:N",
        title=None,
        sort=order,
        axis=alt.Axis(labelLimit=330, **_BIG),
        scale=alt.Scale(paddingInner=0.3),
    )
    color = alt.Color(
        "who:N",
        scale=alt.Scale(domain=here, range=[colors[who] for who in here]),
        legend=alt.Legend(title=None, orient="top", labelFontSize=14, labelLimit=300, symbolSize=160),
    )
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y)
    if apart:
        base = base.encode(yOffset=alt.YOffset("who:N", sort=here))
    layers = [
        base.mark_bar().encode(color=color),
        base.mark_text(align="left", dx=5, fontSize=13).encode(text="text:N"),
    ]
    if whole:
        rule = alt.Chart(alt.Data(values=[{value: whole}])).mark_rule(strokeDash=[5, 4], color=_INK)
        layers.append(rule.encode(x=x))
    if aims:
        marks = [{group: name, value: aim, "text": "target"} for name, aim in aims.items()]
        base = alt.Chart(alt.Data(values=marks)).encode(x=x, y=y)
        layers.append(base.mark_tick(color=_INK, thickness=2, size=height - 12))
        layers.append(base.mark_text(dx=6, align="left", fontSize=13).encode(text="text:N"))
    return alt.layer(*layers).properties(width=WIDTH - 60, height=height * len(order))


PICTURES: dict[str, Callable[[Measured], Any]] = {
    "kernels": kernels,
    "roofline": roofline,
    "train": train,
    "mechanisms": mechanisms,
    "decode": decode,
    "stack": stack,
    "generate": generate,
}
"""Figures by name; the file is docs/images/speed-NAME.png."""
