"""Criteria about the toy: the order of its runs over paired seeds, and agreement with tables and theory."""

from __future__ import annotations

from itertools import pairwise

from headtohead.papers.faster_qk.findings import COMPLETE, THEORY
from headtohead.papers.faster_qk.work import Toy
from headtohead.study.claims.criteria import Criterion
from headtohead.study.claims.outcome import (
    CONTRADICTED,
    NOT_RUN,
    OPEN,
    PUBLISHED,
    REDUCED,
    SMOKE,
    SUPPORTED,
    Part,
    all_of,
)
from headtohead.study.judge.statistics import compare_paired

_NAMES = {"alpha": "alpha", "qk": "norm of QK", "ov": "norm of OV"}


def toy_order(criterion: Criterion, toy: Toy, smoke: bool) -> Part:
    """Judge whether a quantity increases from each run to the next: the paired 95 % interval is above the margin."""
    done = {result.run.name for result in toy.results}
    missing = [name for name in criterion.order if name not in done]
    if missing:
        return Part(
            OPEN, None, NOT_RUN, f"toy run {missing[0]} is not part of this scale or not finished", []
        )
    directions, reasons, measured = [], [], []
    for bound in criterion.losses:
        values = [_values(toy, name, bound, criterion.quantity) for name in criterion.order]
        pairs = zip(pairwise(criterion.order), pairwise(values), criterion.margins, strict=True)
        for (low, high), (below, above), margin in pairs:
            seeds = sorted(below.keys() & above.keys())
            paired = compare_paired([above[seed] for seed in seeds], [below[seed] for seed in seeds])
            what = f"{_NAMES[criterion.quantity]} of {high} - {low} at loss {bound:g}"
            measured.append(
                {
                    "what": what,
                    "n": paired.n,
                    "difference": paired.difference,
                    "ci_low": paired.ci_low,
                    "ci_high": paired.ci_high,
                    "margin": margin,
                }
            )
            if paired.difference is None or paired.ci_low is None or paired.ci_high is None:
                directions.append(OPEN)
                reasons.append(f"{what}: {paired.n} paired seeds give no interval")
                continue
            beyond, short = paired.ci_low > margin, paired.ci_high < margin
            directions.append(SUPPORTED if beyond else CONTRADICTED if short else OPEN)
            numbers = (
                f"{paired.difference:+.3g} ({paired.ci_low:+.3g} to {paired.ci_high:+.3g}, n {paired.n})"
            )
            reasons.append(f"{what}: {numbers}" + (f", required more than {margin:g}" if margin else ""))
    if not any(row["n"] for row in measured):
        return Part(OPEN, None, NOT_RUN, "; ".join(reasons), measured)
    if smoke:
        return Part(OPEN, None, REDUCED, SMOKE, measured)
    return Part(all_of(directions), None, PUBLISHED, "; ".join(reasons), measured)


def _values(toy: Toy, name: str, bound: float, quantity: str) -> dict[int, float]:
    """Return a quantity by seed, for the runs of that name that reached the loss."""
    event = f"loss {bound:g}"
    return {
        result.run.seed: getattr(result.marks[event], quantity)
        for result in toy.results
        if result.run.name == name and event in result.marks
    }


def toy_checks(criterion: Criterion, toy: Toy, smoke: bool) -> Part:
    """Judge whether every number of the given checks is within tolerance; theory is decided at every scale."""
    rows = [finding for finding in toy.findings if finding.check in criterion.checks]
    measured = [finding.as_dict() for finding in rows]
    if not rows:
        return Part(OPEN, None, NOT_RUN, f"{', '.join(criterion.checks)}: not part of this scale", measured)
    wrong = [finding.words() for finding in rows if not finding.holds]
    if smoke and not set(criterion.checks) <= THEORY:
        return Part(OPEN, None, REDUCED, SMOKE, measured)
    if wrong:
        return Part(CONTRADICTED, None, PUBLISHED, "; ".join(wrong), measured)
    for check in criterion.checks:
        count = sum(finding.check == check for finding in rows)
        if count < COMPLETE[check]:
            reason = f"{check}: {count} of {COMPLETE[check]} numbers are available, all within tolerance"
            return Part(OPEN, None, REDUCED, reason, measured)
    reason = f"{', '.join(criterion.checks)}: all {len(rows)} numbers within their tolerances"
    return Part(SUPPORTED, None, PUBLISHED, reason, measured)
