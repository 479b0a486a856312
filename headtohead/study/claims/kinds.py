"""The kinds of criteria about trained arms, and about costs by formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from headtohead.common.errors import UserError
from headtohead.evaluation.cost import arm_cost
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import find_size
from headtohead.study.claims.criteria import (
    At,
    Basis,
    BetterOrWorse,
    Choices,
    Criterion,
    Factor,
    LowerOrHigher,
    Margin,
    Number,
    PlacedCriterion,
    Range,
    RunCriterion,
    Text,
    Texts,
)
from headtohead.study.claims.evidence import Evidence
from headtohead.study.claims.outcome import (
    CONTRADICTED,
    NOT_TESTED,
    OPEN,
    PUBLISHED,
    REDUCED,
    SUPPORTED,
    Compared,
    Expected,
    Part,
    all_of,
    decided,
    difference,
    equivalence,
    signed_difference,
)
from headtohead.study.judge.statistics import (
    ALPHA,
    MEDIAN_SEEDS,
    Paired,
    compare_by_seed,
    compare_medians,
    decide,
    holm,
)
from headtohead.study.judge.trends import MIN_POINTS, OVER, trend_of
from headtohead.study.store.manifest import Contest, metric_label

Contests = Sequence[Contest]
# Fewer seeds are too few for a spread: with five, a true variance ratio of 8 is detected in 58 % of studies.
_SPREAD_SEEDS = 5


@dataclass(frozen=True, kw_only=True)
class ArmCriterion(RunCriterion):
    """A criterion about one arm and another."""

    arm: Text
    against: Text = ""
    """Empty: the baseline."""

    @property
    def opponents(self) -> list[tuple[str, str]]:
        """The arm and the other."""
        return [(self.arm, self.against)]


@dataclass(frozen=True, kw_only=True)
class PairCriterion(ArmCriterion, PlacedCriterion):
    """A criterion about the comparison of two arms in one contest."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The comparison with the other arm."""
        return [(self.arm, self.against)]


@dataclass(frozen=True, kw_only=True)
class SteppedCriterion(PairCriterion):
    """A criterion about the last step of runs, or about their best step on valid."""

    step: Literal["last", "best"] = "last"
    """Best: for tasks that are evaluated during training."""

    def check_study(self, of_tasks: bool) -> None:
        """Raise UserError for the best step of runs on corpora."""
        if self.step != "last" and not of_tasks:
            raise UserError(f"step applies to studies of tasks; study '{self.study}' has no tasks")

    def compared(self, evidence: Evidence, contest: Contest) -> Compared:
        """Return the comparison of the arms at its step."""
        compare = evidence.compare_best if self.step == "best" else evidence.compare
        return compare(contest, self.arm, self.against)


@dataclass(frozen=True, kw_only=True)
class Difference(SteppedCriterion, kind="difference"):
    """The arm is better or worse than another; effect, at_least and at_most are about the size of the difference."""

    expect: BetterOrWorse
    effect: Range = ()
    at_least: Number | None = None
    at_most: Number | None = None

    def outcome(self, evidence: Evidence, contests: Contests) -> Part:
        """Judge the difference."""
        return difference(self.expected, self.compared(evidence, contests[0]))


@dataclass(frozen=True, kw_only=True)
class Equivalence(SteppedCriterion, kind="equivalence"):
    """The arm differs from another by less than a margin; with expect, on one side of it."""

    margin: Margin
    expect: Literal["", "no better", "no worse"] = ""
    effect: Range = ()

    def outcome(self, evidence: Evidence, contests: Contests) -> Part:
        """Judge whether the difference is within the margin."""
        return equivalence(self.expected, self.compared(evidence, contests[0]))


