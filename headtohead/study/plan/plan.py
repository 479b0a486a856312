"""A plan: all runs of a study with the contests they belong to, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from headtohead.evaluation.corpus_stats import Statistics
from headtohead.mechanisms.contract.terms import Composed
from headtohead.study.config.spec import StudySpec
from headtohead.study.plan.dataset import Dataset
from headtohead.study.store.manifest import Check, Contest, Entry, Manifest, Measure, Solved
from headtohead.study.store.run_spec import RunSpec

LayerTable = dict[tuple[str, ...], tuple[Composed, ...]]
"""The mechanisms of each layer by their texts (`RunSpec.layers`); classes passed in Python have no other source."""

Rates = dict[tuple[str, str, str, str, str], float]
"""Tuned learning rates by corpus, size, context, shape rule and arm's label."""


@dataclass(frozen=True)
class StepTime:
    """Seconds per training step of an arm."""

    seconds: float
    spread: float
    """Half the interquartile range of the step times relative to the first arm's, as a share."""
    where: str
    """Device, threads and path, for display."""

    def describe(self, baseline: StepTime) -> str:
        """Return the measurement as text."""
        both = f"{1000 * self.seconds:.4g} ms per step, the baseline {1000 * baseline.seconds:.4g}"
        return f"{both} (± {self.spread:.1%} from step to step; {self.where})"


StepTimes = Callable[[list[RunSpec], LayerTable, Dataset, str], list[StepTime]]
"""Maps runs, their layers, their dataset and the path (fused or plain) to the step time of each run."""


@dataclass(frozen=True)
class Plan:
    """All runs of a study, and the contests, arms and seeds they belong to."""

    spec: StudySpec
    runs: dict[str, RunSpec]
    """Each run once, by id, ordered by seed so that a study stopped early is balanced, trunks before branches."""
    entries: tuple[Entry, ...]
    trunks: tuple[Entry, ...]
    """The runs that branches start from; they are not part of any contest."""
    layers: LayerTable
    datasets: dict[str, Dataset]
    """Corpora or tasks by the hash of their content."""
    solved: tuple[Solved, ...] = ()
    """The numbers that the rules solved for each arm except the baseline."""
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """Statistics of each corpus by label, if there are several corpora."""
    checks: tuple[Check, ...] = ()
    """Findings of the causality gate in arms with user code."""

    def dataset(self, run: RunSpec) -> Dataset:
        """Return the corpus or task of a run."""
        return self.datasets[run.corpus.content]

    def composed(self, run: RunSpec) -> tuple[Composed, ...]:
        """Return the mechanism of each layer of a run."""
        return self.layers[run.layers]

    def tokens(self, run: RunSpec) -> int:
        """Return the tokens of a run's own steps: for a branch, those of its decay."""
        return self.dataset(run).trained(run.training, run.own_steps)

    def compared(self) -> list[RunSpec]:
        """Return the run of every entry: by contest, arm and seed; contests may share runs."""
        return [self.runs[entry.run] for entry in self.entries]

    def first_seed(self) -> list[tuple[Entry, RunSpec]]:
        """Return the entry and run of the first seed of every arm in every contest."""
        seed = self.spec.seeds[0]
        return [(entry, self.runs[entry.run]) for entry in self.entries if entry.seed == seed]

    def measure(self, contest: Contest) -> Measure:
        """Return the metric and margin of a contest."""
        labels = (dataset for dataset in self.datasets.values() if dataset.label == contest.corpus_label)
        return next(labels).measure(self.spec.given_margin) or Measure()

    @cached_property
    def manifest(self) -> Manifest:
        """The plan without models and data, as needed by verdicts and reports."""
        primary = self.spec.primary_arm
        datasets = list(self.datasets.values())
        found = {dataset.label: dataset.measure(self.spec.given_margin) for dataset in datasets}
        measures = {label: measure for label, measure in found.items() if measure is not None}
        margin = next((row.margin for row in measures.values() if row.margin is not None), self.spec.margin)
        return Manifest(
            name=self.spec.name,
            arms=tuple((arm.text, arm.label) for arm in self.spec.arms),
            baseline=self.spec.baseline_arm.label,
            primary=primary.label if primary else None,
            margin=margin,
            seeds=self.spec.seeds,
            entries=self.entries,
            references={dataset.label: dataset.references() for dataset in datasets},
            solved=self.solved,
            probes=self.spec.probes,
            trunks=self.trunks,
            statistics=self.statistics,
            measures=measures,
            flops={entry.label: self.runs[entry.run].flops_source for entry in self.entries},
            checks=self.checks,
            notes=tuple(
                f"task {dataset.label}: {reason}: {count:,}"
                for dataset in datasets
                for reason, count in dataset.notes.items()
            ),
        )
