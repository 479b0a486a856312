"""What a panel is: a chart or a table with the words above it, drawn from one contest or from the whole study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import altair as alt

from headtohead.report.charts import Chart, colors
from headtohead.report.gather import ArmFacts
from headtohead.study.judge.verdict import Verdict
from headtohead.study.store.manifest import Contest, Manifest, Measure, metric_label


@dataclass(frozen=True)
class View:
    """One contest, with everything its runs left behind."""

    path: Path
    """The study's directory."""
    manifest: Manifest
    contest: Contest
    arms: list[ArmFacts]
    verdicts: list[Verdict]

    @property
    def labels(self) -> list[str]:
        """The arms' labels in order."""
        return [label for _, label in self.manifest.arms]

    @property
    def scale(self) -> alt.Scale:
        """One colour per arm, the same in every chart."""
        return colors(self.labels, self.manifest.baseline)

    @property
    def measure(self) -> Measure:
        """What the contest is judged by."""
        return self.manifest.measure(self.contest)

    @property
    def unit(self) -> str:
        """The same in words."""
        return metric_label(self.measure.name)

    @property
    def side(self) -> str:
        """Where the better scores stand on an axis."""
        return "left" if self.measure.better == "lower" else "right"

    @property
    def references(self) -> dict[str, float]:
        """What one gets without a model, by name: bits per byte, or a task's metric."""
        return self.manifest.references.get(self.contest.corpus_label, {})


@dataclass(frozen=True)
class Chip:
    """A word in a table that stands out by its colour."""

    words: str
    kind: str
    """The style: better, worse, equivalent, supported, contradicted, open."""


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers, formatted; `left` columns hold words, the others numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Chip]]
    left: int = 1
    folded: str = ""
    """What to press to see it; empty: it is shown at once."""


@dataclass(frozen=True)
class Figure:
    """A chart, a table or both, under a title and a line of words."""

    title: str
    words: str
    chart: Chart | None = None
    hint: str = ""
    """What a reader can do with it on a screen."""
    table: Table | None = None
    links: Sequence[tuple[str, str]] = ()
    """Pages beside this one: a name, and where it is from here."""