@dataclass(frozen=True, kw_only=True)
class Order(PlacedCriterion, kind="order"):
    """The first arm is better than each of the others."""

    first: Text
    then: Texts

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The comparison of the first with each other."""
        return [(self.first, other) for other in self.then]

    @property
    def alone(self) -> bool:
        """Always: the baseline takes part only if it is named."""
        return True

    def outcome(self, evidence: Evidence, contests: Contests) -> Part:
        """Judge each comparison; all must be supported."""
        better = Expected("better")
        parts = [difference(better, evidence.compare(contests[0], *pair)) for pair in self.pairs]
        direction, reason = (
            all_of([part.direction for part in parts]),
            "; ".join(part.reason for part in parts),
        )
        rows = [row | {"direction": part.direction} for part in parts for row in part.measured]
        return Part(direction, None, REDUCED, reason, rows)


def _second_minus_first(
    criterion: RunCriterion,
    evidence: Evidence,
    places: Sequence[tuple[Contest, str, str]],
    form: str,
    share: float = 1.0,
) -> Part:
    """Judge the second difference minus a share of the first, over paired seeds."""
    first, second = (evidence.gaps(*place) for place in places)
    paired = compare_by_seed(second, {seed: share * gap for seed, gap in first.items()})
    pair = [evidence.compare(*place) for place in places]
    trouble, remark = next((found.trouble for found in pair if found.trouble), ""), _diverged(pair)
    label = form.format(*(found.label for found in pair))
    unit = evidence.manifest.measure(places[0][0]).name
    decision = decided(paired, paired.p, remark)
    compared = Compared(label, paired, paired.p, decision, trouble, remark, unit)
    return signed_difference(criterion.expected, compared)


def _diverged(found: Sequence[Compared]) -> str:
    return ", ".join(dict.fromkeys(one.remark for one in found if "diverged" in one.remark))


@dataclass(frozen=True, kw_only=True)
class Change(PairCriterion, kind="change"):
    """The difference changes between two values of `over`, given in `values`; of a list the study's first counts."""

    over: Literal["corpus", "size", "context", "branch", "shape", "length"]
    values: Choices
    expect: LowerOrHigher
    effect: Range = ()

    def __post_init__(self) -> None:
        if len(self.values) != 2:
            raise UserError(f"values takes two values of {self.over}, got {list(self.values)}")
        if common := set(self.values[0]) & set(self.values[1]):
            raise UserError(f"values takes two different values, both have {', '.join(sorted(common))}")

    @property
    def places(self) -> list[dict[str, tuple[str, ...]]]:
        """The places of the two values."""
        return [self.place | {self.over: names} for names in self.values]

    def outcome(self, evidence: Evidence, contests: Contests) -> Part:
        """Judge the difference in the second contest minus the difference in the first."""
        first, second = (getattr(contest, self.over) for contest in contests)
        form = f"({{0}}) at {second} minus at {first}"
        places = [(contest, self.arm, self.against) for contest in contests]
        return _second_minus_first(self, evidence, places, form)


@dataclass(frozen=True, kw_only=True)
class Interaction(PairCriterion, kind="interaction"):
    """The difference differs from that of another pair of arms, control - control_against, or from a share of that."""

    control: Text
    control_against: Text = ""
    """Empty: the baseline."""
    share: Factor = 1.0
    """Factor on the control's difference: 0.5 for half of a gain."""
    expect: LowerOrHigher
    effect: Range = ()

    @property
    def opponents(self) -> list[tuple[str, str]]:
        """The arms of both differences."""
        return [*self.pairs, (self.control, self.control_against)]

    def outcome(self, evidence: Evidence, contests: Contests) -> Part:
        """Judge the difference of two arms minus the share of the difference of the two others."""
        control = (contests[0], self.control, self.control_against)
        share = "" if self.share == 1 else f"{self.share:g} of "
        places = (control, (contests[0], self.arm, self.against))
        return _second_minus_first(self, evidence, places, f"({{1}}) minus {share}({{0}})", self.share)


@dataclass(frozen=True, kw_only=True)
class Trend(ArmCriterion, PlacedCriterion, kind="trend"):
    """The difference changes with size, tokens per parameter or context; numbers are per doubling."""

    over: Literal["size", "tokens_per_parameter", "context"]
    expect: Literal["lower", "higher", "level", "no higher"]
    effect: Range = ()
    margin: Margin | None = None
    _WITHIN: ClassVar[dict[str, str]] = {"level": "", "no higher": "no worse"}

    def __post_init__(self) -> None:
        if (self.expect in self._WITHIN) != (self.margin is not None):
            raise UserError(f"a trend takes a margin if and only if expect is {' or '.join(self._WITHIN)}")

    def judged_contests(self, evidence: Evidence, found: list[Contest]) -> list[Contest]:
        """Return the contests that differ from the found one only in `over`."""
        return evidence.group(self.over, found[0])

    def outcome(self, evidence: Evidence, contests: Contests) -> Part:
        """Judge the slope of the difference per doubling."""
        what, names = OVER[self.over].words, (self.arm, self.against)
        placed = [contest for contest in contests if (self.over, contest) in evidence.axes]
        gaps = {contest: evidence.gaps(contest, *names) for contest in placed}
        labels = [evidence.label(name) or "" for name in names]
        line = trend_of(labels[0], labels[1], self.over, gaps, evidence.axes).line
        found = [evidence.compare(contest, *names) for contest in contests]
        trouble = next((one.trouble for one in found if one.trouble), "")
        if line is None and not trouble:
            trouble = f"a trend needs {MIN_POINTS} or more values of {what}, got {len(contests)}"
        paired = compare_by_seed({}, {}) if line is None else line.slope
        remark = _diverged(found)
        unit = evidence.manifest.measure(contests[0]).name
        label = f"slope of {found[0].label} per doubling of {what}"
        decision = decided(paired, paired.p, remark)
        compared = Compared(label, paired, paired.p, decision, trouble, remark, unit)
        if self.expect in self._WITHIN:
            return equivalence(replace(self.expected, expect=self._WITHIN[self.expect]), compared)
        return signed_difference(self.expected, compared)


