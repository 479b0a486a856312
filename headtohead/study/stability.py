"""Stability and sample efficiency of a study's arms: how often they diverge and leap, how soon they learn."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from headtohead.measure.stability import final_loss, gradient_tail, spikes, tokens_to_target
from headtohead.study.outline import Contest, Outline
from headtohead.study.statistics import ALPHA, compare_paired
from headtohead.study.store import Store

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


def study_stability(store: Store, outline: Outline, results: dict[str, Row]) -> list[Stability]:
    """Return one row per contest and arm, the baseline first in its own right."""
    return [
        row for contest in outline.contests() for row in contest_stability(store, outline, contest, results)
    ]


def contest_stability(
    store: Store, outline: Outline, contest: Contest, results: dict[str, Row]
) -> list[Stability]:
    """Return one row per arm of a contest."""
    curves = {
        label: {
            seed: rows
            for seed, run in outline.runs(contest, label).items()
            if results.get(run, {}).get("status") in ("done", "diverged")
            and (rows := store.run(run).metrics())
        }
        for _, label in outline.arms
    }
    found = []
    for _, label in outline.arms:
        status = [results.get(run, {}).get("status") for run in outline.runs(contest, label).values()]
        diverged = status.count("diverged")
        count = diverged + status.count("done")
        low, high = share_interval(diverged, count)
        mine = curves[label].values()
        tails = [tail for rows in mine if (tail := gradient_tail(rows)) is not None]
        found.append(
            Stability(
                label,
                contest.title,
                count,
                diverged,
                low,
                high,
                statistics.fmean(spikes(rows) for rows in mine) if mine else None,
                statistics.median(tails) if tails else None,
                *_efficiency(curves[label], curves[outline.baseline]),
                rate_rise(outline, contest, label),
            )
        )
    return found


def rate_rise(outline: Outline, contest: Contest, label: str) -> float | None:
    """Return what the worse neighbour of an arm's chosen rate scores above it: one seed, one step of the grid.

    A neighbour that did not train has no score and is passed over.
    """
    place = (contest.corpus, contest.size, contest.shape)
    tried = sorted(
        (row for row in outline.tuning if row.label == label and (row.corpus, row.size, row.shape) == place),
        key=lambda row: row.lr,
    )
    at = next((index for index, row in enumerate(tried) if row.chosen), None)
    if at is None or (best := tried[at].bits_per_byte) is None:
        return None
    near = [tried[index].bits_per_byte for index in (at - 1, at + 1) if 0 <= index < len(tried)]
    return max((score - best for score in near if score is not None), default=None)


def _efficiency(
    arm: dict[int, list[Row]], baseline: dict[int, list[Row]]
) -> tuple[int, int, float | None, float | None, float | None]:
    """Return pairs, pairs that reached the target, and the ratio of tokens with its paired interval.

    Ratios are compared as logarithms: half the tokens and twice the tokens are equally far from none.
    """
    ours, theirs, pairs = [], [], 0
    for seed in arm.keys() & baseline.keys():
        target = final_loss(baseline[seed])
        own = None if target is None else tokens_to_target(baseline[seed], target)
        if target is None or own is None:
            continue
        pairs += 1
        if (needed := tokens_to_target(arm[seed], target)) is not None:
            ours.append(math.log(needed))
            theirs.append(math.log(own))
    if not pairs or len(ours) < pairs:
        return pairs, len(ours), None, None, None
    found = compare_paired(ours, theirs)
    ratio, low, high = (
        None if value is None else math.exp(value)
        for value in (found.difference, found.ci_low, found.ci_high)
    )
    return pairs, len(ours), ratio, low, high


def share_interval(count: int, total: int) -> tuple[float | None, float | None]:
    """Return the exact 95 % interval (Clopper and Pearson's) of a share; nothing where there is no case."""
    if not total:
        return None, None
    from scipy import special

    low = float(special.betaincinv(count, total - count + 1, ALPHA / 2)) if count else 0.0
    high = float(special.betaincinv(count + 1, total - count, 1 - ALPHA / 2)) if count < total else 1.0
    return low, high
