"""The kinds of criteria about a number of each trained run other than its score: of a probe, or of its training curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headtohead.common.errors import UserError
from headtohead.evaluation.stability import final_loss, gradient_tail, spikes, tokens_to_target
from headtohead.study.claims.criteria import Guard, Margin, Number, PlacedCriterion, Range, RunCriterion, Text
from headtohead.study.claims.evidence import Evidence
from headtohead.study.claims.kinds import ArmCriterion
from headtohead.study.claims.outcome import Compared, Part, decided, equivalence, signed_difference
from headtohead.study.judge.statistics import Paired, compare_by_seed, holm
from headtohead.study.probes import PROBES, check_probes_apply, is_timed, number_at, probe_names
from headtohead.study.probes.decode import DecodeSpeed
from headtohead.study.store.manifest import Contest

Sides = tuple[dict[int, float], dict[int, float]]
"""The numbers of two arms by seed."""


@dataclass(frozen=True, kw_only=True)
class NumberCriterion(ArmCriterion, PlacedCriterion):
    """A number of each run, compared over paired seeds as difference, ratio (of logarithms), or the arm's own value."""

    compare: Literal["difference", "ratio", "value"] = "difference"
    expect: Literal["", "lower", "higher", "no lower", "no higher"] = ""
    effect: Range = ()
    at_least: Number | None = None
    at_most: Number | None = None
    margin: Margin | None = None

    def __post_init__(self) -> None:
        if (self.expect not in ("lower", "higher")) != (self.margin is not None):
            raise UserError(
                f"a {self.kind} criterion takes either expect or the margin for equality; "
                "with expect no lower or no higher it takes both"
            )
        sizes = [*self.effect, *(end for end in (self.at_least, self.at_most) if end is not None)]
        if self.compare == "ratio" and min(sizes, default=1.0) <= 0:
            raise UserError("effect, at_least and at_most must be above 0 with compare = 'ratio'")

    @property
    def unchanged(self) -> float | None:
        """The number of two equal arms; the arm's own value has none."""
        return {"difference": 0.0, "ratio": 1.0}.get(self.compare)

    @property
    def opponents(self) -> list[tuple[str, str]]:
        """The arm and the other, unless the arm's own value is judged."""
        return [] if self.compare == "value" else super().opponents

    @property
    def alone(self) -> bool:
        """Whether the baseline's number does not enter it."""
        return super().alone or self.compare == "value"

    @property
    def what(self) -> str:
        """The name of the number."""
        raise NotImplementedError

    def scaled(self, factor: float) -> RunCriterion:
        """Return it unchanged: its numbers are not scores."""
        return self

    def sides(self, evidence: Evidence, contest: Contest) -> Sides:
        """Return the numbers of the arm and of the other by seed."""
        raise NotImplementedError

    def trouble(self, evidence: Evidence, contest: Contest, paired: Paired) -> str:
        """Return why the numbers cannot be used, or an empty string."""
        raise NotImplementedError

    def outcome(self, evidence: Evidence, contests: Sequence[Contest]) -> Part:
        """Judge the number over paired seeds."""
        contest = contests[0]
        scores = evidence.compare(contest, self.arm, self.against)
        paired, p = self._paired(evidence, contest), self._adjusted(evidence, contest)
        trouble = "" if scores.trouble.endswith("no interval") else scores.trouble
        trouble = trouble or self.trouble(evidence, contest, paired)
        ratio, expected = self.compare == "ratio", self.expected
        label = (evidence.label(self.arm) or "") if self.compare == "value" else scores.label
        unit = f"{'log ratio of ' if ratio else ''}{self.what}"
        decision = decided(paired, p, scores.remark)
        compared = Compared(label, paired, p, decision, trouble, scores.remark, unit)
        if ratio:
            effect, least, most = expected.effect, expected.at_least, expected.at_most
            expected = replace(
                expected,
                effect=None if effect is None else (math.log(effect[0]), math.log(effect[1])),
                at_least=None if least is None else math.log(least),
                at_most=None if most is None else math.log(most),
            )
        if self.expect in ("lower", "higher"):
            return signed_difference(expected, compared)
        # The number is neither good nor bad; `equivalence` uses the terms of a loss.
        side = {"no higher": "no worse", "no lower": "no better"}.get(self.expect, "")
        return equivalence(replace(expected, expect=side), compared)

    def _paired(self, evidence: Evidence, contest: Contest) -> Paired:
        ours, theirs = self.sides(evidence, contest)
        if self.compare == "value":
            theirs = dict.fromkeys(ours, 0.0)
        elif self.compare == "ratio":
            ours, theirs = (
                {seed: math.log(value) for seed, value in side.items() if value > 0}
                for side in (ours, theirs)
            )
        return compare_by_seed(ours, theirs)

    def _adjusted(self, evidence: Evidence, contest: Contest) -> float | None:
        """Return the p value, Holm-adjusted over all criteria of the kind in the contest."""
        criteria = [
            part
            for part in evidence.criteria
            if isinstance(part, NumberCriterion)
            and part.kind == self.kind
            and evidence.contest(part.place) == contest
            and all(evidence.label(arm) is not None for arm in part.arms)
        ]
        found = holm([part._paired(evidence, contest).p for part in criteria])
        return next((p for part, p in zip(criteria, found, strict=True) if part is self), None)


