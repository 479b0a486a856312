"""Learning rates of circuits relative to the run's."""

from __future__ import annotations

import altair as alt

from headtohead.report.charts import Chart, Row, legend
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View
from headtohead.training.circuit_rates import recorded_rules

_RATIO_POINTS = 200


def figure(view: View) -> Figure | None:
    """Return the ratios over training, if a circuit has a rule."""
    if not (rows := ratio_rows(view.arms)):
        return None
    words = (
        "Ratio of a circuit's learning rate to the run's, which itself warms up and decays. Unless the rule is coupled, "
        "weight decay is divided by the ratio, so that learning rate x decay is equal in all circuits."
    )
    return Figure("Learning rates by circuit.", words, circuit_ratios(rows, view.scale))


def ratio_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return the ratio of every rule on a circuit's learning rate, at about 200 steps of the run."""
    rows = []
    for arm in arms:
        training = arm.record.get("training", {})
        steps = max(1, training.get("tokens", 0) // training.get("batch", 1))
        rules, decay = recorded_rules(training)
        for rule in rules:
            for step in sorted({(steps - 1) * point // _RATIO_POINTS for point in range(_RATIO_POINTS + 1)}):
                row = {"arm": arm.label, "rule": rule.words(), "decay": decay}
                rows.append(row | {"tokens": step * training["batch"], "ratio": rule.ratio(step, steps)})
    return rows


def circuit_ratios(rows: list[Row], scale: alt.Scale) -> Chart:
    """Return the ratio of circuits' learning rates to the run's over training; dashes distinguish an arm's rules."""
    wide = alt.Scale(type="log" if min(row["ratio"] for row in rows) > 0 else "linear", nice=True)
    x = alt.X("tokens:Q", title="tokens trained on", axis=alt.Axis(format="~s", grid=False))
    y = alt.Y("ratio:Q", title="ratio to the run's learning rate", scale=wide)
    tips = [alt.Tooltip("arm:N"), alt.Tooltip("rule:N"), alt.Tooltip("decay:N", title="lr x decay")]
    tips += [alt.Tooltip("tokens:Q", format=","), alt.Tooltip("ratio:Q", format=".4~g")]
    rules = alt.Legend(title=None, orient="bottom", direction="vertical", labelLimit=600, symbolType="stroke")
    line = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(strokeWidth=2)
        .encode(
            x=x,
            y=y,
            color=alt.Color("arm:N", scale=scale, legend=legend()),
            strokeDash=alt.StrokeDash("rule:N", legend=rules),
            tooltip=tips,
        )
    )
    one = (
        alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(strokeDash=[4, 3], color="#888").encode(y="one:Q")
    )
    return alt.layer(one, line).properties(width="container", height=200)
