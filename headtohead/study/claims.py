"""What a study says of published claims: supported, contradicted or open; direction and size of effect apart.

Direction: Holm-adjusted p < 0.05 on the published side supports, on the other side contradicts, anything else is
open. Size: the 95 % interval excludes the published effect, and contradicts it; or holds it and lies between none
and twice that effect, and supports it; or is too wide for either, and leaves it open. A criterion that gives bounds
in place of an effect is met by an interval inside them and contradicted by one outside.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headtohead.common.numbers import parse_count
from headtohead.measure.cost import arm_cost
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import find_size
from headtohead.study.answers import CONTRADICTED, NOT_RUN, OPEN, PUBLISHED, REDUCED, SMOKE, SUPPORTED, all_of
from headtohead.study.outline import Contest, Outline
from headtohead.study.probes import PROBES, Found, number_at
from headtohead.study.published import PLACE, TRAINED, Claim, Criterion, Paper
from headtohead.study.spec import StudySpec
from headtohead.study.statistics import (
    ALPHA,
    MEDIAN_SEEDS,
    Paired,
    compare_medians,
    compare_paired,
    decide,
    holm,
)
from headtohead.study.task_claims import KIND as TASKS
from headtohead.study.task_claims import UNIT, TaskStudy
from headtohead.study.toy_claims import toy_checks, toy_order
from headtohead.study.trends import FEWEST, OVER, axis_values, groups, trend_of
from headtohead.study.verdict import Result, Verdict
from headtohead.toy.work import Toy

# Fewer seeds than this say nothing about a spread: at five a true ratio of 8 is found in 58 % of studies.
_SPREAD_SEEDS = 5


@dataclass(frozen=True)
class ClaimResult:
    """What a study says of one claim."""

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


@dataclass
class _Part:
    """What one criterion came to; size None: nothing was published or asked about it."""

    direction: str
    size: str | None
    scale: str
    reason: str
    measured: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Compared:
    """Two arms in one contest over the seeds both have finished."""

    label: str
    paired: Paired
    p: float | None
    """Holm-adjusted."""
    decision: str
    """better, worse or undecided; equivalence is judged by each criterion's own margin."""
    trouble: str
    """Why the numbers cannot be used, or empty."""
    remark: str
    unit: str = "bits_per_byte"


Finder = Callable[[str, str], Found | None]
"""What a probe found in a run, by the run's name and the probe's."""


def judge_claims(
    paper: Paper,
    scale: str,
    spec: StudySpec,
    outline: Outline,
    verdicts: Sequence[Verdict],
    *,
    results: Mapping[str, Result] | None = None,
    found: Finder = lambda run, probe: None,
    toy: Toy | None = None,
    tasks: TaskStudy | None = None,
) -> list[ClaimResult]:
    """Return what a study of that scale, and the paper's toy and study of tasks where it has them, say of each claim.

    A trend over size takes `results` too; `found` gives what a probe found in a run.
    """
    axes = axis_values(outline, results or {})
    evidence = _Evidence(paper, scale, spec, outline, verdicts, axes, found, toy, tasks)
    return [_judged(claim, evidence) for claim in paper.claims]


def _judged(claim: Claim, evidence: _Evidence) -> ClaimResult:
    parts = [evidence.part(criterion, claim) for criterion in claim.criteria]
    scales = {part.scale for part in parts}
    scale = REDUCED if REDUCED in scales else PUBLISHED if PUBLISHED in scales else NOT_RUN
    sizes = [part.size for part in parts if part.size is not None]
    reasons = [part.reason for part in parts]
    if not sizes and scale != NOT_RUN:
        reasons.append("no size of effect was published")
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