@dataclass(frozen=True, kw_only=True)
class ProbeNumber(NumberCriterion, kind="probe"):
    """A number at `path` in a probe's result."""

    probe: Text
    path: Text
    guard: Guard | None = None
    """A path and the minimum of the baseline's number there; below it the criterion stays open, as when all arms guess."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (name,) = probe_names([self.probe])
        object.__setattr__(self, "probe", name)

    @property
    def what(self) -> str:
        """What the number is, or its path, and the probe."""
        words = PROBES[self.probe.partition(":")[0]].words
        return f"{words.get(self.path, self.path)} ({self.probe})"

    def check_study(self, of_tasks: bool) -> None:
        """Raise UserError if the probe does not apply to the study."""
        check_probes_apply([self.probe], "tasks" if of_tasks else "corpora")

    def lacks(self, evidence: Evidence) -> str:
        """Return the probe if the study does not take it."""
        return "" if self._taken(evidence) else f"probe {self.probe}"

    def sides(self, evidence: Evidence, contest: Contest) -> Sides:
        """Return the probe's numbers of the arm and of the other by seed."""
        ours, theirs = (self._numbers(evidence, contest, arm, self.path) for arm in (self.arm, self.against))
        return ours, theirs

    def trouble(self, evidence: Evidence, contest: Contest, paired: Paired) -> str:
        """Return why the numbers cannot be used: too few, or a baseline below the guard."""
        if paired.n < 2:
            few = f"was taken on {paired.n} paired seeds, which give no interval"
            return f"probe {self.probe} {few if paired.n else 'was not taken'}"
        if (
            is_timed(self.probe)
            and self.compare != "value"
            and len(timed := self._machines(evidence, contest)) > 1
        ):
            return f"probe {self.probe} was timed on different machines: {'; '.join(sorted(timed))}"
        if self.guard is None:
            return ""
        path, least = self.guard
        values = list(self._numbers(evidence, contest, "", path).values())
        mean = sum(values) / len(values) if values else None
        if mean is not None and mean >= least:
            return ""
        shown = "unknown" if mean is None else f"{mean:.3g}"
        return f"{path} of {evidence.manifest.baseline} is {shown}; a comparison needs {least:g} or more"

    def unfinished(self, evidence: Evidence, contests: Sequence[Contest]) -> bool:
        """Return whether a run has no result, or is done and the probe was not taken on it."""
        runs, name = evidence.runs(contests, self.judged_arms), self._taken(evidence)
        return super().unfinished(evidence, contests) or any(
            evidence.results[run].status == "done" and evidence.found(run, name) is None for run in runs
        )

    def _machines(self, evidence: Evidence, contest: Contest) -> set[str]:
        """Return the devices, with the number of threads, on which the compared runs were timed."""
        taken = self._taken(evidence)
        found = [evidence.found(run, taken) for run in evidence.runs([contest], (self.arm, self.against))]
        return {f"{one.device}, {one.threads} threads" for one in found if isinstance(one, DecodeSpeed)}

    def _numbers(self, evidence: Evidence, contest: Contest, arm: str, path: str) -> dict[int, float]:
        """Return the probe's number by seed."""
        name, runs = self._taken(evidence), evidence.manifest.runs(contest, evidence.label(arm) or "")
        found = {seed: number_at(evidence.found(run, name), path) for seed, run in runs.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def _taken(self, evidence: Evidence) -> str:
        """Return the probe as the study takes it, which may be with another amount, or an empty string."""
        short = self.probe.partition(":")[0]
        same = [name for name in evidence.manifest.probes if name.partition(":")[0] == short]
        if self.probe in same:
            return self.probe
        return same[0] if same and PROBES[short].amount else ""


@dataclass(frozen=True, kw_only=True)
class CurveNumber(NumberCriterion, kind="curve"):
    """A number of the training curve: the loss on train at the end, loss spikes, or tokens to the other arm's final loss."""

    quantity: Literal["train_loss", "spikes", "gradient_tail", "tokens_to_loss"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantity == "tokens_to_loss" and self.compare != "ratio":
            raise UserError(
                "tokens_to_loss takes compare = 'ratio': tokens of the arm over those of the other"
            )

    @property
    def what(self) -> str:
        """The quantity in words."""
        return {
            "train_loss": "training loss in nats per token",
            "spikes": "loss spikes per run",
            "gradient_tail": "gradient tail",
            "tokens_to_loss": "tokens to the other's final loss",
        }[self.quantity]

    def sides(self, evidence: Evidence, contest: Contest) -> Sides:
        """Return the numbers of the arm's and the other's curves by seed."""
        labels = [evidence.label(arm) or "" for arm in (self.arm, self.against)]
        ours, theirs = (
            {seed: evidence.curve(run) for seed, run in evidence.manifest.runs(contest, label).items()}
            for label in labels
        )
        if self.quantity == "tokens_to_loss":
            targets = {seed: loss for seed, rows in theirs.items() if (loss := final_loss(rows)) is not None}
            sides = [
                {
                    seed: tokens_to_target(rows, targets[seed])
                    for seed, rows in side.items()
                    if seed in targets
                }
                for side in (ours, theirs)
            ]
        else:
            measure = {"train_loss": final_loss, "spikes": spikes, "gradient_tail": gradient_tail}
            sides = [
                {seed: measure[self.quantity](rows) for seed, rows in side.items() if rows}
                for side in (ours, theirs)
            ]
        first, second = (
            {seed: float(value) for seed, value in side.items() if value is not None} for side in sides
        )
        return first, second

    def unfinished(self, evidence: Evidence, contests: Sequence[Contest]) -> bool:
        """Return whether a run has no result, or no curve."""
        runs = evidence.runs(contests, self.judged_arms)
        return super().unfinished(evidence, contests) or not all(map(evidence.curve, runs))

    def trouble(self, evidence: Evidence, contest: Contest, paired: Paired) -> str:
        """Return why the numbers cannot be used: too few, or runs that never reach the loss."""
        ours, theirs = self.sides(evidence, contest)
        if self.quantity == "tokens_to_loss" and (never := len(theirs.keys() - ours.keys())):
            return f"{never} of {len(theirs)} runs do not reach the final loss of the other arm"
        return f"{paired.n} paired curves give no interval" if paired.n < 2 else ""
