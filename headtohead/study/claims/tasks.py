"""Criteria about the mean of a study's tasks: the mean of their metrics per seed."""

from __future__ import annotations

from collections.abc import Sequence

from headtohead.study.claims.criteria import Criterion
from headtohead.study.claims.evidence import Evidence
from headtohead.study.claims.outcome import Compared, Part, difference
from headtohead.study.judge.statistics import Paired, compare_paired, decide, holm
from headtohead.study.store.manifest import Contest

KIND = "tasks"


def of_tasks(evidence: Evidence, criterion: Criterion, contests: Sequence[Contest]) -> Part:
    """Judge the mean over all tasks of the study; each has its own metric, and higher is better."""
    names = (criterion.arm, criterion.against)
    paired, p = _paired(evidence, *names), _adjusted(evidence, *names)
    trouble = _trouble(evidence, names)
    if not trouble and paired.n < 2:
        trouble = f"{paired.n} paired seeds give no interval"
    metrics = {evidence.manifest.measure(contest).name for contest in evidence.contests}
    decision = decide(paired.difference, p, None, None, 0.0, "higher")
    labels = [evidence.label(name) or "" for name in names]
    what = f"{labels[0]} - {labels[1]}, mean of {len(evidence.contests)} tasks"
    unit = metrics.pop() if len(metrics) == 1 else "score"
    return difference(criterion, Compared(what, paired, p, decision, trouble, "", unit, "higher"))


def _means(evidence: Evidence, arm: str) -> dict[int, float]:
    """Return the mean over tasks by seed; seeds without all tasks are left out."""
    label = evidence.label(arm) or ""
    parts = [evidence.values.get((contest, label), {}) for contest in evidence.contests]
    return {
        seed: sum(part[seed] for part in parts) / len(parts)
        for seed in evidence.manifest.seeds
        if parts and all(seed in part for part in parts)
    }


def _paired(evidence: Evidence, arm: str, against: str) -> Paired:
    ours, theirs = _means(evidence, arm), _means(evidence, against)
    seeds = [seed for seed in evidence.manifest.seeds if seed in ours and seed in theirs]
    return compare_paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def _adjusted(evidence: Evidence, arm: str, against: str) -> float | None:
    """Return the p value of a comparison, Holm-adjusted over all `tasks` criteria of the claims about this study."""
    pairs = list(
        dict.fromkeys(
            (part.arm, part.against)
            for part in evidence.criteria
            if part.kind == KIND and all(evidence.label(name) is not None for name in part.arms)
        )
    )
    p = holm([_paired(evidence, *pair).p for pair in pairs])
    return p[pairs.index((arm, against))]


def _trouble(evidence: Evidence, names: Sequence[str]) -> str:
    """Return why a comparison cannot be used, or an empty string; a missing task would change the mean."""
    labels = {evidence.label(name) for name in names}
    rows = [row for (_, label), row in evidence.rows.items() if label in labels]
    for state in ("missing", "failed", "diverged"):
        if count := sum(getattr(row, state) for row in rows):
            return f"{count} runs {'are not finished' if state == 'missing' else state}"
    return ""
