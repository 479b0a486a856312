"""Types of panels: the data of one contest, and figures with chart, table and caption."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from headtohead.report.charts import LONG_NAME, Chart, Row, colors, in_one_column
from headtohead.report.gather import ArmFacts, Results, drawn_labels, gather
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.verdict import Verdict
from headtohead.study.store.manifest import Contest, Manifest, Measure, metric_label
from headtohead.study.store.result import RunResult

Definition = dict[str, Any]


@dataclass(frozen=True)
class View:
    """One contest with all stored data of its runs."""

    path: Path
    """The study's directory."""
    manifest: Manifest
    contest: Contest
    arms: list[ArmFacts]
    verdicts: list[Verdict]
    analysis: Analysis | None = None
    """What was computed from all results of the study; None on pages without figures of the whole study."""

    def drawn(self) -> View:
        """Return the view with only the arms that its figures show; the view itself if they show all."""
        labels = set(drawn_labels(self.manifest, self.verdicts))
        if len(labels) == len(self.manifest.arms):
            return self
        manifest = dataclasses.replace(
            self.manifest,
            arms=tuple(arm for arm in self.manifest.arms if arm[1] in labels),
            tuning=tuple(row for row in self.manifest.tuning if row.label in labels),
        )
        arms = [arm for arm in self.arms if arm.label in labels]
        rows = [row for row in self.verdicts if row.label in labels]
        return dataclasses.replace(self, manifest=manifest, arms=arms, verdicts=rows)

    @property
    def labels(self) -> list[str]:
        """The arms' labels in order."""
        return [label for _, label in self.manifest.arms]

    def color(self, legend: alt.Legend | None = None) -> alt.Color:
        """Return one color per arm, the same in every chart."""
        if legend is not None and any(len(label) > LONG_NAME for label in self.labels):
            legend = in_one_column(legend)
        return alt.Color("arm:N", scale=colors(self.labels, self.manifest.baseline), legend=legend)

    def ordered(self, rows: Sequence[Row]) -> list[str]:
        """Return the labels of the arms that have a row, in order."""
        known = {row["arm"] for row in rows}
        return [label for label in self.labels if label in known]

    @property
    def results(self) -> Results:
        """The results of the runs by run id."""
        found: dict[str, RunResult] = {}
        for arm in self.arms:
            runs = self.manifest.runs(self.contest, arm.label)
            found |= {runs[seed]: result for seed, result in arm.results.items()}
        return found

    @property
    def measure(self) -> Measure:
        """The metric the contest is judged by."""
        return self.manifest.measure(self.contest)

    @property
    def unit(self) -> str:
        """The label of that metric."""
        return metric_label(self.measure.name)

    @property
    def side(self) -> str:
        """The side of an axis with better scores."""
        return "left" if self.measure.better == "lower" else "right"

    @property
    def references(self) -> dict[str, float]:
        """Scores of trivial predictors by name, in bits per byte or a task's metric."""
        return self.manifest.references.get(self.contest.corpus_label, {})


def study_views(path: Path, analysis: Analysis, damage: list[str]) -> list[View]:
    """Return the contests of a study with the stored data of their runs; unreadable files are added to `damage`."""
    views, manifest = [], analysis.manifest
    for contest in manifest.contests():
        rows = [row for row in analysis.verdicts if row.of(contest)]
        arms = gather(path, manifest, contest, analysis.results, damage, rows)
        views.append(View(path, manifest, contest, arms, rows, analysis))
    return views


def grouped(rows: Sequence[Row], *fields: str) -> list[list[Row]]:
    """Return the rows in groups of equal fields, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in fields), []).append(row)
    return list(groups.values())


def number(value: float | None, form: str) -> str:
    """Return a number as a cell of a table; a dash without one."""
    return "–" if value is None else format(value, form)


def interval(low: float | None, high: float | None, form: str) -> str:
    """Return an interval as a cell of a table; a dash without one."""
    return "–" if low is None or high is None else f"{low:{form}} to {high:{form}}"


@dataclass(frozen=True)
class Chip:
    """A colored label in a table."""

    words: str
    kind: str
    """The style: better, worse, equivalent, supported, contradicted, open."""


@dataclass(frozen=True)
class Table:
    """Formatted rows; the first `left` columns are text, the others numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Chip]]
    left: int = 1
    folded: str = ""
    """Label that unfolds the table; empty: always shown."""


@dataclass(frozen=True)
class Figure:
    """A chart, a table or both, with title and caption."""

    title: str
    words: str
    chart: Chart | None = None
    hint: str = ""
    """How to interact with it on a screen."""
    table: Table | None = None
    links: Sequence[tuple[str, str]] = ()
    """Linked pages: name and relative path."""

    @cached_property
    def definition(self) -> Definition | None:
        """The chart as Vega-Lite, for a page or a file."""
        # Validated in tests only, as in `figures.drawn`.
        with debug_mode(False):
            return None if self.chart is None else self.chart.to_dict(validate=False)
