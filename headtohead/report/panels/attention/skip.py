"""Rise in loss of hybrids with layers skipped."""

from __future__ import annotations

import altair as alt

from headtohead.report.charts import NARROW, Row, dots, legend, rule
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.study.probes.skip import Skipped

_PARTS = {
    "variant layers": ("variant", "block", "#0072B2"),
    "variant attention only": ("variant", "attention", "#56B4E9"),
    "standard layers": ("standard", "block", "#D55E00"),
    "standard attention only": ("standard", "attention", "#E69F00"),
}
"""What is skipped: the group of layers, the part of them, and its color."""


def figure(view: View) -> Figure | None:
    """Return the rise in loss with layers skipped, if the probe was run and a layout mixes mechanisms."""
    if not (rows := skip_rows(view.arms)):
        return None
    words = (
        "Rise in bits per byte of the trained hybrid when layers are skipped, with standard layers as a control; dots are "
        "seeds, ticks their mean. Near zero: the model does not use these layers."
    )
    kinds = list(_PARTS)
    scale = alt.Scale(domain=kinds, range=[color for _, _, color in _PARTS.values()])
    shown = legend()
    # Two of these labels are wider than a phone.
    shown.columns, shown.labelLimit = alt.ExprRef(f"{NARROW} ? 1 : 4"), 200
    chart = dots(
        [],
        rows,
        view.ordered(rows),
        alt.Color("skipped:N", sort=kinds, scale=scale, legend=shown),
        ["rise in bits per byte", "(right: layers matter more)"],
        offset=alt.YOffset("skipped:N", sort=kinds, scale=alt.Scale(paddingOuter=0.2)),
        form="+.4f",
        about=("arm", "skipped", "layers"),
        scale=alt.Scale(nice=True),
        under=[rule(0)],
        height=74,
    )
    return Figure("Skipped layers.", words, chart)


def skip_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return one row per arm, seed and skipped part."""
    return [
        {
            "arm": arm.label,
            "seed": seed,
            "skipped": name,
            "value": rise,
            "layers": len(getattr(row, group).layers),
        }
        for arm in arms
        for seed, found in arm.found(Skipped).items()
        for row in found[-1:]
        for name, (group, part, _) in _PARTS.items()
        if (rise := getattr(getattr(row, group), part).rise) is not None
    ]