class _Evidence:
    """A study's verdicts, asked by claims."""

    def __init__(
        self,
        paper: Paper,
        scale: str,
        spec: StudySpec,
        outline: Outline,
        verdicts: Sequence[Verdict],
        axes: Mapping[tuple[str, Contest], float],
        found: Finder,
        toy: Toy | None,
        tasks: TaskStudy | None,
    ) -> None:
        self.paper, self.tasks = paper, tasks
        self.scale, self.spec, self.outline, self.axes, self.toy = scale, spec, outline, axes, toy
        self.contests = outline.contests()
        self.rows: dict[tuple[Contest, str], Verdict] = {}
        self.values: dict[tuple[Contest, str], dict[int, float]] = {}
        for contest in self.contests:
            for row in verdicts:
                if row.of(contest):
                    self.rows[contest, row.label] = row
                    self.values[contest, row.label] = dict(zip(row.seeds, row.values, strict=True))
                    base = self.values.setdefault((contest, outline.baseline), {})
                    base.update(zip(row.seeds, row.baseline_values, strict=True))
        self.found = found
        self.adjusted = self._adjusted(paper)
        self.probed = self._probed(paper)

    def part(self, criterion: Criterion, claim: Claim) -> _Part:
        """Return what one criterion comes to."""
        if criterion.kind == "open":
            return _Part(OPEN, None, NOT_RUN, criterion.reason)
        if criterion.kind == "cost":
            return self._cost(criterion)
        if criterion.kind == TASKS:
            return self._of_tasks(criterion)
        if criterion.kind in ("toy", "toy_check"):
            if self.toy is None:
                return _Part(OPEN, None, NOT_RUN, f"the toy is not part of scale {self.scale}")
            found = toy_order if criterion.kind == "toy" else toy_checks
            return _Part(*found(criterion, self.toy, self.scale == "smoke"))
        missing = [arm for arm in criterion.arms if self._label(arm) is None]
        if missing:
            return _Part(OPEN, None, NOT_RUN, f"arm {missing[0]} is not part of scale {self.scale}")
        places = [criterion.place]
        if criterion.values:
            places = [criterion.place | {criterion.over: (value,)} for value in criterion.values]
        contests = [self._contest(place) for place in places]
        known = [contest for contest in contests if contest is not None]
        if len(known) < len(places):
            lost = places[contests.index(None)]
            words = ", ".join(f"{key} {' or '.join(value)}" for key, value in lost.items()) or "no contest"
            return _Part(OPEN, None, NOT_RUN, f"{words} is not part of scale {self.scale}")
        if criterion.kind == "change":
            part = self._change(criterion, known[0], known[1])
        elif criterion.kind == "trend":
            part, known = self._trend(criterion, known[0])
        elif criterion.kind == "order":
            part = self._order(criterion, known[0])
        elif criterion.kind == "interaction":
            part = self._interaction(criterion, known[0])
        elif criterion.kind == "median":
            part = self._median(criterion, known[0])
        elif criterion.kind == "probe":
            part = self._probe(criterion, known[0])
        else:
            compared = self._compare(known[0], criterion.arm, criterion.against)
            judge = {"difference": _difference, "equivalence": _equivalence}.get(criterion.kind)
            part = judge(criterion, compared) if judge else self._spread(criterion, known[0], compared)
        if not any(row["n"] for row in part.measured):
            part.scale = NOT_RUN
            return part
        differs = self._other_scale(claim, known, criterion)
        part.scale = REDUCED if differs else PUBLISHED
        if self.scale == "smoke":
            part.direction, part.size, part.reason = OPEN, OPEN, SMOKE
        elif differs:
            part.reason += f" ({differs})"
        return part

    def _of_tasks(self, criterion: Criterion) -> _Part:
        """Judge the mean share of wrong answers over the tasks."""
        tasks, names = self.tasks, (criterion.arm, criterion.against)
        if tasks is None:
            return _Part(OPEN, None, NOT_RUN, f"the study of tasks is not part of scale {self.scale}")
        labels = [tasks.label(name) for name in names]
        if None in labels:
            return _Part(
                OPEN, None, NOT_RUN, f"arm {names[labels.index(None)]} is not part of scale {self.scale}"
            )
        paired, p = tasks.paired(*names), tasks.adjusted(self.paper, *names)
        decision = decide(paired.difference, p, None, None, 0.0)
        what = f"{labels[0]} - {labels[1]}, mean of {len(tasks.outline.contests())} tasks"
        compared = _Compared(what, paired, p, decision, tasks.trouble(*names), "", UNIT)
        part = _difference(criterion, compared)
        if not paired.n:
            part.scale = NOT_RUN
        elif self.scale == "smoke":
            part.direction, part.size, part.reason = OPEN, OPEN, SMOKE
        return part

    def _label(self, arm: str) -> str | None:
        if not arm:
            return self.outline.baseline
        return next((label for text, label in self.outline.arms if arm in (text, label)), None)

    def _contest(self, place: dict[str, tuple[str, ...]]) -> Contest | None:
        """Return the contest at a place; what the place does not name is the study's first."""
        found = self.contests
        for key in PLACE:
            here = [getattr(contest, key) for contest in found]
            wanted = next((word for word in place.get(key, here) if word in here), None)
            found = [contest for contest in found if getattr(contest, key) == wanted]
        return found[0] if found else None

    def _other_scale(self, claim: Claim, contests: Sequence[Contest], criterion: Criterion) -> str:
        """Return how this study differs from the published one, or nothing."""
        if not claim.at:
            return "the published scale is not known"
        notes = []
        for key in ("corpus", "size"):
            here = list(dict.fromkeys(getattr(contest, key) for contest in contests))
            if key in claim.at and not set(here) <= set(claim.at[key]):
                notes.append(f"{key} {', '.join(here)} here, {', '.join(claim.at[key])} published")
        label = self._label(criterion.first or criterion.arm)
        arm = next(arm for arm in self.spec.arms if arm.label == label)
        lengths = [parse_count(contest.branch) for contest in contests if contest.branch]
        tokens = max(lengths, default=self.spec.train_settings(arm).tokens)
        if tokens < claim.at.get("tokens", 0):
            notes.append(f"{tokens:,} tokens here, {claim.at['tokens']:,} published")
        return "; ".join(notes)

    def _adjusted(self, paper: Paper) -> dict[tuple[Contest, str, str], float | None]:
        """Return Holm-adjusted p values, contest by contest, of the claims' comparisons that no verdict covers."""
        pairs: dict[Contest, dict[tuple[str, str], None]] = {}
        for criterion in (part for claim in paper.claims for part in claim.criteria):
            contest = self._contest(criterion.place)
            if criterion.kind not in TRAINED - {"trend", "probe"} or contest is None:
                continue
            names = [(criterion.first, other) for other in criterion.then] or [
                (criterion.arm, criterion.against)
            ]
            for arm, against in names:
                a, b = self._label(arm), self._label(against)
                if a is not None and b is not None and b != self.outline.baseline:
                    pairs.setdefault(contest, {})[a, b] = None
        table: dict[tuple[Contest, str, str], float | None] = {}
        for contest, names_here in pairs.items():
            found = [self._paired(contest, a, b).p for a, b in names_here]
            for (a, b), p in zip(names_here, holm(found), strict=True):
                table[contest, a, b] = p
        return table

    def _paired(self, contest: Contest, a: str, b: str) -> Paired:
        ours, theirs = self.values.get((contest, a), {}), self.values.get((contest, b), {})
        seeds = [seed for seed in self.outline.seeds if seed in ours and seed in theirs]
        return compare_paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])

    def _compare(self, contest: Contest, arm: str, against: str) -> _Compared:
        a, b = self._label(arm) or "", self._label(against) or ""
        paired = self._paired(contest, a, b)
        row, other = self.rows.get((contest, a)), self.rows.get((contest, b))
        p = row.p_holm if row and b == self.outline.baseline else self.adjusted.get((contest, a, b))
        decision = decide(paired.difference, p, None, None, 0.0)
        # Runs that did not diverge cannot stand for all: they may show the arm worse, never better.
        if (decision == "better" and row and row.diverged) or (
            decision == "worse" and other and other.diverged
        ):
            decision = "undecided"
        trouble = ""
        rows = [found for found in (row, other) if found]
        for word in ("missing", "failed"):
            count = sum(getattr(found, word) for found in rows)
            if count:
                trouble = f"{count} runs {'are not finished' if word == 'missing' else 'failed'}"
                break
        if not trouble and paired.n < 2:
            trouble = f"{paired.n} paired seeds give no interval"
        notes = [f"{found.diverged} runs of {found.label} diverged" for found in rows if found.diverged]
        notes += (
            ["on this test set alone"]
            if row and b == self.outline.baseline and row.scope == "this test set"
            else []
        )
        return _Compared(f"{a} - {b}", paired, p, decision, trouble, ", ".join(notes))

    def _order(self, criterion: Criterion, contest: Contest) -> _Part:
        parts = [
            _difference(
                Criterion("difference", expect="better"), self._compare(contest, criterion.first, other)
            )
            for other in criterion.then
        ]
        return _joined(parts)

    def _change(self, criterion: Criterion, before: Contest, after: Contest) -> _Part:
        """Judge the difference at the second place less the difference at the first, over paired seeds."""
        names = (criterion.arm, criterion.against)
        words = f"({{0}}) at {criterion.values[1]} less at {criterion.values[0]}"
        return self._second_less_first(criterion, ((before, *names), (after, *names)), words)

    def _interaction(self, criterion: Criterion, contest: Contest) -> _Part:
        """Judge the difference of two arms less the difference of two others, over paired seeds."""
        control = (contest, criterion.control, criterion.control_against)
        return self._second_less_first(
            criterion, (control, (contest, criterion.arm, criterion.against)), "({1}) less ({0})"
        )

    def _second_less_first(
        self, criterion: Criterion, places: Sequence[tuple[Contest, str, str]], words: str
    ) -> _Part:
        gaps = [self._gaps(*place) for place in places]
        seeds = [seed for seed in self.outline.seeds if seed in gaps[0] and seed in gaps[1]]
        paired = compare_paired([gaps[1][seed] for seed in seeds], [gaps[0][seed] for seed in seeds])
        pair = [self._compare(*place) for place in places]
        trouble = next((found.trouble for found in pair if found.trouble), "")
        label = words.format(*(found.label for found in pair))
        decision = decide(paired.difference, paired.p, None, None, 0.0)
        return _signed_difference(criterion, _Compared(label, paired, paired.p, decision, trouble, ""))

    def _median(self, criterion: Criterion, contest: Contest) -> _Part:
        """Judge the difference of medians by swapping the arms seed by seed; it has no interval, hence no size."""
        a, b = self._label(criterion.arm) or "", self._label(criterion.against) or ""
        ours, theirs = self.values.get((contest, a), {}), self.values.get((contest, b), {})
        seeds = [seed for seed in self.outline.seeds if seed in ours and seed in theirs]
        what = f"median of {a} - median of {b}"
        row: dict[str, Any] = {"what": what, "n": len(seeds), "difference": None, "p": None}
        compared = self._compare(contest, criterion.arm, criterion.against)
        if compared.trouble:
            return _Part(OPEN, None, REDUCED, f"{what}: {compared.trouble}", [row])
        difference, p = compare_medians([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
        row |= {"difference": difference, "p": p}
        if p is None:
            reason = f"{what}: {difference:+.4f}; a median takes {MEDIAN_SEEDS} paired seeds, here are {len(seeds)}"
            return _Part(OPEN, None, REDUCED, reason, [row])
        decision = decide(difference, p, None, None, 0.0)
        if compared.remark:
            decision = "undecided"
        direction = {criterion.expect: SUPPORTED, "undecided": OPEN}.get(decision, CONTRADICTED)
        reason = (
            f"{what}: {difference:+.4f} bits per byte, p {p:.2g} by swapping arms in every seed: {decision}"
        )
        return _Part(direction, None, REDUCED, reason, [row])

    def _probe(self, criterion: Criterion, contest: Contest) -> _Part:
        """Judge a number that a probe found, over paired seeds; ratios are compared as logarithms."""
        losses = self._compare(contest, criterion.arm, criterion.against)
        paired, p = self._probe_pairs(criterion, contest), self.probed.get(id(criterion))
        trouble = "" if losses.trouble.endswith("no interval") else losses.trouble
        if not trouble and paired.n < 2:
            few = f"was taken on {paired.n} paired seeds, which give no interval"
            trouble = f"probe {criterion.probe} {few if paired.n else 'was not taken'}"
        if not trouble and criterion.guard is not None:
            trouble = self._guarded(criterion, contest, *criterion.guard)
        decision = decide(paired.difference, p, None, None, 0.0)
        if "diverged" in losses.remark:  # runs that did not diverge cannot stand for all
            decision = "undecided"
        label = (self._label(criterion.arm) or "") if criterion.compare == "value" else losses.label
        unit = (
            f"{'log ratio of ' if criterion.compare == 'ratio' else ''}{criterion.path} ({criterion.probe})"
        )
        compared = _Compared(label, paired, p, decision, trouble, losses.remark, unit)
        if criterion.compare == "ratio":
            effect, least, most = criterion.effect, criterion.at_least, criterion.at_most
            criterion = replace(
                criterion,
                effect=None if effect is None else (math.log(effect[0]), math.log(effect[1])),
                at_least=None if least is None else math.log(least),
                at_most=None if most is None else math.log(most),
            )
        return (
            _signed_difference(criterion, compared) if criterion.expect else _equivalence(criterion, compared)
        )

    def _guarded(self, criterion: Criterion, contest: Contest, path: str, least: float) -> str:
        """Return why the baseline leaves nothing to compare, or nothing."""
        own = replace(criterion, path=path, compare="value")
        values = list(self._probe_values(contest, self.outline.baseline, own).values())
        mean = sum(values) / len(values) if values else None
        if mean is not None and mean >= least:
            return ""
        shown = "not known" if mean is None else f"{mean:.3g}"
        return f"{path} of {self.outline.baseline} is {shown}, and {least:g} is needed for a comparison"

    def _probe_pairs(self, criterion: Criterion, contest: Contest) -> Paired:
        ours, theirs = (
            self._probe_values(contest, self._label(arm) or "", criterion)
            for arm in (criterion.arm, criterion.against)
        )
        if criterion.compare == "value":
            theirs = dict.fromkeys(ours, 0.0)
        seeds = [seed for seed in self.outline.seeds if seed in ours and seed in theirs]
        return compare_paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])

    def _probe_values(self, contest: Contest, label: str, criterion: Criterion) -> dict[int, float]:
        name, values = self._probe_name(criterion), {}
        for seed, run in self.outline.runs(contest, label).items():
            value = number_at(self.found(run, name), criterion.path)
            if value is not None and (criterion.compare != "ratio" or value > 0):
                values[seed] = math.log(value) if criterion.compare == "ratio" else value
        return values

    def _probe_name(self, criterion: Criterion) -> str:
        """Return the study's probe that a criterion means: how much of it was measured does not matter."""
        short = criterion.probe.partition(":")[0]
        same = [name for name in self.outline.probes if name.partition(":")[0] == short]
        return same[0] if same and criterion.probe not in same and PROBES[short].amount else criterion.probe

    def _probed(self, paper: Paper) -> dict[int, float | None]:
        """Return p values of the claims' numbers from probes, Holm-adjusted over all of them in a contest."""
        tests: dict[Contest, list[Criterion]] = {}
        for criterion in (part for claim in paper.claims for part in claim.criteria):
            contest = self._contest(criterion.place) if criterion.kind == "probe" else None
            if contest is not None and all(self._label(arm) is not None for arm in criterion.arms):
                tests.setdefault(contest, []).append(criterion)
        return {
            id(criterion): p
            for contest, criteria in tests.items()
            for criterion, p in zip(
                criteria, holm([self._probe_pairs(one, contest).p for one in criteria]), strict=True
            )
        }

    def _gaps(self, contest: Contest, arm: str, against: str) -> dict[int, float]:
        """Return arm - other by seed."""
        a, b = self._label(arm) or "", self._label(against) or ""
        ours, theirs = self.values.get((contest, a), {}), self.values.get((contest, b), {})
        return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}

    def _trend(self, criterion: Criterion, first: Contest) -> tuple[_Part, list[Contest]]:
        """Judge the slope of the difference per doubling, over the contests that differ from the first in one thing."""
        what = OVER[criterion.over].words
        group = next((group for group in groups(self.contests, criterion.over) if first in group), [first])
        known = [contest for contest in group if (criterion.over, contest) in self.axes]
        a, b = self._label(criterion.arm) or "", self._label(criterion.against) or ""
        gaps = {contest: self._gaps(contest, criterion.arm, criterion.against) for contest in known}
        trend = trend_of(a, b, criterion.over, gaps, self.axes)
        found = [self._compare(contest, criterion.arm, criterion.against) for contest in group]
        trouble = next((one.trouble for one in found if one.trouble), "")
        label = f"slope of {found[0].label} per doubling of {what}"
        if trend.line is None:
            paired = compare_paired([], [])
            trouble = trouble or f"a trend takes {FEWEST} values of {what} or more, here are {len(group)}"
        else:
            paired = trend.line.slope
        remark = ", ".join(one.remark for one in found if "diverged" in one.remark)
        decision = decide(paired.difference, paired.p, None, None, 0.0)
        compared = _Compared(label, paired, paired.p, decision, trouble, remark)
        if criterion.expect in ("level", "no higher"):
            side = {"level": "", "no higher": "no worse"}[criterion.expect]
            return _equivalence(dataclasses.replace(criterion, expect=side), compared), group
        expect = {"lower": "better", "higher": "worse"}[criterion.expect]
        part = _difference(Criterion("difference", expect=expect, effect=criterion.effect), compared)
        part.reason = part.reason.replace(": better", ": lower").replace(": worse", ": higher")
        return part, group

    def _spread(self, criterion: Criterion, contest: Contest, compared: _Compared) -> _Part:
        """Judge whether the arm's seeds lie wider apart, by Brown and Forsythe's test; its ratio has no interval here."""
        a, b = self._label(criterion.arm) or "", self._label(criterion.against) or ""
        ours, theirs = (list(self.values.get((contest, label), {}).values()) for label in (a, b))
        row = {
            "what": f"variance of {a} over {b}",
            "n": min(len(ours), len(theirs)),
            "ratio": None,
            "p": None,
        }
        if compared.trouble or min(len(ours), len(theirs)) < _SPREAD_SEEDS:
            reason = compared.trouble or f"a spread needs {_SPREAD_SEEDS} seeds or more, here are {row['n']}"
            return _Part(OPEN, OPEN, REDUCED, reason, [row])
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
        reason = (
            f"variance of {a} over {b}: ratio {shown}, p {p:.2g}; the ratio's own interval is not computed"
        )
        return _Part(direction, OPEN, REDUCED, reason, [row])

    def _cost(self, criterion: Criterion) -> _Part:
        size = find_size(criterion.place["size"][0])
        found = []
        for arm in (criterion.arm, criterion.against or self.spec.baseline_arm.text):
            facts = arm_cost(size, parse_layout(arm).layers(size.layers))
            table = {
                "parameters": facts["parameters"],
                "cache": facts["cache_bytes_per_token"],
                "flops": facts["flops_per_token"]["causal"],
            }
            found.append(table[criterion.quantity])
        what = (
            f"{criterion.quantity} of {criterion.arm} over {criterion.against or self.spec.baseline_arm.text}"
        )
        if not all(found):
            return _Part(OPEN, OPEN, PUBLISHED, f"{what}: not defined at {size.name}")
        ratio = found[0] / found[1]
        size_word = SUPPORTED if abs(ratio - criterion.ratio) <= criterion.tolerance else CONTRADICTED
        if criterion.ratio == 1:
            direction = size_word
        else:
            direction = SUPPORTED if (ratio - 1) * (criterion.ratio - 1) > 0 else CONTRADICTED
        row = {"what": what, "size": size.name, "values": found, "ratio": ratio, "published": criterion.ratio}
        reason = f"{what} at {size.name}: {ratio:.5g} by formula, {criterion.ratio:.5g} published"
        return _Part(direction, size_word, PUBLISHED, reason, [row])


