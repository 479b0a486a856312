"""Zero-shot scores on tasks, compared with chance."""

from __future__ import annotations

import statistics
from typing import Any

import altair as alt

from headtohead.report.charts import NARROW, Chart, Row
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, Table, View

_CHANCE = "chance"


def figure(view: View) -> Figure | None:
    """Return the zero-shot scores, if the probe was run."""
    rows = task_rows(view.arms)
    if not rows:
        return None
    words = (
        "Zero-shot accuracy. Dots are seeds, ticks their mean, bars two standard errors over examples to either side; dashes "
        "are chance. If chance is within the bars, the arm is not better than guessing."
    )
    table = Table(
        ("task", "arm", "seeds", "mean", "standard error", "chance", "examples"),
        _lines(rows),
        left=2,
        folded="Table",
    )
    return Figure("Zero-shot tasks.", words, task_scores(rows, view), table=table)


def task_rows(arms: list[ArmFacts]) -> list[Row]:
    """Return one row per task, arm and seed."""
    return [
        {
            "task": name,
            "arm": arm.label,
            "seed": seed,
            "accuracy": score["accuracy"],
            "error": score["standard_error"],
            "chance": score["chance"],
            "n": score["n"],
        }
        for arm in arms
        for seed, found in arm.found("tasks").items()
        for name, score in {name: score for row in found for name, score in row["tasks"].items()}.items()
    ]


def _means(rows: list[Row]) -> list[Row]:
    """Return one row per task and arm: mean over seeds, and standard error over the examples of one run."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["arm"]), []).append(row)
    found = []
    for (task, arm), group in groups.items():
        mean = statistics.fmean(row["accuracy"] for row in group)
        errors = [row["error"] for row in group if row["error"] is not None]
        # Seeds share the examples, so their errors are correlated and do not average out.
        error = statistics.fmean(errors) if errors else 0.0
        found.append(
            {"task": task, "arm": arm, "mean": mean, "error": error, "seeds": len(group)}
            | {"low": max(0.0, mean - 2 * error), "high": min(1.0, mean + 2 * error)}
            | {"chance": group[0]["chance"], "n": group[0]["n"]}
        )
    return found


def _lines(rows: list[Row]) -> list[tuple[str, ...]]:
    return [
        (
            row["task"],
            row["arm"],
            str(row["seeds"]),
            f"{row['mean']:.3f}",
            f"{row['error']:.3f}",
            f"{row['chance']:.3f}",
            f"{row['n']:,}",
        )
        for row in sorted(_means(rows), key=lambda row: row["task"])
    ]


def task_scores(rows: list[Row], view: View) -> Chart:
    """Return accuracy by task and arm: every seed, the mean with its error, and chance."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    means = _means(rows)
    y = alt.Y("task:N", sort=tasks, title=None, axis=alt.Axis(domain=False, ticks=False, labelFontSize=13))
    offset = alt.YOffset("arm:N", sort=view.labels, scale=alt.Scale(paddingOuter=0.25))
    x = alt.X(
        "accuracy:Q",
        title="accuracy (right is better)",
        scale=alt.Scale(zero=False, nice=True),
        axis=alt.Axis(format="%"),
    )
    color = alt.Color(
        "arm:N",
        scale=view.scale,
        legend=alt.Legend(title=None, orient="top", columns=alt.ExprRef(f"{NARROW} ? 2 : 4")),
    )
    tips: list[Any] = ["task:N", "arm:N", "seed:O", alt.Tooltip("accuracy:Q", format=".3f")]
    tips += [alt.Tooltip("chance:Q", format=".3f"), alt.Tooltip("n:Q", title="examples", format=",")]
    spread = alt.Chart(alt.Data(values=means))
    levels = [
        {"task": task, _CHANCE: next(row[_CHANCE] for row in means if row["task"] == task)} for task in tasks
    ]
    layers = [
        alt.Chart(alt.Data(values=levels))
        .mark_tick(size=18 * len(view.labels) + 8, thickness=1.5, color="#888", strokeDash=[4, 3])
        .encode(x=alt.X(f"{_CHANCE}:Q"), y=y),
        spread.mark_rule(strokeWidth=2, opacity=0.5).encode(
            x=alt.X("low:Q"), x2="high:Q", y=y, yOffset=offset, color=color
        ),
        alt.Chart(alt.Data(values=rows))
        .mark_circle(size=46, opacity=0.7)
        .encode(x=x, y=y, yOffset=offset, color=color, tooltip=tips),
        spread.mark_tick(thickness=2.5, size=16).encode(x=alt.X("mean:Q"), y=y, yOffset=offset, color=color),
    ]
    height = len(tasks) * (18 * len(view.labels) + 14)
    return alt.layer(*layers).properties(width="container", height=height)
