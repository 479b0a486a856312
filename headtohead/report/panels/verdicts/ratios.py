"""Learning rates of circuits relative to the run's."""

from __future__ import annotations

import altair as alt

from headtohead.report.charts import Row, layered, legend, named, rule, tips
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, View

_RATIO_POINTS = 200


def figure(view: View) -> Figure | None:
    """Return the ratios over training, if a circuit has a rule; dashes distinguish an arm's rules."""
    if not (rows := ratio_rows(view.arms)):
        return None
    words = (
        "Ratio of a circuit's learning rate to the run's, which itself warms up and decays. Unless the rule is coupled, "
        "weight decay is divided by the ratio, so that learning rate x decay is equal in all circuits."
    )
    wide = alt.Scale(type="log" if min(row["ratio"] for row in rows) > 0 else "linear", nice=True)
    rules = alt.Legend(title=None, orient="bottom", direction="vertical", labelLimit=600, symbolType="stroke")
    line = named("points").mark_line(strokeWidth=2)
    line = line.encode(
        x=alt.X("tokens:Q", title="tokens trained on", axis=alt.Axis(format="~s", grid=False)),
        y=alt.Y("ratio:Q", title="ratio to the run's learning rate", scale=wide),
        color=view.color(legend(lines=True)),
        strokeDash=alt.StrokeDash("rule:N", legend=rules),
        tooltip=tips("arm", "rule", "lr x decay", tokens=",", ratio=".4~g"),
    )
    chart = layered([rule(1, "y"), line], {"points": rows}, height=200)
    return Figure("Learning rates by circuit.", words, chart)


def ratio_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return the ratio of every rule on a circuit's learning rate, at about 200 steps of the run."""
    rows = []
    for arm in arms:
        if arm.spec is None:
            continue
        training = arm.spec.training
        steps = max(1, training.tokens // training.batch)
        for one in training.circuit_lr:
            for step in sorted({(steps - 1) * point // _RATIO_POINTS for point in range(_RATIO_POINTS + 1)}):
                row = {"arm": arm.label, "rule": one.words(), "lr x decay": training.circuit_decay}
                rows.append(row | {"tokens": step * training.batch, "ratio": one.ratio(step, steps)})
    return rows
