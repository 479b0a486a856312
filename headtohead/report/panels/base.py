"""Types of panels: the data of one contest, and figures with chart, table and caption."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import altair as alt

from headtohead.report.charts import Chart, colors
from headtohead.report.gather import ArmFacts, drawn_labels
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.verdict import Verdict
from headtohead.study.store.manifest import Contest, Manifest, Measure, metric_label


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

    @property
    def scale(self) -> alt.Scale:
        """One color per arm, the same in every chart."""
        return colors(self.labels, self.manifest.baseline)

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
