"""Everything that is computed from a study's results, each part once: the page, the shell and the claims share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from headtohead.common.errors import DamagedFile, UnreadableFile
from headtohead.evaluation.logged_row import LoggedRow
from headtohead.study.judge.explanations import ArmExplanation, study_explanations
from headtohead.study.judge.stability import Stability, contest_stability
from headtohead.study.judge.transfer_matrix import Cell, corpus_matrix, read_probes
from headtohead.study.judge.trends import Trend, axis_values, study_trends
from headtohead.study.judge.verdict import Verdict
from headtohead.study.probes import Found
from headtohead.study.store.manifest import Contest, Manifest
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import Store


@dataclass(frozen=True)
class Analysis:
    """A study with the results it has so far."""

    manifest: Manifest
    verdicts: Sequence[Verdict]
    results: Mapping[str, RunResult] = field(default_factory=dict)
    """By run id."""
    store: Store | None = None
    """None: its runs have no files, as those of a table."""

    @cached_property
    def axes(self) -> dict[tuple[str, Contest], float]:
        """The position of each contest on each axis of a trend."""
        return axis_values(self.manifest, self.results)

    @cached_property
    def trends(self) -> list[Trend]:
        """How each arm's gap changes with size, tokens per parameter and context, if the study has several."""
        return study_trends(self.manifest, self.axes, self.verdicts)

    @cached_property
    def matrix(self) -> list[Cell]:
        """The scores of arms trained on one corpus and tested on another, if the probe `corpora` was taken."""
        if self.store is None:
            return []
        return corpus_matrix(
            self.manifest, self.results, read_probes(self.store, self.manifest, self.results)
        )

    @cached_property
    def stability(self) -> dict[Contest, list[Stability]]:
        """Divergence, loss spikes and sample efficiency of each arm by contest, from the training curves."""
        if self.store is None:
            return {}
        return {
            contest: contest_stability(self.store, self.manifest, contest, self.results)
            for contest in self.manifest.contests()
        }

    @cached_property
    def explanations(self) -> list[ArmExplanation]:
        """Where each arm attends on its task, over seeds, if the probe `explain` was taken."""
        return [] if self.store is None else study_explanations(self.store, self.manifest, self.results)

    def probe(self, run: str, name: str) -> Found | None:
        """Return a run's probe result; a damaged file gives None, and the page names it."""
        try:
            return None if self.store is None else self.store.run(run).probe(name)
        except DamagedFile:
            return None

    def curve(self, run: str) -> list[LoggedRow]:
        """Return the logged rows of a run with a result; none if the file is missing or damaged."""
        if self.store is None or run not in self.results:
            return []
        try:
            return self.store.run(run).curve(self.results[run])
        except UnreadableFile:
            return []
