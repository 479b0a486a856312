"""Zero-shot scores on tasks, compared with chance."""

from __future__ import annotations

import statistics

import altair as alt

from headtohead.report.charts import Chart, Row, category, dots, legend, named
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, Table, View, grouped
from headtohead.study.probes.tasks import TaskScores

_HEAD = ("task", "arm", "seeds", "mean", "standard error", "chance", "examples")


def figure(view: View) -> Figure | None:
    """Return the zero-shot scores, if the probe was run."""
    if not (rows := task_rows(view.arms)):
        return None
    words = (
        "Zero-shot accuracy. Dots are seeds, ticks their mean, bars two standard errors over examples to either side; dashes "
        "are chance. If chance is within the bars, the arm is not better than guessing."
    )
    means = _means(rows)
    lines = [
        (
            *(row["task"], row["arm"], str(row["seeds"])),
            *(f"{row[name]:.3f}" for name in ("mean", "error", "chance")),
            f"{row['examples']:,}",
        )
        for row in sorted(means, key=lambda row: row["task"])
    ]
    table = Table(_HEAD, lines, left=2, folded="Table")
    return Figure("Zero-shot tasks.", words, task_scores(means, rows, view), table=table)


def task_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return one row per task, arm and seed."""
    return [
        {"task": name, "arm": arm.label, "seed": seed, "value": score.accuracy}
        | {"error": score.standard_error, "chance": score.chance, "examples": score.n}
        for arm in arms
        for seed, found in arm.found(TaskScores).items()
        for name, score in {name: score for row in found for name, score in row.tasks.items()}.items()
    ]


def _means(rows: list[Row]) -> list[Row]:
    """Return one row per task and arm: mean over seeds, and standard error over the examples of one run."""
    found = []
    for group in grouped(rows, "task", "arm"):
        mean = statistics.fmean(row["value"] for row in group)
        errors = [row["error"] for row in group if row["error"] is not None]
        # Seeds share the examples, so their errors are correlated and do not average out.
        error = statistics.fmean(errors) if errors else 0.0
        ends = {"low": max(0.0, mean - 2 * error), "high": min(1.0, mean + 2 * error)}
        found.append(group[0] | {"mean": mean, "error": error, "seeds": len(group)} | ends)
    return found


def task_scores(means: list[Row], rows: list[Row], view: View) -> Chart:
    """Return accuracy by task and arm: every seed, the mean with its error, and chance."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lane = 18 * len(view.labels)
    dash = named("means").transform_aggregate(chance="min(chance)", groupby=["task"])
    dash = dash.mark_tick(size=lane + 8, thickness=1.5, color="#888", strokeDash=[4, 3])
    return dots(
        means,
        rows,
        tasks,
        view.color(legend()),
        "accuracy (right is better)",
        field="task",
        offset=alt.YOffset("arm:N", sort=view.labels, scale=alt.Scale(paddingOuter=0.25)),
        form=".3f",
        about=("task", "arm", "chance", "examples"),
        axis=alt.Axis(format="%"),
        under=[dash.encode(x="chance:Q", y=category("task", tasks))],
        height=lane + 14,
    )