@dataclass(frozen=True, kw_only=True)
class Median(PairCriterion, kind="median"):
    """The arm's median over seeds is better or worse than another's."""

    expect: BetterOrWorse

    def outcome(self, evidence: Evidence, contests: Contests) -> Part:
        """Judge the difference of medians by a permutation test within seeds; it has no interval and no size."""
        a, b, ours, theirs = evidence.sides(contests[0], self.arm, self.against)
        seeds = [seed for seed in ours if seed in theirs]
        what = f"median of {a} - median of {b}"
        compared = evidence.compare(contests[0], self.arm, self.against)
        row: dict[str, Any] = {"what": what, "unit": compared.unit, "n": len(seeds)}
        row |= {"difference": None, "p": None}
        if compared.trouble:
            return Part(OPEN, None, REDUCED, f"{what}: {compared.trouble}", [row])
        shift, p = compare_medians([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
        row |= {"difference": shift, "p": p}
        if p is None:
            reason = f"{what}: {shift:+.4f}; a median needs {MEDIAN_SEEDS} paired seeds, got {len(seeds)}"
            return Part(OPEN, None, REDUCED, reason, [row])
        decision = "undecided" if compared.remark else decide(shift, p, None, None, 0.0, compared.better)
        direction = {self.expect: SUPPORTED, "undecided": OPEN}.get(decision, CONTRADICTED)
        unit = metric_label(compared.unit)
        reason = f"{what}: {shift:+.4f} {unit}, p {p:.2g} by swapping arms within seeds: {decision}"
        return Part(direction, None, REDUCED, reason, [row])


@dataclass(frozen=True, kw_only=True)
class Spread(PairCriterion, kind="spread"):
    """The arm has a larger variance over seeds than another."""

    def outcome(self, evidence: Evidence, contests: Contests) -> Part:
        """Judge the variances by the Brown-Forsythe test; their ratio has no interval."""
        a, b, ours, theirs = evidence.sides(contests[0], self.arm, self.against)
        trouble = evidence.compare(contests[0], self.arm, self.against).trouble
        what, n = f"variance of {a} over {b}", min(len(ours), len(theirs))
        row: dict[str, Any] = {"what": what, "n": n, "ratio": None, "p": None}
        if trouble or n < _SPREAD_SEEDS:
            reason = trouble or f"a spread needs {_SPREAD_SEEDS} or more seeds, got {n}"
            return Part(OPEN, OPEN, REDUCED, reason, [row])
        from scipy import stats

        sides = list(ours.values()), list(theirs.values())
        above, below = (float(np.var(side, ddof=1)) for side in sides)
        ratio = above / below if below > 0 else None
        p = float(stats.levene(*sides, center="median").pvalue)
        row |= {"ratio": ratio, "p": p}
        direction = OPEN
        if ratio is not None and p < ALPHA:
            direction = SUPPORTED if ratio > 1 else CONTRADICTED
        shown = "undefined" if ratio is None else f"{ratio:.3g}"
        reason = f"{what}: ratio {shown}, p {p:.2g}; no interval of the ratio is computed"
        return Part(direction, OPEN, REDUCED, reason, [row])


@dataclass(frozen=True, kw_only=True)
class Tasks(ArmCriterion, kind="tasks"):
    """The arm's mean over all tasks of a study is better or worse than another's, or within a margin on one side of it.

    Each task has its own metric.
    """

    study: Text = field()
    expect: Literal["better", "worse", "no better", "no worse"]
    effect: Range = ()
    at_least: Number | None = None
    at_most: Number | None = None
    margin: Margin | None = None
    needs_tasks: ClassVar[bool] = True

    def judged_contests(self, evidence: Evidence, found: list[Contest]) -> list[Contest]:
        """Return the contests of all tasks."""
        return evidence.contests

    def __post_init__(self) -> None:
        if self.expect.startswith("no ") != (self.margin is not None):
            raise UserError("a tasks criterion takes a margin if and only if expect is no better or no worse")

    def untrained(self, evidence: Evidence, contests: Contests) -> str:
        """Return a message if all compared arms are untrained on every task: one learned task is enough."""
        found = [evidence.untrained(contest, self.judged_arms) for contest in evidence.contests]
        return max(found) if all(found) else ""

    def outcome(self, evidence: Evidence, contests: Contests) -> Part:
        """Judge the mean over all tasks; higher is better."""
        labels = [evidence.label(name) or "" for name in (self.arm, self.against)]
        paired = self._paired(evidence)
        trouble = self._trouble(evidence, labels)
        if not trouble and paired.n < 2:
            trouble = f"{paired.n} paired seeds give no interval"
        alike = {(part.arm, part.against): part for part in evidence.criteria if isinstance(part, Tasks)}
        known = {pair: part for pair, part in alike.items() if all(map(evidence.label, part.arms))}
        adjusted = holm([part._paired(evidence).p for part in known.values()])
        p = adjusted[list(known).index((self.arm, self.against))]
        decision = decide(paired.difference, p, None, None, 0.0, "higher")
        metrics = {evidence.manifest.measure(contest).name for contest in evidence.contests}
        unit = metrics.pop() if len(metrics) == 1 else "score"
        what = f"{labels[0]} - {labels[1]}, mean of {len(evidence.contests)} tasks"
        compared = Compared(what, paired, p, decision, trouble, "", unit, "higher")
        return (difference if self.margin is None else equivalence)(self.expected, compared)

    def _paired(self, evidence: Evidence) -> Paired:
        """Return the comparison of the means over tasks; seeds without all tasks are left out."""
        sides = []
        for arm in (self.arm, self.against):
            label = evidence.label(arm) or ""
            parts = [evidence.values.get((contest, label), {}) for contest in evidence.contests]
            seeds = [seed for seed in parts[0] if all(seed in part for part in parts)]
            sides.append({seed: sum(part[seed] for part in parts) / len(parts) for seed in seeds})
        return compare_by_seed(*sides)

    @staticmethod
    def _trouble(evidence: Evidence, labels: Sequence[str]) -> str:
        """Return why a comparison cannot be used, or an empty string; a missing task would change the mean."""
        rows = [row for (_, label), row in evidence.rows.items() if label in labels]
        for state in ("missing", "failed", "diverged"):
            if count := sum(getattr(row, state) for row in rows):
                return f"{count} runs {'are not finished' if state == 'missing' else state}"
        return ""


@dataclass(frozen=True, kw_only=True)
class Cost(Criterion, kind="cost"):
    """The cost of an arm by formula, as a ratio to another; needs no training, so its arms need not be in the study."""

    arm: Text
    against: Text = ""
    """Empty: the baseline of the main study."""
    size: Texts
    quantity: Literal["parameters", "cache", "flops"]
    ratio: Factor
    tolerance: Margin = 0.005

    def __post_init__(self) -> None:
        for arm in filter(None, (self.arm, self.against)):
            self._amount(arm)

    def _amount(self, arm: str) -> float | None:
        """Return the quantity of an arm; a mistake in the arm or the size raises UserError."""
        size = find_size(self.size[0])
        facts = arm_cost(size, parse_layout(arm).layers(size.layers))
        return {
            "parameters": facts["parameters"],
            "cache": facts["cache_bytes_per_token"],
            "flops": facts["flops_per_token"]["causal"],
        }[self.quantity]

    def judge(self, basis: Basis, at: At) -> Part:
        """Judge the ratio of parameters, cache or FLOPs."""
        size, against = find_size(self.size[0]), self.against or basis.baseline
        found = [self._amount(arm) for arm in (self.arm, against)]
        what = f"{self.quantity} of {self.arm} over {against}"
        mine, other = found
        if not mine or not other:
            return Part(OPEN, OPEN, PUBLISHED, f"{what}: not defined at {size.name}")
        ratio = mine / other
        outcome = SUPPORTED if abs(ratio - self.ratio) <= self.tolerance else CONTRADICTED
        same_side = SUPPORTED if (ratio - 1) * (self.ratio - 1) > 0 else CONTRADICTED
        row = {"what": what, "size": size.name, "values": found, "ratio": ratio, "published": self.ratio}
        reason = f"{what} at {size.name}: {ratio:.5g} by formula, {self.ratio:.5g} published"
        return Part(outcome if self.ratio == 1 else same_side, outcome, PUBLISHED, reason, [row])


@dataclass(frozen=True, kw_only=True)
class Undecided(Criterion, kind="open"):
    """Cannot be decided yet."""

    reason: Text

    def judge(self, basis: Basis, at: At) -> Part:
        """Return the reason."""
        return Part(OPEN, None, NOT_TESTED, self.reason)