def _joined(parts: Sequence[_Part]) -> _Part:
    sizes = [part.size for part in parts if part.size is not None]
    measured = [row for part in parts for row in part.measured]
    direction = all_of([part.direction for part in parts])
    return _Part(
        direction,
        all_of(sizes) if sizes else None,
        REDUCED,
        "; ".join(part.reason for part in parts),
        measured,
    )


def _row(criterion: Criterion, compared: _Compared) -> dict[str, Any]:
    paired = compared.paired
    effect = criterion.effect
    middle = None if effect is None else sum(effect) / 2
    share = paired.difference / middle if middle and paired.difference is not None else None
    return {
        "what": compared.label,
        "unit": compared.unit,
        "n": paired.n,
        "difference": paired.difference,
        "ci_low": paired.ci_low,
        "ci_high": paired.ci_high,
        "p_holm": compared.p,
        "published": None if effect is None else list(dict.fromkeys(effect)),
        "share_of_published": share,
    }


def _numbers(criterion: Criterion, compared: _Compared) -> str:
    paired = compared.paired
    words = (
        f"{compared.label}: {paired.difference:+.4f} {compared.unit.replace('_', ' ')}"
        if paired.difference is not None
        else compared.label
    )
    if paired.ci_low is not None:
        words += f" ({paired.ci_low:+.4f} to {paired.ci_high:+.4f}, n {paired.n})"
    if criterion.effect is not None:
        words += ", published " + " to ".join(f"{end:+.4f}" for end in dict.fromkeys(criterion.effect))
    return words + (f", {compared.remark}" if compared.remark else "")


