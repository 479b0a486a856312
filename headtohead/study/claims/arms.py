"""Criteria about trained arms: differences, orders, changes, trends, medians, spreads; and costs by formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headtohead.evaluation.cost import arm_cost
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import find_size
from headtohead.study.claims.criteria import Criterion
from headtohead.study.claims.evidence import Evidence
from headtohead.study.claims.outcome import (
    CONTRADICTED,
    OPEN,
    PUBLISHED,
    REDUCED,
    SUPPORTED,
    Compared,
    Part,
    decided,
    difference,
    equivalence,
    joined,
    signed_difference,
)
from headtohead.study.judge.statistics import (
    ALPHA,
    MEDIAN_SEEDS,
    compare_medians,
    compare_paired,
    decide,
)
from headtohead.study.judge.trends import MIN_POINTS, OVER, trend_of
from headtohead.study.store.manifest import Contest, metric_label

Contests = Sequence[Contest]
# Fewer seeds are too few for a spread: with five, a true variance ratio of 8 is detected in 58 % of studies.
_SPREAD_SEEDS = 5


def better_or_worse(evidence: Evidence, criterion: Criterion, contests: Contests) -> Part:
    """Judge whether an arm is better or worse than another."""
    return difference(criterion, _compared(evidence, criterion, contests[0]))


def as_good(evidence: Evidence, criterion: Criterion, contests: Contests) -> Part:
    """Judge whether two arms differ by less than a margin."""
    return equivalence(criterion, _compared(evidence, criterion, contests[0]))


def _compared(evidence: Evidence, criterion: Criterion, contest: Contest) -> Compared:
    compare = evidence.compare_best if criterion.step == "best" else evidence.compare
    return compare(contest, criterion.arm, criterion.against)


def order(evidence: Evidence, criterion: Criterion, contests: Contests) -> Part:
    """Judge whether one arm is better than each of some others."""
    parts = [
        difference(
            Criterion("difference", expect="better"), evidence.compare(contests[0], criterion.first, other)
        )
        for other in criterion.then
    ]
    return joined(parts)


def change(evidence: Evidence, criterion: Criterion, contests: Contests) -> Part:
    """Judge the difference in the second contest minus the difference in the first, over paired seeds."""
    names = (criterion.arm, criterion.against)
    form = f"({{0}}) at {criterion.values[1]} minus at {criterion.values[0]}"
    return _second_minus_first(evidence, criterion, [(contest, *names) for contest in contests[:2]], form)


def interaction(evidence: Evidence, criterion: Criterion, contests: Contests) -> Part:
    """Judge the difference of two arms minus (a share of) the difference of two others, over paired seeds."""
    control = (contests[0], criterion.control, criterion.control_against)
    share = "" if criterion.share == 1 else f"{criterion.share:g} of "
    places = (control, (contests[0], criterion.arm, criterion.against))
    return _second_minus_first(evidence, criterion, places, f"({{1}}) minus {share}({{0}})")


def _second_minus_first(
    evidence: Evidence, criterion: Criterion, places: Sequence[tuple[Contest, str, str]], form: str
) -> Part:
    gaps = [evidence.gaps(*place) for place in places]
    seeds = [seed for seed in evidence.manifest.seeds if seed in gaps[0] and seed in gaps[1]]
    first = [criterion.share * gaps[0][seed] for seed in seeds]
    paired = compare_paired([gaps[1][seed] for seed in seeds], first)
    pair = [evidence.compare(*place) for place in places]
    trouble = next((found.trouble for found in pair if found.trouble), "")
    remark = _diverged(pair)
    label = form.format(*(found.label for found in pair))
    decision = decided(paired, paired.p, remark)
    unit = evidence.manifest.measure(places[0][0]).name
    return signed_difference(criterion, Compared(label, paired, paired.p, decision, trouble, remark, unit))


def _diverged(found: Sequence[Compared]) -> str:
    return ", ".join(dict.fromkeys(one.remark for one in found if "diverged" in one.remark))


def median(evidence: Evidence, criterion: Criterion, contests: Contests) -> Part:
    """Judge the difference of medians by a permutation test within seeds; it has no interval and therefore no size."""
    contest = contests[0]
    a, b = evidence.label(criterion.arm) or "", evidence.label(criterion.against) or ""
    ours, theirs = evidence.values.get((contest, a), {}), evidence.values.get((contest, b), {})
    seeds = [seed for seed in evidence.manifest.seeds if seed in ours and seed in theirs]
    what = f"median of {a} - median of {b}"
    row: dict[str, Any] = {"what": what, "n": len(seeds), "difference": None, "p": None}
    compared = evidence.compare(contest, criterion.arm, criterion.against)
    if compared.trouble:
        return Part(OPEN, None, REDUCED, f"{what}: {compared.trouble}", [row])
    shift, p = compare_medians([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    row |= {"difference": shift, "p": p}
    if p is None:
        reason = f"{what}: {shift:+.4f}; a median needs {MEDIAN_SEEDS} paired seeds, got {len(seeds)}"
        return Part(OPEN, None, REDUCED, reason, [row])
    decision = decide(shift, p, None, None, 0.0, compared.better)
    if compared.remark:
        decision = "undecided"
    direction = {criterion.expect: SUPPORTED, "undecided": OPEN}.get(decision, CONTRADICTED)
    unit = metric_label(compared.unit)
    reason = f"{what}: {shift:+.4f} {unit}, p {p:.2g} by swapping arms within seeds: {decision}"
    return Part(direction, None, REDUCED, reason, [row])


def trend(evidence: Evidence, criterion: Criterion, contests: Contests) -> Part:
    """Judge the slope of the difference per doubling, over contests that differ only on one axis."""
    what, names = OVER[criterion.over].words, (criterion.arm, criterion.against)
    gaps = {
        contest: evidence.gaps(contest, *names)
        for contest in contests
        if (criterion.over, contest) in evidence.axes
    }
    labels = [evidence.label(name) or "" for name in names]
    line = trend_of(labels[0], labels[1], criterion.over, gaps, evidence.axes).line
    found = [evidence.compare(contest, *names) for contest in contests]
    trouble = next((one.trouble for one in found if one.trouble), "")
    if line is None:
        trouble = trouble or f"a trend needs {MIN_POINTS} or more values of {what}, got {len(contests)}"
    paired = compare_paired([], []) if line is None else line.slope
    remark = _diverged(found)
    decision = decided(paired, paired.p, remark)
    label = f"slope of {found[0].label} per doubling of {what}"
    unit = evidence.manifest.measure(contests[0]).name
    compared = Compared(label, paired, paired.p, decision, trouble, remark, unit)
    if criterion.expect in ("level", "no higher"):
        side = {"level": "", "no higher": "no worse"}[criterion.expect]
        return equivalence(replace(criterion, expect=side), compared)
    return signed_difference(criterion, compared)


def spread(evidence: Evidence, criterion: Criterion, contests: Contests) -> Part:
    """Judge whether the arm has the larger variance over seeds (Brown-Forsythe test); the ratio has no interval."""
    contest = contests[0]
    compared = evidence.compare(contest, criterion.arm, criterion.against)
    a, b = evidence.label(criterion.arm) or "", evidence.label(criterion.against) or ""
    ours, theirs = (list(evidence.values.get((contest, label), {}).values()) for label in (a, b))
    row = {
        "what": f"variance of {a} over {b}",
        "n": min(len(ours), len(theirs)),
        "ratio": None,
        "p": None,
    }
    if compared.trouble or min(len(ours), len(theirs)) < _SPREAD_SEEDS:
        reason = compared.trouble or f"a spread needs {_SPREAD_SEEDS} or more seeds, got {row['n']}"
        return Part(OPEN, OPEN, REDUCED, reason, [row])
    import numpy as np
    from scipy import stats

    below = float(np.var(theirs, ddof=1))
    ratio = float(np.var(ours, ddof=1)) / below if below > 0 else None
    p = float(stats.levene(ours, theirs, center="median").pvalue)
    row |= {"ratio": ratio, "p": p}
    direction = OPEN
    if ratio is not None and p < ALPHA:
        direction = SUPPORTED if ratio > 1 else CONTRADICTED
    shown = "undefined" if ratio is None else f"{ratio:.3g}"
    reason = f"variance of {a} over {b}: ratio {shown}, p {p:.2g}; no interval of the ratio is computed"
    return Part(direction, OPEN, REDUCED, reason, [row])


def cost(baseline: str, criterion: Criterion) -> Part:
    """Judge a ratio of parameters, cache or FLOPs by formula; needs no training."""
    size = find_size(criterion.place["size"][0])
    found = []
    for arm in (criterion.arm, criterion.against or baseline):
        facts = arm_cost(size, parse_layout(arm).layers(size.layers))
        table = {
            "parameters": facts["parameters"],
            "cache": facts["cache_bytes_per_token"],
            "flops": facts["flops_per_token"]["causal"],
        }
        found.append(table[criterion.quantity])
    what = f"{criterion.quantity} of {criterion.arm} over {criterion.against or baseline}"
    if not all(found):
        return Part(OPEN, OPEN, PUBLISHED, f"{what}: not defined at {size.name}")
    ratio = found[0] / found[1]
    size_word = SUPPORTED if abs(ratio - criterion.ratio) <= criterion.tolerance else CONTRADICTED
    if criterion.ratio == 1:
        direction = size_word
    else:
        direction = SUPPORTED if (ratio - 1) * (criterion.ratio - 1) > 0 else CONTRADICTED
    row = {"what": what, "size": size.name, "values": found, "ratio": ratio, "published": criterion.ratio}
    reason = f"{what} at {size.name}: {ratio:.5g} by formula, {criterion.ratio:.5g} published"
    return Part(direction, size_word, PUBLISHED, reason, [row])
