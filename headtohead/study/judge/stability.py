"""Stability and sample efficiency of a study's arms: divergence, loss spikes, tokens to a target loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from headtohead.common.errors import UnreadableFile
from headtohead.common.memory import gc_paused
from headtohead.common.schema import Plain
from headtohead.evaluation.logged_row import LoggedRow
from headtohead.evaluation.stability import final_loss, gradient_tail, spikes, tokens_to_target
from headtohead.study.judge.statistics import ALPHA, compare_paired
from headtohead.study.store.manifest import Contest, Manifest
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import Store


@dataclass(frozen=True)
class Stability(Plain):
    """One arm in one contest; None if a number is undefined."""

    label: str
    contest: str
    runs: int
    """Runs with a result: done or diverged."""
    diverged: int
    diverged_low: float | None
    """Exact 95 % interval of the share of runs that diverge."""
    diverged_high: float | None
    spikes: float | None
    """Mean per run."""
    gradient_tail: float | None
    """Median over runs."""
    pairs: int
    """Seeds with a curve of this arm and of the baseline."""
    reached: int
    """Number of these that reached the baseline's final loss."""
    tokens_ratio: float | None
    """Tokens to the baseline's final loss divided by the baseline's own; None unless every pair reached it."""
    tokens_ratio_low: float | None
    tokens_ratio_high: float | None
    rate_rise: float | None = None
    """Bits per byte on valid lost at the worse neighbor of the tuned learning rate; None without tuning."""


@gc_paused()
def contest_stability(
    store: Store, manifest: Manifest, contest: Contest, results: Mapping[str, RunResult]
) -> list[Stability]:
    """Return one row per arm of a contest, including the baseline."""
    curves_of = {label: _Curves() for _, label in manifest.arms}
    seeds = dict.fromkeys(seed for _, label in manifest.arms for seed in manifest.runs(contest, label))
    # Seed by seed: the rows of a whole contest may not fit in memory.
    for seed in seeds:
        curves = {}
        for label in curves_of:
            run = manifest.runs(contest, label).get(seed, "")
            if run in results and results[run].status in ("done", "diverged"):
                with suppress(UnreadableFile):  # the page names it
                    curves[label] = store.run(run).curve(results[run])
        target = _target(curves.get(manifest.baseline, []))
        for label, rows in curves.items():
            if rows:
                curves_of[label].add(rows, target)
    found = []
    for label, curve in curves_of.items():
        status = [results[run].status for run in manifest.runs(contest, label).values() if run in results]
        diverged = status.count("diverged")
        count = diverged + status.count("done")
        low, high = share_interval(diverged, count)
        spiked = statistics.fmean(curve.spikes) if curve.spikes else None
        tail = statistics.median(curve.tails) if curve.tails else None
        numbers = (spiked, tail, curve.pairs, len(curve.ours), *curve.ratio())
        rise = rate_rise(manifest, contest, label)
        found.append(Stability(label, contest.title, count, diverged, low, high, *numbers, rise))
    return found


def _target(baseline: list[LoggedRow]) -> tuple[float, float] | None:
    """Return the final loss of a run of the baseline and its tokens to it, or None if the run has too few rows."""
    loss = final_loss(baseline)
    tokens = None if loss is None else tokens_to_target(baseline, loss)
    return None if loss is None or tokens is None else (loss, tokens)


@dataclass
class _Curves:
    """Statistics of the training curves of one arm's runs."""

    spikes: list[int] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    pairs: int = 0
    ours: list[float] = field(default_factory=list)
    """Log of the tokens to the baseline's final loss, for each pair that reached it."""
    theirs: list[float] = field(default_factory=list)

    def add(self, rows: list[LoggedRow], target: tuple[float, float] | None) -> None:
        """Add one run and its pair with the baseline's run, given by that run's final loss and tokens to it."""
        self.spikes.append(spikes(rows))
        if (tail := gradient_tail(rows)) is not None:
            self.tails.append(tail)
        if target is None:
            return
        loss, own = target
        self.pairs += 1
        if (needed := tokens_to_target(rows, loss)) is not None:
            self.ours.append(math.log(needed))
            self.theirs.append(math.log(own))

    def ratio(self) -> tuple[float | None, float | None, float | None]:
        """Return the ratio of tokens with its paired interval, if every pair reached the target.

        Ratios are compared as logarithms: half the tokens and twice the tokens are equally far from 1.
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
    """Return the score difference between an arm's chosen rate and its worse neighbor on the grid, over the tuning's seeds.

    A neighbor that did not train has no score and is skipped.
    """
    tried = sorted(
        (rate for rate in manifest.rates(contest) if rate.label == label), key=lambda rate: rate.lr
    )
    chosen = next((index for index, row in enumerate(tried) if row.chosen), None)
    if chosen is None or (best := tried[chosen].score) is None:
        return None
    near = [tried[index].score for index in (chosen - 1, chosen + 1) if 0 <= index < len(tried)]
    return max((abs(score - best) for score in near if score is not None), default=None)


def share_interval(count: int, total: int) -> tuple[float | None, float | None]:
    """Return the exact (Clopper-Pearson) 95 % interval of a proportion, or (None, None) if `total` is 0."""
    if not total:
        return None, None
    from scipy import special

    low = float(special.betaincinv(count, total - count + 1, ALPHA / 2)) if count else 0.0
    high = float(special.betaincinv(count + 1, total - count, 1 - ALPHA / 2)) if count < total else 1.0
    return low, high
