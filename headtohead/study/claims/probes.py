"""Criteria about numbers measured by probes on trained runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from headtohead.study.claims.criteria import Criterion
from headtohead.study.claims.evidence import Evidence
from headtohead.study.claims.outcome import Compared, Part, decided, equivalence, signed_difference
from headtohead.study.judge.statistics import Paired, compare_paired, holm
from headtohead.study.probes import PROBES, number_at
from headtohead.study.store.manifest import Contest


def probed(evidence: Evidence, criterion: Criterion, contests: Sequence[Contest]) -> Part:
    """Judge a number measured by a probe, over paired seeds; ratios are compared as logarithms."""
    contest = contests[0]
    losses = evidence.compare(contest, criterion.arm, criterion.against)
    paired, p = _pairs(evidence, criterion, contest), _adjusted(evidence, criterion, contest)
    trouble = "" if losses.trouble.endswith("no interval") else losses.trouble
    if not trouble and paired.n < 2:
        few = f"was taken on {paired.n} paired seeds, which give no interval"
        trouble = f"probe {criterion.probe} {few if paired.n else 'was not taken'}"
    if not trouble and criterion.guard is not None:
        trouble = _guarded(evidence, criterion, contest, *criterion.guard)
    decision = decided(paired, p, losses.remark)
    label = (evidence.label(criterion.arm) or "") if criterion.compare == "value" else losses.label
    unit = f"{'log ratio of ' if criterion.compare == 'ratio' else ''}{criterion.path} ({criterion.probe})"
    compared = Compared(label, paired, p, decision, trouble, losses.remark, unit)
    if criterion.compare == "ratio":
        effect, least, most = criterion.effect, criterion.at_least, criterion.at_most
        criterion = replace(
            criterion,
            effect=None if effect is None else (math.log(effect[0]), math.log(effect[1])),
            at_least=None if least is None else math.log(least),
            at_most=None if most is None else math.log(most),
        )
    if criterion.expect in ("lower", "higher"):
        return signed_difference(criterion, compared)
    # A probe's number is neither good nor bad; `equivalence` uses the terms of a loss.
    side = {"no higher": "no worse", "no lower": "no better"}.get(criterion.expect, "")
    return equivalence(replace(criterion, expect=side), compared)


def _guarded(evidence: Evidence, criterion: Criterion, contest: Contest, path: str, least: float) -> str:
    """Return why the baseline does not allow a comparison, or an empty string."""
    own = replace(criterion, path=path, compare="value")
    values = list(_values(evidence, contest, evidence.manifest.baseline, own).values())
    mean = sum(values) / len(values) if values else None
    if mean is not None and mean >= least:
        return ""
    shown = "unknown" if mean is None else f"{mean:.3g}"
    return f"{path} of {evidence.manifest.baseline} is {shown}; a comparison needs {least:g} or more"


def _pairs(evidence: Evidence, criterion: Criterion, contest: Contest) -> Paired:
    ours, theirs = (
        _values(evidence, contest, evidence.label(arm) or "", criterion)
        for arm in (criterion.arm, criterion.against)
    )
    if criterion.compare == "value":
        theirs = dict.fromkeys(ours, 0.0)
    seeds = [seed for seed in evidence.manifest.seeds if seed in ours and seed in theirs]
    return compare_paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def _values(evidence: Evidence, contest: Contest, label: str, criterion: Criterion) -> dict[int, float]:
    name, values = _name(evidence, criterion), {}
    for seed, run in evidence.manifest.runs(contest, label).items():
        value = number_at(evidence.found(run, name), criterion.path)
        if value is not None and (criterion.compare != "ratio" or value > 0):
            values[seed] = math.log(value) if criterion.compare == "ratio" else value
    return values


def _name(evidence: Evidence, criterion: Criterion) -> str:
    """Return the study's probe that a criterion refers to; the measured amount may differ."""
    short = criterion.probe.partition(":")[0]
    same = [name for name in evidence.manifest.probes if name.partition(":")[0] == short]
    return same[0] if same and criterion.probe not in same and PROBES[short].amount else criterion.probe


def _adjusted(evidence: Evidence, criterion: Criterion, contest: Contest) -> float | None:
    """Return the p value of a probe's number, Holm-adjusted over all probe criteria of the claims in a contest."""
    criteria = [
        part
        for part in evidence.criteria
        if part.kind == "probe"
        and evidence.contest(part.place) == contest
        and all(evidence.label(arm) is not None for arm in part.arms)
    ]
    found = holm([_pairs(evidence, part, contest).p for part in criteria])
    return next((p for part, p in zip(criteria, found, strict=True) if part is criterion), None)
