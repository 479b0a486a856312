"""What a paper's study of tasks says: the mean share of wrong answers over its tasks, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from headtohead.study.claims.parts import NOT_RUN, OPEN, SMOKE, Compared, Part, difference
from headtohead.study.outline import Outline
from headtohead.study.published import Criterion, Paper
from headtohead.study.statistics import Paired, compare_paired, decide, holm
from headtohead.study.verdict import Verdict

KIND = "tasks"
UNIT = "share_wrong"


@dataclass(frozen=True)
class TaskStudy:
    """A finished study of tasks; one minus the metric is compared, of which lower is better as for a loss."""

    outline: Outline
    verdicts: Sequence[Verdict]

    def label(self, arm: str) -> str | None:
        """Return the label of an arm, the baseline's where none is named, or None where the study has no such arm."""
        if not arm:
            return self.outline.baseline
        return next((label for text, label in self.outline.arms if arm in (text, label)), None)

    @cached_property
    def errors(self) -> dict[str, dict[int, float]]:
        """By arm and seed the mean over tasks; seeds that lack a task are left out."""
        contests = self.outline.contests()
        found: dict[str, list[dict[int, float]]] = {label: [] for _, label in self.outline.arms}
        for contest in contests:
            rows = [row for row in self.verdicts if row.of(contest)]
            if rows:
                # Every verdict of a contest holds the baseline's finished seeds that it shares.
                base = rows[0]
                found[self.outline.baseline].append(
                    dict(zip(base.seeds, (1 - value for value in base.baseline_values), strict=True))
                )
            for row in rows:
                found[row.label].append(
                    dict(zip(row.seeds, (1 - value for value in row.values), strict=True))
                )
        return {
            label: {
                seed: sum(part[seed] for part in parts) / len(parts)
                for seed in self.outline.seeds
                if len(parts) == len(contests) and all(seed in part for part in parts)
            }
            for label, parts in found.items()
        }

    def paired(self, arm: str, against: str) -> Paired:
        """Return one arm's errors against another's, over the seeds both have."""
        ours, theirs = (self.errors.get(self.label(name) or "", {}) for name in (arm, against))
        seeds = [seed for seed in self.outline.seeds if seed in ours and seed in theirs]
        return compare_paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])

    def adjusted(self, paper: Paper, arm: str, against: str) -> float | None:
        """Return the p value of a comparison, Holm-adjusted over all that the paper's claims make of its tasks."""
        pairs = list(
            dict.fromkeys(
                (part.arm, part.against)
                for claim in paper.claims
                for part in claim.criteria
                if part.kind == KIND
            )
        )
        p = holm([self.paired(*pair).p for pair in pairs])
        return p[pairs.index((arm, against))]

    def trouble(self, arm: str, against: str) -> str:
        """Say why a comparison cannot be used, or nothing."""
        rows = [row for row in self.verdicts if row.label in (self.label(arm), self.label(against))]
        for word in ("missing", "failed", "diverged"):
            if count := sum(getattr(row, word) for row in rows):
                return f"{count} runs {'are not finished' if word == 'missing' else word}"
        count = self.paired(arm, against).n
        return f"{count} paired seeds give no interval" if count < 2 else ""


def of_tasks(tasks: TaskStudy | None, paper: Paper, criterion: Criterion, scale: str) -> Part:
    """Judge the mean share of wrong answers over the tasks."""
    names = (criterion.arm, criterion.against)
    if tasks is None:
        return Part(OPEN, None, NOT_RUN, f"the study of tasks is not part of scale {scale}")
    labels = [tasks.label(name) for name in names]
    if None in labels:
        return Part(OPEN, None, NOT_RUN, f"arm {names[labels.index(None)]} is not part of scale {scale}")
    paired, p = tasks.paired(*names), tasks.adjusted(paper, *names)
    decision = decide(paired.difference, p, None, None, 0.0)
    what = f"{labels[0]} - {labels[1]}, mean of {len(tasks.outline.contests())} tasks"
    part = difference(criterion, Compared(what, paired, p, decision, tasks.trouble(*names), "", UNIT))
    if not paired.n:
        part.scale = NOT_RUN
    elif scale == "smoke":
        part.direction, part.size, part.reason = OPEN, OPEN, SMOKE
    return part
