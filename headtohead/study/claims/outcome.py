"""Outcome of one criterion (supported, contradicted or open) from a comparison of two arms over paired seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headtohead.study.judge.statistics import ALPHA, Paired, decide
from headtohead.study.store.manifest import METRIC, metric_label

SUPPORTED, CONTRADICTED, OPEN = "supported", "contradicted", "open"
PUBLISHED, REDUCED, NOT_RUN = "published scale", "reduced scale", "not run"
NOT_TESTED = "not tested"
"""The scale has no such arm, size or study, or nothing could be tested: no run is missing."""
SMOKE = "scale smoke only tests that everything runs; it decides nothing"


@dataclass
class Part:
    """The outcome of one criterion; `size` is None if no effect size was published or requested."""

    direction: str
    size: str | None
    scale: str
    reason: str
    measured: list[dict[str, Any]] = field(default_factory=list)
    differs: str = ""
    """How the training differs from the published one, or empty."""
    marks: list[str] = field(default_factory=list)
    """The marks of the verdicts that it is judged by."""


@dataclass(frozen=True)
class Expected:
    """What a criterion expects of a difference: its direction, its size, or that it is within a margin."""

    expect: str = ""
    effect: tuple[float, float] | None = None
    """The published difference, as a range."""
    at_least: float | None = None
    at_most: float | None = None
    margin: float = 0.0

    @property
    def sized(self) -> bool:
        """Whether the size of the difference is judged."""
        return (self.effect, self.at_least, self.at_most) != (None, None, None)


@dataclass(frozen=True)
class Compared:
    """The comparison of two arms in one contest over the seeds that both have finished."""

    label: str
    paired: Paired
    p: float | None
    """Holm-adjusted, except for a change, an interaction or a trend."""
    decision: str
    """better, worse or undecided; equivalence is judged by the margin of each criterion."""
    trouble: str
    """Why the numbers cannot be used, or empty."""
    remark: str
    unit: str = METRIC
    better: str = "lower"
    """Whether a lower or a higher value is better."""


def decided(paired: Paired, p: float | None, remark: str) -> str:
    """Return better, worse or undecided for a number over several comparisons; diverged runs leave it undecided."""
    return "undecided" if "diverged" in remark else decide(paired.difference, p, None, None, 0.0)


def all_of(outcomes: Sequence[str]) -> str:
    """Return the joint outcome of several criteria: all must be supported, and one contradiction contradicts."""
    if CONTRADICTED in outcomes:
        return CONTRADICTED
    return SUPPORTED if outcomes and all(one == SUPPORTED for one in outcomes) else OPEN


def interval_row(what: str, paired: Paired, **others: Any) -> dict[str, Any]:
    """Return a row of `measured`: the name, the number of pairs, the difference with its interval, and others."""
    known = asdict(paired)
    return {"what": what, **{key: known[key] for key in ("n", "difference", "ci_low", "ci_high")}, **others}


def _row(expected: Expected, compared: Compared) -> dict[str, Any]:
    difference, effect = compared.paired.difference, expected.effect
    middle = None if effect is None else sum(effect) / 2
    row = interval_row(
        compared.label,
        compared.paired,
        p_holm=compared.p,
        published=None if effect is None else list(dict.fromkeys(effect)),
        share_of_published=difference / middle if middle and difference is not None else None,
    )
    return {"what": compared.label, "unit": compared.unit} | row


def _numbers(expected: Expected, compared: Compared) -> str:
    paired, text = compared.paired, compared.label
    if paired.difference is not None:
        text += f": {paired.difference:+.4f} {metric_label(compared.unit)}"
    if paired.ci_low is not None:
        text += f" ({paired.ci_low:+.4f} to {paired.ci_high:+.4f}, n {paired.n})"
    if expected.effect is not None:
        text += ", published " + " to ".join(f"{end:+.4f}" for end in dict.fromkeys(expected.effect))
    return text + (f", {compared.remark}" if compared.remark else "")


def difference(expected: Expected, compared: Compared) -> Part:
    """Judge arm - other: its direction, and its size against the published effect."""
    measured = [_row(expected, compared)]
    if compared.trouble:
        size = OPEN if expected.sized else None
        return Part(OPEN, size, REDUCED, f"{compared.label}: {compared.trouble}", measured)
    direction = {expected.expect: SUPPORTED, "undecided": OPEN}.get(compared.decision, CONTRADICTED)
    size = _size(expected, compared.paired) if expected.sized else None
    reason = f"{_numbers(expected, compared)}: {compared.decision}{_after_holm(compared)}"
    return Part(direction, size, REDUCED, reason, measured)


def _after_holm(compared: Compared) -> str:
    """Return the adjusted p value if the interval excludes 0 and the comparison is undecided for it."""
    paired, p = compared.paired, compared.p
    if paired.ci_low is None or paired.ci_high is None or p is None or p < ALPHA:
        return ""
    excluded = paired.ci_low > 0 or paired.ci_high < 0
    return f" (p {p:.2g} after Holm's correction)" if excluded and compared.decision == "undecided" else ""


def signed_difference(expected: Expected, compared: Compared) -> Part:
    """Judge a number that is expected to be lower or higher, rather than better or worse."""
    expect = {"lower": "better", "higher": "worse"}[expected.expect]
    part = difference(replace(expected, expect=expect), compared)
    part.reason = part.reason.replace(": better", ": lower").replace(": worse", ": higher")
    return part


def equivalence(expected: Expected, compared: Compared) -> Part:
    """Judge whether arm - other is within the margin.

    Supported if the 90 % interval is inside the margin, contradicted if the 95 % interval is outside.
    With expect `no better` or `no worse`, only one side of the margin counts.
    """
    measured = [_row(expected, compared)]
    if compared.trouble:
        return Part(OPEN, OPEN, REDUCED, f"{compared.label}: {compared.trouble}", measured)
    paired, margin, free = compared.paired, expected.margin, expected.expect
    low, high = paired.equivalence_low or 0.0, paired.equivalence_high or 0.0
    if compared.better == "higher":
        free = {"no better": "no worse", "no worse": "no better"}.get(free, free)
    inside = (free == "no worse" or -margin < low) and (free == "no better" or high < margin)
    outside = (free != "no better" and (paired.ci_low or 0.0) > margin) or (
        free != "no worse" and (paired.ci_high or 0.0) < -margin
    )
    direction = SUPPORTED if inside else CONTRADICTED if outside else OPEN
    if "diverged" in compared.remark and direction == SUPPORTED:
        direction = OPEN
    size = None
    if expected.effect is not None:
        held = _overlaps(paired, expected.effect)
        size = CONTRADICTED if not held else SUPPORTED if direction == SUPPORTED else OPEN
    return Part(direction, size, REDUCED, f"{_numbers(expected, compared)}, margin {margin:.4f}", measured)


def _size(expected: Expected, paired: Paired) -> str:
    low, high = paired.ci_low, paired.ci_high
    if low is None or high is None:
        return OPEN
    if expected.effect is not None:
        if not _overlaps(paired, expected.effect):
            return CONTRADICTED
        ends = [0.0, *(2 * end for end in expected.effect)]
        return SUPPORTED if min(ends) < low and high < max(ends) else OPEN
    least = float("-inf") if expected.at_least is None else expected.at_least
    most = float("inf") if expected.at_most is None else expected.at_most
    if low >= least and high <= most:
        return SUPPORTED
    return CONTRADICTED if high < least or low > most else OPEN


def _overlaps(paired: Paired, effect: tuple[float, float]) -> bool:
    low, high = paired.ci_low, paired.ci_high
    return low is None or high is None or (low <= effect[1] and high >= effect[0])
