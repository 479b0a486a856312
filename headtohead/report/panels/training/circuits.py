"""Circuits during training: accumulated learning rates, gradient norms, norms of W_QK and W_OV."""

from __future__ import annotations

import math
import statistics

import altair as alt

from headtohead.evaluation.logged_row import Circuits, LoggedRow
from headtohead.report.charts import Chart, Choice, Row, legend, lines, tips
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View

_POINTS = 80
VALUES = {
    "qk_product": ("‖QK‖", "norm of W_QK, root mean square over layers"),
    "ov_product": ("‖OV‖", "norm of W_OV, root mean square over layers"),
    "qk_grad_norm": ("QK gradient", "gradient norm of the qk circuit before clipping, all layers"),
    "ov_grad_norm": ("OV gradient", "gradient norm of the ov circuit before clipping, all layers"),
    "qk_lr_sum": ("QK rate", "accumulated learning rate of the qk circuit, mean over layers"),
    "ov_lr_sum": ("OV rate", "accumulated learning rate of the ov circuit, mean over layers"),
}
"""By circuit and value: button label and chart title."""


def figure(view: View) -> Figure | None:
    """Return the circuits over training, if runs logged them."""
    if not (rows := circuit_rows(view.arms)):
        return None
    words = "Means over seeds; values per layer are in each run's metrics.jsonl."
    return Figure("Circuits during training.", words, circuits_over_tokens(rows, view))


def circuit_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return one row per arm and logged step with all values, mean over seeds; about 80 points per arm."""
    rows = []
    for arm in arms:
        steps: dict[int, list[LoggedRow]] = {}
        for curve in arm.curves.values():
            logged = [row for row in curve if row.circuits]
            every = max(1, len(logged) // _POINTS)
            for row in logged[::-1][::every]:
                steps.setdefault(row.step, []).append(row)
        for step, found in sorted(steps.items()):
            values = [_values(row.circuits) for row in found if row.circuits]
            means = {
                name: statistics.fmean(known)
                if (known := [row[name] for row in values if name in row])
                else None
                for name in VALUES
            }
            if any(mean is not None for mean in means.values()):  # a model without attention has none of them
                tokens = found[0].tokens or step
                rows.append({"arm": arm.label, "tokens": tokens} | means)
    return rows


def _values(circuits: Circuits) -> dict[str, float]:
    """Return the values of one logged row over its layers."""
    found = {}
    for name in VALUES:
        tag, _, key = name.partition("_")
        if known := [value for value in circuits.get(tag, {}).get(key, ()) if value is not None]:
            squares = math.fsum(value * value for value in known)
            found[name] = (
                statistics.fmean(known)
                if key == "lr_sum"
                else math.sqrt(squares if key == "grad_norm" else squares / len(known))
            )
    return found


def circuits_over_tokens(rows: list[Row], view: View) -> Chart:
    """Return one value of the circuits over training; buttons select it."""
    values = {name: words for name, words in VALUES.items() if any(row[name] is not None for row in rows)}
    x = alt.X("tokens:Q", title="tokens trained on", axis=alt.Axis(format="~s", grid=False))
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False, nice=True, padding=8))
    hover = tips("arm", tokens=",", value=".4~g")
    choice = Choice(values, into="value")
    return lines(rows, x, y, view.color(legend(lines=True)), hover, height=240, choice=choice)
