"""The kinds of criteria about the toy: the order of its runs over paired seeds, and agreement with tables and theory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

from headtohead.common.errors import UserError
from headtohead.common.text import counted
from headtohead.papers.faster_qk.findings import CHECKS, COMPLETE, OWN, THEORY
from headtohead.papers.faster_qk.runs import LOSSES, PUBLISHED_RUNS, RUNS, SEEDS
from headtohead.papers.faster_qk.work import Toy
from headtohead.study.claims.criteria import At, Basis, Criterion, Numbers, Texts
from headtohead.study.claims.outcome import (
    CONTRADICTED,
    NOT_RUN,
    NOT_TESTED,
    OPEN,
    PUBLISHED,
    REDUCED,
    SMOKE,
    SUPPORTED,
    Part,
    all_of,
    interval_row,
)
from headtohead.study.config.validation import as_choice
from headtohead.study.judge.statistics import compare_by_seed


@dataclass(frozen=True, kw_only=True)
class ToyCriterion(Criterion):
    """A criterion about the toy."""

    def judge(self, basis: Basis, at: At) -> Part:
        """Return the outcome from the toy's results."""
        if basis.toy is None:
            if "toy" not in basis.absent:
                return Part(OPEN, None, NOT_TESTED, f"the toy is not part of scale {basis.scale}")
            return Part(OPEN, None, NOT_RUN, f"the toy {basis.absent['toy']}")
        return self.outcome(basis.toy, basis.scale == "smoke")

    def outcome(self, toy: Toy, smoke: bool) -> Part:
        """Return the outcome; `smoke` decides nothing that depends on training."""
        raise NotImplementedError


def _scaled(direction: str, reason: str, measured: list[dict[str, Any]], notes: list[str]) -> Part:
    """Return the outcome at published scale, or at reduced scale with the differences from the published settings."""
    if not notes:
        return Part(direction, None, PUBLISHED, reason, measured)
    differs = "; ".join(notes)
    return Part(direction, None, REDUCED, f"{reason} ({differs})", measured, differs)


def _without(toy: Toy, what: str) -> Part:
    """Return the outcome of a criterion whose numbers are missing: the toy is not finished, or its scale has none."""
    if toy.left:
        return Part(OPEN, None, NOT_RUN, f"{what}: the toy has {counted(toy.left, 'unfinished run')}")
    return Part(OPEN, None, NOT_TESTED, f"{what}: not part of this scale")


def _few_seeds(count: int) -> list[str]:
    return [f"{count} of the {len(SEEDS)} published seeds"] if count < len(SEEDS) else []


@dataclass(frozen=True, kw_only=True)
class ToyOrder(ToyCriterion, kind="toy"):
    """A quantity of the toy's runs increases from each to the next by more than a margin, at each given loss."""

    quantity: Literal["alpha", "qk", "ov"]
    order: Texts
    losses: Numbers
    margins: Numbers = (0.0,)
    _NAMES: ClassVar[dict[str, str]] = {"alpha": "alpha", "qk": "norm of QK", "ov": "norm of OV"}

    def __post_init__(self) -> None:
        for name in self.order:
            as_choice(name, "toy run", tuple(RUNS))
        for bound in self.losses:
            as_choice(bound, "loss of the toy", LOSSES)
        if len(self.margins) == 1:
            object.__setattr__(self, "margins", self.margins * (len(self.order) - 1))
        if len(self.order) < 2 or len(self.margins) != len(self.order) - 1:
            raise UserError(
                f"order takes two or more runs and a margin between each two, got {len(self.order)} runs, "
                f"{len(self.margins)} margins"
            )

    def outcome(self, toy: Toy, smoke: bool) -> Part:
        """Judge whether every paired 95 % interval is above its margin."""
        done = {result.run.name for result in toy.results}
        for name in self.order:
            if name not in done:
                return _without(toy, f"toy run {name}")
        directions, reasons, measured = [], [], []
        for bound in self.losses:
            values = [self._values(toy, name, bound) for name in self.order]
            pairs = zip(pairwise(self.order), pairwise(values), self.margins, strict=True)
            for (low, high), (below, above), margin in pairs:
                paired = compare_by_seed(above, below)
                what = f"{self._NAMES[self.quantity]} of {high} - {low} at loss {bound:g}"
                if paired.difference is None or paired.ci_low is None or paired.ci_high is None:
                    directions.append(OPEN)
                    measured.append(interval_row(what, paired, margin=margin, direction=OPEN))
                    reasons.append(f"{what}: {paired.n} paired seeds give no interval")
                    continue
                beyond, short = paired.ci_low > margin, paired.ci_high < margin
                directions.append(SUPPORTED if beyond else CONTRADICTED if short else OPEN)
                measured.append(interval_row(what, paired, margin=margin, direction=directions[-1]))
                interval = f"{paired.ci_low:+.3g} to {paired.ci_high:+.3g}"
                required = f", required more than {margin:g}" if margin else ""
                reasons.append(f"{what}: {paired.difference:+.3g} ({interval}, n {paired.n}){required}")
        if not any(row["n"] for row in measured):
            return Part(OPEN, None, NOT_RUN, "; ".join(reasons), measured)
        if smoke:
            return Part(OPEN, None, REDUCED, SMOKE, measured)
        own = [name for name in self.order if name not in PUBLISHED_RUNS]
        notes = [f"not published: {', '.join(own)}"] if own else []
        if any(result.run.brief for result in toy.results if result.run.name in self.order):
            notes.append("runs end before the published end")
        return _scaled(
            all_of(directions),
            "; ".join(reasons),
            measured,
            notes + _few_seeds(min(row["n"] for row in measured)),
        )

    def _values(self, toy: Toy, name: str, bound: float) -> dict[int, float]:
        """Return the quantity by seed, for the runs of that name that reached the loss."""
        event = f"loss {bound:g}"
        return {
            result.run.seed: getattr(result.marks[event], self.quantity)
            for result in toy.results
            if result.run.name == name and event in result.marks
        }


@dataclass(frozen=True, kw_only=True)
class ToyCheck(ToyCriterion, kind="toy_check"):
    """Tables and theory of the toy are reproduced."""

    checks: Texts

    def __post_init__(self) -> None:
        for name in self.checks:
            as_choice(name, "check", CHECKS)

    def outcome(self, toy: Toy, smoke: bool) -> Part:
        """Judge whether every number is within tolerance; theory is decided at every scale."""
        rows = [finding for finding in toy.findings if finding.check in self.checks]
        measured = [finding.as_dict() for finding in rows]
        names = ", ".join(self.checks)
        if not rows:
            return _without(toy, names)
        wrong = [finding.words() for finding in rows if not finding.holds]
        if smoke and not set(self.checks) <= THEORY:
            return Part(OPEN, None, REDUCED, SMOKE, measured)
        notes = [f"not published: {name}" for name in self.checks if name in OWN]
        if not set(self.checks) <= THEORY:
            notes += _few_seeds(len({result.run.seed for result in toy.results}))
        if wrong:
            return _scaled(CONTRADICTED, "; ".join(wrong), measured, notes)
        for check in self.checks:
            count = sum(finding.check == check for finding in rows)
            if count < COMPLETE[check]:
                reason = f"{check}: {count} of {COMPLETE[check]} numbers are available, all within tolerance"
                return Part(OPEN, None, REDUCED, reason, measured)
        reason = f"{names}: all {len(rows)} numbers within their tolerances"
        return _scaled(SUPPORTED, reason, measured, notes)
