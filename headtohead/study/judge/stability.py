"""Stability and sample efficiency of a study's arms: how often they diverge and leap, how soon they learn."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from headtohead.evaluation.stability import final_loss, gradient_tail, spikes, tokens_to_target
from headtohead.study.judge.statistics import ALPHA, compare_paired
from headtohead.study.store.manifest import Contest, Manifest
from headtohead.study.store.run_store import Store

Row = dict[str, Any]


@dataclass(frozen=True)
class Stability:
    """One arm in one contest; None where a number is not defined."""

    label: str
    contest: str
    runs: int
    """With a result: done or diverged."""
    diverged: int
    diverged_low: float | None
    """The exact 95 % interval of the share that diverges."""
    diverged_high: float | None
    spikes: float | None
    """Mean per run."""
    gradient_tail: float | None
    """Median over runs."""
    pairs: int
    """Seeds with a curve of this arm and of the baseline."""
    reached: int
    """Of these, how many fell to the baseline's final loss."""
    tokens_ratio: float | None
    """Tokens to the baseline's final loss over the baseline's own; None unless every pair reached it."""
    tokens_ratio_low: float | None
    tokens_ratio_high: float | None
    rate_rise: float | None = None
    """Bits per byte on valid that the worse neighbour of its tuned learning rate costs; None where none was tuned."""

    def as_dict(self) -> dict[str, Any]:
        """Return the row, JSON-ready."""
        return asdict(self)


def study_stability(store: Store, manifest: Manifest, results: dict[str, Row]) -> list[Stability]:
    """Return one row per contest and arm, the baseline first in its own right."""
    return [
        row for contest in manifest.contests() for row in contest_stability(store, manifest, contest, results)
    ]


def contest_stability(
    store: Store, manifest: Manifest, contest: Contest, results: dict[str, Row]
) -> list[Stability]:
    """Return one row per arm of a contest."""
    looks = {label: _Look() for _, label in manifest.arms}
    seeds = dict.fromkeys(seed for _, label in manifest.arms for seed in manifest.runs(contest, label))
    # Seed by seed: the rows of a whole contest would not fit where a study is large.
    for seed in seeds:
        curves = {}
        for label in looks:
            run = manifest.runs(contest, label).get(seed, "")
            if results.get(run, {}).get("status") in ("done", "diverged"):
                curves[label] = store.run(run).metrics()
        for label, rows in curves.items():
            if rows:
                looks[label].take(rows, curves.get(manifest.baseline, []))
    found = []
    for label, look in looks.items():
        status = [results.get(run, {}).get("status") for run in manifest.runs(contest, label).values()]
        diverged = status.count("diverged")
        count = diverged + status.count("done")
        low, high = share_interval(diverged, count)
        found.append(
            Stability(
                label,
                contest.title,
                count,
                diverged,
                low,
                high,
                statistics.fmean(look.spikes) if look.spikes else None,
                statistics.median(look.tails) if look.tails else None,
                look.pairs,
                len(look.ours),
                *look.ratio(),
                rate_rise(manifest, contest, label),
            )
        )
    return found


@dataclass
class _Look:
    """What the curves of one arm's runs come to."""

    spikes: list[int] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    pairs: int = 0
    ours: list[float] = field(default_factory=list)
    """Log of the tokens to the baseline's final loss, of each pair that reached it."""
    theirs: list[float] = field(default_factory=list)

    def take(self, rows: list[Row], baseline: list[Row]) -> None:
        """Count one run, and its pair with the baseline's."""
        self.spikes.append(spikes(rows))
        if (tail := gradient_tail(rows)) is not None:
            self.tails.append(tail)
        target = final_loss(baseline)
        own = None if target is None else tokens_to_target(baseline, target)
        if target is None or own is None:
            return
        self.pairs += 1
        if (needed := tokens_to_target(rows, target)) is not None:
            self.ours.append(math.log(needed))
            self.theirs.append(math.log(own))

    def ratio(self) -> tuple[float | None, float | None, float | None]:
        """Return the ratio of tokens with its paired interval, where every pair reached the target.

        Ratios are compared as logarithms: half the tokens and twice the tokens are equally far from none.
        """
        if not self.pairs or len(self.ours) < self.pairs:
            return None, None, None
        found = compare_paired(self.ours, self.theirs)
        ratio, low, high = (
            None if value is None else math.exp(value)
            for value in (found.difference, found.ci_low, found.ci_high)
        )
        return ratio, low, high


def rate_rise(manifest: Manifest, contest: Contest, label: str) -> float | None:
    """Return what the worse neighbour of an arm's chosen rate scores above it: one seed, one step of the grid.

    A neighbour that did not train has no score and is passed over.
    """
    place = (contest.corpus, contest.size, contest.shape)
    tried = sorted(
        (row for row in manifest.tuning if row.label == label and (row.corpus, row.size, row.shape) == place),
        key=lambda row: row.lr,
    )
    at = next((index for index, row in enumerate(tried) if row.chosen), None)
    if at is None or (best := tried[at].score) is None:
        return None
    near = [tried[index].score for index in (at - 1, at + 1) if 0 <= index < len(tried)]
    return max((abs(score - best) for score in near if score is not None), default=None)


def share_interval(count: int, total: int) -> tuple[float | None, float | None]:
    """Return the exact 95 % interval (Clopper and Pearson's) of a share; nothing where there is no case."""
    if not total:
        return None, None
    from scipy import special

    low = float(special.betaincinv(count, total - count + 1, ALPHA / 2)) if count else 0.0
    high = float(special.betaincinv(count + 1, total - count, 1 - ALPHA / 2)) if count < total else 1.0
    return low, high
