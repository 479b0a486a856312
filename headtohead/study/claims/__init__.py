"""Judge published claims by a study: supported, contradicted or open, for direction and effect size separately.

Direction: Holm-adjusted p < 0.05 in the published direction supports a claim, in the opposite direction contradicts it;
anything else is open. The p values of changes, interactions, trends, medians and spreads are not adjusted.

Size: a 95 % interval that excludes the published effect contradicts it. An interval that contains it and is between zero
and twice the effect supports it. A wider interval leaves it open. A criterion with bounds instead of an effect is
supported by an interval inside the bounds and contradicted by one outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headtohead.common.errors import UserError, first_line
from headtohead.common.schema import Plain
from headtohead.papers.faster_qk.work import Toy
from headtohead.study.claims.criteria import MAIN, At, Basis, Criterion, RunCriterion
from headtohead.study.claims.evidence import Evidence
from headtohead.study.claims.outcome import (
    CONTRADICTED,
    NOT_RUN,
    NOT_TESTED,
    OPEN,
    PUBLISHED,
    REDUCED,
    Part,
    all_of,
)
from headtohead.study.claims.paper import TOY, Claim, Paper
from headtohead.study.config.spec import build_study
from headtohead.study.judge.analysis import Analysis

# What malformed results can raise. Such a criterion stays open, and all others are still judged.
_MALFORMED = (UserError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class ClaimResult(Plain):
    """The result of judging one claim; fields with a default are missing in older files."""

    id: str
    statement: str
    published: str
    measured: list[dict[str, Any]]
    direction: str
    size: str
    scale: str
    reason: str
    run: str = ""
    """The scale that was run: smoke, tiny, small or paper."""
    criteria: list[dict[str, Any]] = field(default_factory=list)
    """The outcome of each criterion. `criterion` in a row of `measured` is an index of this list."""
    marks: list[str] = field(default_factory=list)
    """The marks of the verdicts that it is judged by: what was changed after results existed, for example."""


def judge_claims(
    paper: Paper,
    scale: str,
    studies: Mapping[str, Analysis],
    *,
    toy: Toy | None = None,
    absent: Mapping[str, str] | None = None,
) -> list[ClaimResult]:
    """Return the result of each claim from the studies of a scale, by name, and the paper's toy if it has one.

    Criteria about a study that is not given stay open; `absent` gives the reason by study.
    """
    settings = paper.studies(scale)
    criteria = [part for claim in paper.claims for part in claim.criteria if isinstance(part, RunCriterion)]
    evidence = {}
    parts = [*settings, *([TOY] if scale in paper.toy and toy is None else [])]
    missing = {name: "has not been run" for name in parts if name not in studies} | dict(absent or {})
    for name, study in studies.items():
        about = [part for part in criteria if part.study == name]
        try:
            evidence[name] = Evidence(about, build_study(settings[name]), study)
        except _MALFORMED as error:
            missing[name] = _cannot(error)
    basis = Basis(scale, build_study(settings[MAIN]).baseline_arm.text, evidence, missing, toy)
    return [_judge_all(claim, basis) for claim in paper.claims]


def _judge(criterion: Criterion, basis: Basis, at: At) -> Part:
    try:
        return criterion.judge(basis, at)
    except _MALFORMED as error:
        return Part(OPEN, None, NOT_RUN, f"a {criterion.kind} criterion {_cannot(error)}")


def _cannot(error: Exception) -> str:
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"cannot be judged: {kind}{first_line(error)}"


def _judge_all(claim: Claim, basis: Basis) -> ClaimResult:
    every = [_judge(criterion, basis, claim.at) for criterion in claim.criteria]
    parts, shown = (
        [part for criterion, part in zip(claim.criteria, every, strict=True) if criterion.decides == decides]
        for decides in (True, False)
    )
    scales = {part.scale for part in parts}
    scale = next(one for one in (REDUCED, PUBLISHED, NOT_RUN, NOT_TESTED) if one in scales)
    sizes = [part.size for part in parts if part.size is not None]
    reasons = [part.reason for part in parts]
    reasons += [f"shown, not judged: {part.reason}" for part in shown]
    if not sizes and scale not in (NOT_RUN, NOT_TESTED):
        reasons.append("no effect size was published")
    marks = list(dict.fromkeys(mark for part in (*parts, *shown) for mark in part.marks))
    reasons += [f"marked: {mark}" for mark in marks]
    return ClaimResult(
        claim.id,
        claim.statement,
        claim.published,
        [row for index, part in enumerate(every) for row in _rows(index, claim.criteria[index], part)],
        all_of([part.direction for part in parts]),
        all_of(sizes),
        scale,
        "; ".join(dict.fromkeys(reasons)),
        basis.scale,
        [_outcome(*pair) for pair in zip(claim.criteria, every, strict=True)],
        marks,
    )


def _rows(index: int, criterion: Criterion, part: Part) -> list[dict[str, Any]]:
    """Return what a criterion measured, with its index and the direction of each row; rows that are only shown say so."""
    # Of several comparisons one contradicts a criterion; whatever leaves it open leaves all of them open.
    own = part.direction == CONTRADICTED
    directions = [row.get("direction", part.direction) if own else part.direction for row in part.measured]
    mark = {} if criterion.decides else {"decides": False}
    return [
        row | {"criterion": index, "direction": direction} | mark
        for row, direction in zip(part.measured, directions, strict=True)
    ]


def _outcome(criterion: Criterion, part: Part) -> dict[str, Any]:
    """Return the outcome of a criterion without its rows, JSON-ready."""
    fields = ("direction", "size", "scale", "differs", "reason")
    mark = {} if criterion.decides else {"decides": False}
    return {"kind": criterion.kind} | {name: getattr(part, name) for name in fields} | mark


__all__ = ["ClaimResult", "judge_claims"]
