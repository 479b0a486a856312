"""Arm x task: verdicts by task."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("altair")

from headtohead.report.panels import View
from headtohead.report.panels.base import Chip
from headtohead.report.panels.verdicts import wins
from headtohead.study.judge.verdict import study_verdicts
from headtohead.study.store.manifest import Contest, Entry, Manifest, Measure
from tests.results import run_result

SHIFTS = {"recall": 0.1, "glue-cola": -0.1}
OWN = (0.004, -0.004, 0.002, -0.003, 0.001)


def views(tasks: tuple[str, ...], metrics: tuple[str, ...]) -> list[View]:
    contests = [Contest(task, task, "nano", "as_is", "tokens") for task in tasks]
    entries, results = [], {}
    for contest, metric in zip(contests, metrics, strict=True):
        for label in ("standard", "a"):
            for seed in range(1, 6):
                run = f"{contest.corpus}/{label}/{seed}"
                entries.append(Entry(run, label, seed, contest))
                shift = (SHIFTS[contest.corpus] + OWN[seed - 1]) * (label == "a")
                results[run] = run_result(test={metric: 0.5 + shift})
    measures = {task: Measure(metric, "higher", 0.01) for task, metric in zip(tasks, metrics, strict=True)}
    arms = (("standard", "standard"), ("sharing:tie=kv", "a"))
    manifest = Manifest("s", arms, "standard", "a", 0.01, (1, 2, 3, 4, 5), tuple(entries), measures=measures)
    verdicts = study_verdicts(manifest, results)
    return [
        View(Path(), manifest, contest, [], [row for row in verdicts if row.of(contest)])
        for contest in contests
    ]


def test_a_higher_metric_wins_and_every_seed_is_a_dot() -> None:
    found = views(("recall", "glue-cola"), ("accuracy", "matthews"))
    cells = [(view.contest.corpus, row) for view in found for row in view.verdicts]
    rows = wins.win_rows(cells)
    assert [(row["evaluated"], row["verdict"]) for row in rows] == [
        ("recall", "better"),
        ("glue-cola", "worse"),
    ]
    seeds = wins.seed_rows(cells)
    assert len(seeds) == 10
    assert all(-1 <= row["place"] <= 1 for row in seeds)
    assert seeds[0]["place"] == pytest.approx(1.0)
    figure = wins.figure(found)
    assert figure is not None
    assert figure.chart is not None
    assert figure.chart.to_dict(validate=True)
    assert figure.table is not None
    assert figure.table.head[1:3] == ("recall (accuracy)", "glue-cola (Matthews correlation)")
    assert figure.table.rows == [["a", Chip("better", "better"), Chip("worse", "worse"), "1", "1", "0", "0"]]


def test_one_task_has_no_matrix() -> None:
    assert wins.figure(views(("recall",), ("accuracy",))) is None
    assert wins.figure([]) is None
