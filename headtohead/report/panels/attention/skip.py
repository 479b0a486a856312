"""Rise in loss of hybrids with layers skipped."""

from __future__ import annotations

from typing import Any

import altair as alt

from headtohead.report.charts import NARROW, Chart, Row, arm_axis
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.study.probes.skip import PARTS

_NAMES = {
    ("variant", "block"): "variant layers",
    ("variant", "attention"): "variant attention only",
    ("standard", "block"): "standard layers",
    ("standard", "attention"): "standard attention only",
}
_SHADES = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00")


def figure(view: View) -> Figure | None:
    """Return the rise in loss with layers skipped, if the probe was run and a layout mixes mechanisms."""
    rows = skip_rows(view.arms)
    if not rows:
        return None
    words = (
        "Rise in bits per byte of the trained hybrid when layers are skipped, with standard layers as a control; dots are "
        "seeds, ticks their mean. Near zero: the model does not use these layers."
    )
    arms = [label for label in view.labels if any(row["arm"] == label for row in rows)]
    return Figure("Skipped layers.", words, skipped(rows, arms))


def skip_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return one row per arm, seed and skipped part."""
    return [
        {
            "arm": arm.label,
            "seed": seed,
            "skipped": _NAMES[group, part],
            "rise": row[group][part]["rise"],
            "layers": len(row[group]["layers"]),
        }
        for arm in arms
        for seed, found in arm.found("skip").items()
        for row in found[-1:]
        for group in ("variant", "standard")
        for part in PARTS
        if row[group][part]["rise"] is not None
    ]


def skipped(rows: list[Row], arms: list[str]) -> Chart:
    """Return the rise by arm and skipped part."""
    kinds = list(_NAMES.values())
    y = alt.Y("arm:N", sort=arms, title=None, axis=arm_axis())
    offset = alt.YOffset("skipped:N", sort=kinds, scale=alt.Scale(paddingOuter=0.2))
    x = alt.X(
        "rise:Q",
        title=["rise in bits per byte", "(right: layers matter more)"],
        scale=alt.Scale(nice=True),
    )
    color = alt.Color(
        "skipped:N",
        sort=kinds,
        scale=alt.Scale(domain=kinds, range=list(_SHADES)),
        legend=alt.Legend(title=None, orient="top", columns=alt.ExprRef(f"{NARROW} ? 1 : 4"), labelLimit=200),
    )
    tips: list[Any] = ["arm:N", "skipped:N", "seed:O", "layers:O", alt.Tooltip("rise:Q", format="+.4f")]
    data = alt.Chart(alt.Data(values=rows))
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[4, 3], color="#888")
    layers = [
        zero.encode(x="zero:Q"),
        data.mark_circle(size=60, opacity=0.75).encode(x=x, y=y, yOffset=offset, color=color, tooltip=tips),
        data.mark_tick(thickness=2.5, size=13).encode(
            x=alt.X("mean(rise):Q"), y=y, yOffset=offset, color=color
        ),
    ]
    return alt.layer(*layers).properties(width="container", height=74 * len(arms))