def _difference(criterion: Criterion, compared: _Compared) -> _Part:
    """Judge arm - other: on the published side, and by as much."""
    measured = [_row(criterion, compared)]
    asked = criterion.effect is not None or criterion.at_least is not None or criterion.at_most is not None
    if compared.trouble:
        return _Part(
            OPEN, OPEN if asked else None, REDUCED, f"{compared.label}: {compared.trouble}", measured
        )
    direction = {criterion.expect: SUPPORTED, "undecided": OPEN}.get(compared.decision, CONTRADICTED)
    size = _size(criterion, compared.paired) if asked else None
    return _Part(direction, size, REDUCED, f"{_numbers(criterion, compared)}: {compared.decision}", measured)


def _signed_difference(criterion: Criterion, compared: _Compared) -> _Part:
    """Judge a number of which lower or higher is expected, rather than better or worse."""
    expect = {"lower": "better", "higher": "worse"}[criterion.expect]
    part = _difference(replace(criterion, expect=expect), compared)
    part.reason = part.reason.replace(": better", ": lower").replace(": worse", ": higher")
    return part


def _equivalence(criterion: Criterion, compared: _Compared) -> _Part:
    """Judge whether arm - other lies within the claim's margin: the 90 % interval inside it, or the 95 % one outside.

    Where no better or no worse is expected, the other side of the margin is free.
    """
    measured = [_row(criterion, compared)]
    if compared.trouble:
        return _Part(OPEN, OPEN, REDUCED, f"{compared.label}: {compared.trouble}", measured)
    paired, margin = compared.paired, criterion.margin
    low, high = paired.equivalence_low or 0.0, paired.equivalence_high or 0.0
    free = criterion.expect
    inside = (free == "no worse" or -margin < low) and (free == "no better" or high < margin)
    outside = (free != "no better" and (paired.ci_low or 0.0) > margin) or (
        free != "no worse" and (paired.ci_high or 0.0) < -margin
    )
    direction = SUPPORTED if inside else CONTRADICTED if outside else OPEN
    if "diverged" in compared.remark and direction == SUPPORTED:
        direction = OPEN
    size = None
    if criterion.effect is not None:
        held = _overlaps(paired, criterion.effect)
        size = CONTRADICTED if not held else SUPPORTED if direction == SUPPORTED else OPEN
    return _Part(direction, size, REDUCED, f"{_numbers(criterion, compared)}, margin {margin:.4f}", measured)


def _size(criterion: Criterion, paired: Paired) -> str:
    low, high = paired.ci_low, paired.ci_high
    if low is None or high is None:
        return OPEN
    if criterion.effect is not None:
        if not _overlaps(paired, criterion.effect):
            return CONTRADICTED
        ends = [0.0, *(2 * end for end in criterion.effect)]
        return SUPPORTED if min(ends) < low and high < max(ends) else OPEN
    least = float("-inf") if criterion.at_least is None else criterion.at_least
    most = float("inf") if criterion.at_most is None else criterion.at_most
    if low >= least and high <= most:
        return SUPPORTED
    return CONTRADICTED if high < least or low > most else OPEN


def _overlaps(paired: Paired, effect: tuple[float, float]) -> bool:
    low, high = paired.ci_low, paired.ci_high
    return low is None or high is None or (low <= effect[1] and high >= effect[0])
