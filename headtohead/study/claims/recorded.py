"""Read claims.json: judged claims, and their measured effects beside the published ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from headtohead.common.errors import DamagedFile
from headtohead.common.files import read_json
from headtohead.common.numbers import is_number
from headtohead.study.claims import ClaimResult
from headtohead.study.claims.criteria import PLACE
from headtohead.study.store.manifest import METRIC, metric_label

CLAIMS = "claims.json"
"""The judged claims of a paper, in the directory of its main study."""
_LOG_RATIO = "log ratio of "


def read_claims(path: Path) -> list[ClaimResult]:
    """Return the claims in a claims.json, also of an older version."""
    try:
        return convert(read_json(path), list[ClaimResult])
    except ValidationError as error:
        raise DamagedFile(f"damaged file {path}: {error}; repeat h2h reproduce to rewrite it") from None


@dataclass(frozen=True)
class Effect:
    """A measured number of a claim with its 95 % interval, and the published one if there is one."""

    what: str
    unit: str
    """A metric, or the path of a probe's number; empty where `what` names the quantity."""
    value: float
    low: float | None
    high: float | None
    published: tuple[float, float] | None
    """As a range."""
    neutral: float
    """The value without an effect: 0 for differences, 1 for ratios."""
    place: Mapping[str, str]
    """The study and its contest, as far as they are recorded."""
    criterion: int | None
    """Index of its criterion among those of the claim; None in older files."""
    direction: str
    """Whether it supports the claim: supported, contradicted or open; empty in older files."""
    decides: bool
    """Whether it enters the outcome of the claim."""

    @property
    def reference(self) -> float | None:
        """The published effect, the middle of a range; None if none was published, or if its sign is not known."""
        if self.published is None:
            return None
        low, high = (end - self.neutral for end in self.published)
        return (low + high) / 2 if low * high > 0 else None

    def share(self, value: float) -> float:
        """Return a value as a share of the published effect: 0 is no effect, 1 is as published."""
        if self.reference is None:
            raise ValueError(f"{self.what}: no published effect with a sign")
        return (value - self.neutral) / self.reference

    def number(self, value: float) -> str:
        """Return a value as text, with the digits of its unit, or three digits of the largest number."""
        if self.neutral:
            return f"{value:.5g}"
        if self.unit == metric_label(METRIC):
            return f"{value:+.4f}"
        largest = max(abs(end) for end in (self.value, self.low, self.high) if end is not None)
        digits = max(0, 2 - math.floor(math.log10(largest))) if largest else 0
        return f"{value:+.{digits}f}"

    @property
    def measured(self) -> str:
        """The value with its interval and unit as text."""
        words = self.number(self.value)
        if self.low is not None and self.high is not None:
            words += f" ({self.number(self.low)} to {self.number(self.high)})"
        return f"{words} {self.unit}".strip()

    @property
    def stated(self) -> str:
        """The published value or range as text; empty if there is none."""
        ends = () if self.published is None else dict.fromkeys(self.published)
        return " to ".join(self.number(end) for end in ends)


def effects(claim: ClaimResult) -> list[Effect]:
    """Return the differences and ratios measured for a claim; rows without a number are left out."""
    return [effect for row in claim.measured if (effect := _effect(row)) is not None]


def _effect(row: Mapping[str, Any]) -> Effect | None:
    is_ratio = is_number(row.get("ratio"))
    value = row["ratio"] if is_ratio else row.get("difference")
    if not is_number(value):
        return None
    unit = str(row.get("unit", ""))
    numbers = [value, row.get("ci_low"), row.get("ci_high"), *_range(row.get("published"))]
    known = [float(number) if is_number(number) else None for number in numbers]
    if unit.startswith(_LOG_RATIO):  # stored as logarithms, shown as ratios
        known = [None if number is None else math.exp(number) for number in known]
        unit, is_ratio = unit.removeprefix("log "), True
    _, low, high, *published = known
    ends = [end for end in published if end is not None]
    index = row.get("criterion")
    return Effect(
        str(row.get("what", "")),
        metric_label(unit.partition(" (")[0]),
        known[0] or 0.0,
        low,
        high,
        (min(ends), max(ends)) if ends else None,
        1.0 if is_ratio else 0.0,
        {key: str(row[key]) for key in ("study", *PLACE) if row.get(key)},
        index if isinstance(index, int) else None,
        str(row.get("direction", "")),
        row.get("decides") is not False,
    )


def _range(published: Any) -> list[Any]:
    return published if isinstance(published, list) else [published]
