"""A plan and its runs: every number resolved, each run named by the hash of its identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from headtohead.common.files import canonical_json, digest
from headtohead.evaluation.corpus_stats import Statistics
from headtohead.evaluation.cost import FORMULAS
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.sizes import Size
from headtohead.study.config.spec import Arm, StudySpec
from headtohead.study.numerics import NUMERICS
from headtohead.study.plan.branches import Parent
from headtohead.study.plan.dataset import Dataset
from headtohead.study.plan.init_from import Start
from headtohead.study.store.manifest import Check, Contest, Entry, Manifest, Measure, Solved
from headtohead.training.settings import TrainSettings

# Hundreds of runs share a size, a layout and training settings: each is converted once.


@cache
def _plain_size(size: Size) -> dict[str, Any]:
    return size.as_dict()


@cache
def _plain_training(training: TrainSettings) -> dict[str, Any]:
    return training.as_dict()


@cache
def _plain_layers(layers: tuple[Composed, ...]) -> list[Any]:
    return [composed.as_dict() for composed in layers]


@dataclass(frozen=True)
class Run:
    """One arm, seed, corpus or task, size, shape rule and length rule, with every number resolved."""

    arm: Arm
    layers: tuple[Composed, ...]
    contest: Contest
    size: Size
    training: TrainSettings
    seed: int
    corpus: dict[str, str]
    parameters: int
    flops: float
    """Forward FLOPs per token, counting attended keys; costs shared by a batch are divided by its sequences."""
    cache: int | None
    """Cache bytes per token in bf16, or None if a layer has no cache."""
    parent: Parent | None = None
    """The run and step that a branch starts from."""
    branches: tuple[int, ...] = ()
    """The steps at which a trunk's branches start."""
    dataset: Dataset | None = field(default=None, repr=False, compare=False)
    """The dataset; None if only the run's id is needed."""
    start: Start | None = field(default=None, repr=False, compare=False)
    """The run whose weights it starts from."""
    stacked: bool = False
    """Whether it is a row of a population."""
    flops_source: str = "declared"
    """How `flops` were obtained: declared, or counted in at least one layer."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that can change the result, and nothing else.

        A companion is covered: its tokens by corpus, size and options, its noise by the seed.
        """
        return {
            "numerics": NUMERICS,
            "layers": _plain_layers(self.layers),
            "size": _plain_size(self.size),
            "corpus": self.corpus["content"],
            "training": _plain_training(self.training),
            "seed": self.seed,
            "stacked": self.stacked,
            **self._further,
        }

    @property
    def _further(self) -> dict[str, Any]:
        """Keys that only some runs have; omitting them keeps the ids of the other runs unchanged."""
        task = self.dataset.task if self.dataset else None
        return {
            **({"parent": vars(self.parent)} if self.parent else {}),
            **({"task": task} if task else {}),
            **({"start": self.start.run} if self.start else {}),
        }

    @cached_property
    def id(self) -> str:
        """The run's id: the hash of its identity."""
        return digest(canonical_json(self.identity))[:16]

    def record(self) -> dict[str, Any]:
        """Return the content of spec.json: the identity, and what is needed to build and display the run."""
        return {
            "id": self.id,
            "arm": self.arm.text,
            "label": self.arm.label,
            "layers": [composed.text for composed in self.layers],
            "corpus": self.corpus,
            "size": {"name": self.size.name} | _plain_size(self.size),
            "training": _plain_training(self.training),
            "seed": self.seed,
            "shape": self.contest.shape,
            "length": self.contest.length,
            "parameters": self.parameters,
            "flops_per_token": self.flops,
            "flops_source": self.flops_source,
            "cache_bytes_per_token": self.cache,
            "formulas": FORMULAS,
            "identity": self.identity,
            **self._further,
            **({"branches": list(self.branches)} if self.branches else {}),
            **({"steps": self.steps} if self.dataset and self.dataset.task else {}),
            **({"start_path": str(self.start.folder.path.resolve())} if self.start else {}),
        }

    @property
    def steps(self) -> int:
        """All steps, including those of the trunk before a branch."""
        return (
            self.dataset.steps(self.size, self.training)
            if self.dataset
            else self.training.steps(self.size.context)
        )

    @property
    def tokens(self) -> int:
        """The tokens of its own steps: for a branch, those of its decay."""
        own = self.steps - (self.parent.step if self.parent else 0)
        return self.dataset.trained(self.training, own) if self.dataset else own * self.training.batch


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


StepTimes = Callable[[list[Run], Dataset, str], list[StepTime]]
"""Maps runs, their dataset and the path (fused or plain) to the step time of each run."""


@dataclass(frozen=True)
class Plan:
    """All runs of a study, by contest."""

    spec: StudySpec
    runs: tuple[Run, ...]
    datasets: dict[str, Dataset]
    """Corpora or tasks, by name, tokenizer and, for tasks, context."""
    solved: tuple[Solved, ...] = ()
    """The numbers that the rules solved for each arm except the baseline."""
    trunks: tuple[Run, ...] = ()
    """The runs that branches start from; they are not part of any contest."""
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """Statistics of each corpus by label, if there are several corpora."""
    checks: tuple[Check, ...] = ()
    """Findings of the causality gate in arms with user code."""

    def manifest(self) -> Manifest:
        """Return the plan without models and data, as needed by verdicts and reports."""
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
            entries=tuple(Entry(run.id, run.arm.label, run.seed, run.contest) for run in self.runs),
            references={dataset.label: dataset.references() for dataset in datasets},
            solved=self.solved,
            probes=self.spec.probes,
            trunks=tuple(Entry(run.id, run.arm.label, run.seed, run.contest) for run in self.trunks),
            statistics=self.statistics,
            measures=measures,
            flops={run.arm.label: run.flops_source for run in self.runs},
            checks=self.checks,
            notes=tuple(
                f"task {dataset.label}: {reason}: {count:,}"
                for dataset in datasets
                for reason, count in dataset.notes.items()
            ),
        )

    def measure(self, contest: Contest) -> Measure:
        """Return the metric and margin of a contest."""
        labels = (dataset for dataset in self.datasets.values() if dataset.label == contest.corpus_label)
        return next(labels).measure(self.spec.given_margin) or Measure()

    def distinct(self) -> list[Run]:
        """Return each run once, ordered by seed so that a study stopped early is balanced, trunks before branches."""
        order = {seed: index for index, seed in enumerate(self.spec.seeds)}
        steps: dict[str, set[int]] = {}
        for run in self.trunks:
            steps.setdefault(run.id, set()).update(run.branches)
        trunks = [dataclasses.replace(run, branches=tuple(sorted(steps[run.id]))) for run in self.trunks]
        ordered = sorted([*trunks, *self.runs], key=lambda run: order[run.seed])
        return list({run.id: run for run in ordered}.values())


Rates = dict[tuple[str, str, str, str, str], float]
"""Tuned learning rates by corpus, size, context, shape rule and arm's label."""
