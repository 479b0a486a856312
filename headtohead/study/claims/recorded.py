"""Read claims.json: judged claims, and their measured effects beside the published ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from headtohead.common.errors import DamagedFile
from headtohead.common.files import read_json
from headtohead.common.numbers import is_number
from headtohead.study.claims import ClaimResult
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
    """Empty for a ratio, and where `what` names the quantity."""
    value: float
    low: float | None
    high: float | None
    published: tuple[float, float] | None
    """As a range."""
    neutral: float
    """The value without an effect: 0 for differences, 1 for ratios."""
    place: Mapping[str, str]
    """Study, corpus and size, as far as they are recorded."""
    outcome: str
    """The direction of its criterion; empty in older files."""

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
        """Return a value as text, with the digits of its unit."""
        if self.neutral:
            return f"{value:.4g}"
        return f"{value:+.4f}" if self.unit == metric_label(METRIC) else f"{value:+.3g}"

    @property
    def measured(self) -> str:
        """The value with its unit and interval as text."""
        words = f"{self.number(self.value)} {self.unit}".strip()
        if self.low is None or self.high is None:
            return words
        return f"{words} ({self.number(self.low)} to {self.number(self.high)})"

    @property
    def stated(self) -> str:
        """The published value or range as text; empty if there is none."""
        ends = () if self.published is None else dict.fromkeys(self.published)
        return " to ".join(self.number(end) for end in ends)


def effects(claim: ClaimResult) -> list[Effect]:
    """Return the differences and ratios measured for a claim; rows without a number are left out."""
    found = (_effect(row, claim.criteria) for row in claim.measured)
    return [effect for effect in found if effect is not None]


def _effect(row: Mapping[str, Any], criteria: Sequence[Mapping[str, Any]]) -> Effect | None:
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
    outcome = criteria[index].get("direction", "") if isinstance(index, int) and index < len(criteria) else ""
    return Effect(
        str(row.get("what", "")),
        metric_label(unit),
        known[0] or 0.0,
        low,
        high,
        (min(ends), max(ends)) if ends else None,
        1.0 if is_ratio else 0.0,
        {key: str(row[key]) for key in ("study", "corpus", "size") if row.get(key)},
        str(outcome),
    )


def _range(published: Any) -> list[Any]:
    return published if isinstance(published, list) else [published]
