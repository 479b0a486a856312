"""Attention maps of selected heads."""

from __future__ import annotations

import altair as alt

from headtohead.report.charts import AXIS, Chart, Row, header_size, tips
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.study.probes.maps import Maps

_MAX_CELLS = 300_000
"""Maximum cells on one page; further arms are left out."""
_SIDE = 170
# Visible on white and on black.
PLUS, MINUS = "#1f8ae0", "#e8640c"


def figure(view: View) -> Figure | None:
    """Return maps of selected heads, if the probe was run."""
    maps, tokens, left_out = map_rows(view.arms)
    if not maps:
        return None
    seed = maps[0]["seed"]
    words = (
        f"Seed {seed} on one held-out window. Each row of a map is the attention of a few tokens, from the first token (left) to "
        "themselves (diagonal). Stronger color means more weight, on one scale for all maps."
    )
    if any(row["signed"] for row in maps):
        words += " Orange: negative weight."
    if absent := absent_heads(view.arms):
        words += f" Requested but not in the model: {', '.join(absent)}."
    if left_out:
        words += f" Left out to limit the page size: {', '.join(left_out)}."
    chart = head_maps(maps, tokens, view.ordered(maps))
    return Figure("Attention maps of selected heads.", words, chart, "Hover for the tokens.")


def map_rows(arms: list[ArmFacts]) -> tuple[list[Row], list[Row], list[str]]:
    """Return one row per map with its cells, the texts of the token groups, and the arms left out.

    Shows the first seed of each arm, on the same window.
    """
    maps: list[Row] = []
    texts: list[str] = []
    left_out: list[str] = []
    cells = 0
    for arm in arms:
        if not (found := arm.found(Maps)):
            continue
        seed, rows = next(iter(found.items()))
        chosen = [(row, one) for row in rows for one in row.maps]
        cells += sum(len(line) for _, one in chosen for line in one.rows)
        if maps and cells > _MAX_CELLS:
            left_out.append(arm.label)
            continue
        known = {(one.layer, one.why): (row, one) for row, one in chosen}
        for row, one in known.values():
            texts = max(texts, row.tokens, key=len)
            flat = [value / max(1, row.scale) for line in one.rows for value in line]
            about = {"head": one.head, "why": one.why, "signed": one.signed}
            maps.append({"arm": arm.label, "seed": seed, "layer": str(one.layer), "w": flat} | about)
    tokens = [{"place": place, "text": text} for place, text in enumerate(texts)]
    return maps, tokens, left_out


def absent_heads(arms: list[ArmFacts]) -> list[str]:
    """Return the requested heads that do not exist, by arm."""
    return list(
        dict.fromkeys(
            f"{head} of {arm.label}"
            for arm in arms
            for rows in arm.found(Maps).values()
            for row in rows
            for head in row.absent
        )
    )


def head_maps(maps: list[Row], tokens: list[Row], arms: list[str]) -> Chart:
    """Return a grid of maps, one row per arm; the parameter `axis` selects the layer."""
    layers = sorted({row["layer"] for row in maps}, key=int)
    axis = alt.param(name=AXIS, value=layers[0])
    # Cells are stored row by row, r + 1 of them in row r, so cell n is in row floor((sqrt(8 n + 1) - 1) / 2).
    count = len(tokens)
    texts = alt.LookupData(alt.NamedData("tokens"), key="place", fields=["text"])
    base = (
        alt.Chart(alt.NamedData("maps"))
        .transform_filter(f"datum.layer == {AXIS}")
        .transform_flatten(["w"])
        .transform_window(n="row_number()", groupby=["arm", "why"])
        .transform_calculate(row="floor((sqrt(8 * (datum.n - 1) + 1) - 1) / 2)")
        .transform_calculate(column="datum.n - 1 - datum.row * (datum.row + 1) / 2")
        .transform_filter("abs(datum.w) >= 0.004")
        .transform_lookup(lookup="row", from_=texts, as_=["tokens"])
        .transform_lookup(lookup="column", from_=texts, as_=["looks_at"])
        .transform_calculate(
            strength="pow(min(1, abs(datum.w)), 0.4)",
            end="datum.column + 1",
            bottom="datum.row + 1",
        )
    )
    span = alt.Scale(domain=[0, count], nice=False)
    hover = [*tips("arm", "head", "tokens"), alt.Tooltip("looks_at:N", title="attends to")]
    hover.append(alt.Tooltip("w:Q", title="weight", format=".3f"))
    cells = base.mark_rect(strokeWidth=0).encode(
        x=alt.X("column:Q", scale=span, axis=None),
        x2="end",
        y=alt.Y("row:Q", scale=alt.Scale(domain=[count, 0], nice=False), axis=None),
        y2="bottom",
        color=alt.condition("datum.w >= 0", alt.value(PLUS), alt.value(MINUS)),
        opacity=alt.Opacity("strength:Q", scale=alt.Scale(domain=[0, 1], range=[0.03, 1]), legend=None),
        tooltip=hover,
    )
    whys = list(dict.fromkeys(row["why"] for row in maps))
    plain: Row = {"title": None, "labelFontSize": 13, "labelFontWeight": "normal", "labelPadding": 4}
    small = {"labelFontSize": header_size(arms), "labelLimit": _SIDE}
    row_header = alt.Header(labelOrient="left", labelAngle=-90, **(plain | small))
    chart = (
        cells.add_params(axis)
        .properties(width=_SIDE, height=_SIDE)
        .facet(
            row=alt.Row("arm:N", sort=arms, header=row_header),
            column=alt.Column("why:N", sort=whys, header=alt.Header(**plain)),
            spacing=8,
        )
    )
    chart = chart.properties(usermeta={"axes": {layer: f"layer {layer}" for layer in layers}})
    chart.datasets = {"maps": maps, "tokens": tokens}
    return chart
