"""Judge published claims by a study: supported, contradicted or open, for direction and effect size separately.

Direction: Holm-adjusted p < 0.05 in the published direction supports a claim, in the opposite direction contradicts it;
anything else is open. The p values of changes, interactions, trends, medians and spreads are not adjusted.

Size: a 95 % interval that excludes the published effect contradicts it. An interval that contains it and is between zero
and twice the effect supports it. A wider interval leaves it open. A criterion with bounds instead of an effect is
supported by an interval inside the bounds and contradicted by one outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headtohead.papers.faster_qk.work import Toy
from headtohead.study.claims import arms
from headtohead.study.claims.criteria import MAIN, Criterion
from headtohead.study.claims.evidence import Evidence, Finished
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
from headtohead.study.claims.paper import Claim, Paper
from headtohead.study.claims.probes import probed
from headtohead.study.claims.tasks import of_tasks
from headtohead.study.claims.toy import toy_checks, toy_order
from headtohead.study.config.spec import build_study
from headtohead.study.store.manifest import Contest

_TRAINED: dict[str, Callable[[Evidence, Criterion, Sequence[Contest]], Part]] = {
    "difference": arms.better_or_worse,
    "equivalence": arms.as_good,
    "order": arms.order,
    "change": arms.change,
    "interaction": arms.interaction,
    "trend": arms.trend,
    "median": arms.median,
    "spread": arms.spread,
    "probe": probed,
    "tasks": of_tasks,
}
"""The function that judges each kind of criterion about trained runs, from its contests."""


@dataclass(frozen=True)
class ClaimResult:
    """The result of judging one claim."""

    id: str
    statement: str
    published: str
    measured: list[dict[str, Any]]
    direction: str
    size: str
    scale: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the result, JSON-ready."""
        return asdict(self)


def judge_claims(
    paper: Paper,
    scale: str,
    studies: Mapping[str, Finished],
    *,
    toy: Toy | None = None,
    absent: Mapping[str, str] | None = None,
) -> list[ClaimResult]:
    """Return the result of each claim from the studies of a scale, by name, and the paper's toy if it has one.

    Criteria about a study that is not given stay open; `absent` gives the reason by study.
    """
    settings = paper.studies(scale)
    basis = _Evidence(
        scale,
        build_study(settings[MAIN]).baseline_arm.text,
        {name: Evidence(paper, name, build_study(settings[name]), study) for name, study in studies.items()},
        dict.fromkeys(settings, "has not been run") | dict(absent or {}),
        toy,
    )
    return [_judge_all(claim, basis) for claim in paper.claims]


@dataclass(frozen=True)
class _Evidence:
    """Everything that claims are judged by."""

    scale: str
    baseline: str
    """The baseline arm of the main study, as text; costs are relative to it."""
    studies: Mapping[str, Evidence]
    absent: Mapping[str, str]
    """The reason why a study of this scale is missing."""
    toy: Toy | None


def _judge_all(claim: Claim, basis: _Evidence) -> ClaimResult:
    parts = [_part(basis, criterion, claim) for criterion in claim.criteria]
    scales = {part.scale for part in parts}
    scale = REDUCED if REDUCED in scales else PUBLISHED if PUBLISHED in scales else NOT_RUN
    sizes = [part.size for part in parts if part.size is not None]
    reasons = [part.reason for part in parts]
    if not sizes and scale != NOT_RUN:
        reasons.append("no effect size was published")
    return ClaimResult(
        claim.id,
        claim.statement,
        claim.published,
        [row for part in parts for row in part.measured],
        all_of([part.direction for part in parts]),
        all_of(sizes),
        scale,
        "; ".join(dict.fromkeys(reasons)),
    )


def _part(basis: _Evidence, criterion: Criterion, claim: Claim) -> Part:
    """Return the result of one criterion."""
    scale = basis.scale
    if criterion.kind == "open":
        return Part(OPEN, None, NOT_RUN, criterion.reason)
    if criterion.kind == "cost":
        return arms.cost(basis.baseline, criterion)
    if criterion.kind in ("toy", "toy_check"):
        if basis.toy is None:
            return Part(OPEN, None, NOT_RUN, f"the toy is not part of scale {scale}")
        judge = toy_order if criterion.kind == "toy" else toy_checks
        return judge(criterion, basis.toy, scale == "smoke")
    if criterion.study not in basis.studies:
        why = basis.absent.get(criterion.study, f"is not part of scale {scale}")
        return Part(OPEN, None, NOT_RUN, f"study {criterion.study} {why}")
    evidence = basis.studies[criterion.study]
    missing = [arm for arm in criterion.arms if evidence.label(arm) is None]
    if missing:
        return Part(OPEN, None, NOT_RUN, f"arm {missing[0]} is not part of scale {scale}")
    places = [criterion.place | {criterion.over: (value,)} for value in criterion.values] or [criterion.place]
    contests = [evidence.contest(place) for place in places]
    known = [contest for contest in contests if contest is not None]
    if len(known) < len(places):
        lost = places[contests.index(None)]
        missing_place = (
            ", ".join(f"{key} {' or '.join(value)}" for key, value in lost.items()) or "no contest"
        )
        return Part(OPEN, None, NOT_RUN, f"{missing_place} is not part of scale {scale}")
    if criterion.kind == "trend":
        known = evidence.group(criterion.over, known[0])
    part = _TRAINED[criterion.kind](evidence, criterion, known)
    if not any(row["n"] for row in part.measured):
        part.scale = NOT_RUN
        return part
    differs = evidence.other_scale(claim, known, criterion)
    part.scale = REDUCED if differs else PUBLISHED
    if {part.direction, part.size} & {SUPPORTED, CONTRADICTED} and (
        untrained := _untrained_in(evidence, criterion, known)
    ):
        part.direction, part.size = OPEN, None if part.size is None else OPEN
        part.reason += f"; {untrained}"
    if scale == "smoke":
        part.direction, part.size, part.reason = OPEN, OPEN, SMOKE
    elif differs:
        part.reason += f" ({differs})"
    return part


def _untrained_in(evidence: Evidence, criterion: Criterion, contests: Sequence[Contest]) -> str:
    """Return a message if all compared arms are untrained, else an empty string; a mean of tasks needs one learned task."""
    alone = criterion.against or criterion.then or criterion.compare == "value"
    arms = criterion.arms if alone else (*criterion.arms, "")
    places = evidence.contests if criterion.kind == "tasks" else contests
    found = [evidence.unlearnt(place, arms) for place in places]
    return max(found) if criterion.kind != "tasks" or all(found) else ""


__all__ = ["ClaimResult", "Finished", "judge_claims"]
