"""A study's verdicts in the form that claims are judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from headtohead.common.numbers import parse_count
from headtohead.study.claims.criteria import PLACE, TRAINED, Criterion
from headtohead.study.claims.outcome import Compared
from headtohead.study.claims.paper import Claim, Paper
from headtohead.study.config.spec import StudySpec
from headtohead.study.judge.statistics import Paired, compare_paired, decide, holm
from headtohead.study.judge.trends import axis_values, groups
from headtohead.study.judge.verdict import NOTHING, Verdict, is_untrained
from headtohead.study.probes import Found
from headtohead.study.store.manifest import METRIC, Contest, Manifest
from headtohead.study.store.result import RunResult

Finder = Callable[[str, str], Found | None]
"""Returns a probe's result by run id and probe name."""


@dataclass(frozen=True)
class Finished:
    """A study with the results it has so far."""

    manifest: Manifest
    verdicts: Sequence[Verdict]
    results: Mapping[str, RunResult] = field(default_factory=dict)
    """By run; required for a trend over size."""
    found: Finder = lambda run, probe: None


class Evidence:
    """The verdicts of one study of a paper, with the comparisons that its claims need."""

    def __init__(self, paper: Paper, name: str, spec: StudySpec, study: Finished) -> None:
        manifest, verdicts = study.manifest, study.verdicts
        self.spec, self.manifest = spec, manifest
        self.axes = axis_values(manifest, study.results)
        self.contests = manifest.contests()
        self.criteria = [
            part
            for claim in paper.claims
            for part in claim.criteria
            if part.kind in TRAINED and part.study == name
        ]
        """The claims' criteria about this study."""
        self.rows: dict[tuple[Contest, str], Verdict] = {}
        self.values: dict[tuple[Contest, str], dict[int, float]] = {}
        for contest in self.contests:
            for row in verdicts:
                if row.of(contest):
                    self.rows[contest, row.label] = row
                    self.values[contest, row.label] = dict(zip(row.seeds, row.values, strict=True))
                    base = self.values.setdefault((contest, manifest.baseline), {})
                    base.update(zip(row.seeds, row.baseline_values, strict=True))
        self.best = {
            (contest, label): _best_values(manifest, contest, label, study.results)
            for contest in self.contests
            for _, label in manifest.arms
        }
        self.found = cache(study.found)  # a probe's result is read from a file
        self.adjusted = self._adjusted()

    def label(self, arm: str) -> str | None:
        """Return the label of an arm, the baseline's if `arm` is empty, or None if the study has no such arm."""
        if not arm:
            return self.manifest.baseline
        return next((label for text, label in self.manifest.arms if arm in (text, label)), None)

    def contest(self, place: dict[str, tuple[str, ...]]) -> Contest | None:
        """Return the contest with the given fields; fields not given default to the study's first."""
        found = self.contests
        for key in PLACE:
            here = [getattr(contest, key) for contest in found]
            wanted = next((value for value in place.get(key, here) if value in here), None)
            found = [contest for contest in found if getattr(contest, key) == wanted]
        return found[0] if found else None

    def other_scale(self, claim: Claim, contests: Sequence[Contest], criterion: Criterion) -> str:
        """Return how this study differs from the published one, or an empty string."""
        at = criterion.at or claim.at
        if not at:
            return "the published scale is unknown"
        notes = []
        for key in ("corpus", "size"):
            here = list(dict.fromkeys(getattr(contest, key) for contest in contests))
            if key in at and not set(here) <= set(at[key]):
                notes.append(f"{key} {', '.join(here)} here, {', '.join(at[key])} published")
        label = self.label(criterion.first or criterion.arm)
        lengths = [parse_count(contest.branch) for contest in contests if contest.branch]
        lengths = lengths or [
            self.spec.train_settings(arm, self.spec.size(contest.size, arm)).tokens
            for arm in self.spec.arms
            for contest in contests
            if arm.label == label
        ]
        tokens = max(lengths, default=0)
        if tokens < at.get("tokens", 0):
            notes.append(f"{tokens:,} tokens here, {at['tokens']:,} published")
        return "; ".join(notes)

    def _adjusted(self) -> dict[tuple[Contest, str, str], float | None]:
        """Return Holm-adjusted p values, per contest, of the claims' comparisons that have no verdict."""
        pairs: dict[Contest, dict[tuple[str, str], None]] = {}
        for criterion in self.criteria:
            contest = self.contest(criterion.place)
            if criterion.kind in ("trend", "probe", "tasks") or contest is None:
                continue
            names = [(criterion.first, other) for other in criterion.then] or [
                (criterion.arm, criterion.against)
            ]
            for arm, against in names:
                a, b = self.label(arm), self.label(against)
                if a is not None and b is not None and b != self.manifest.baseline:
                    pairs.setdefault(contest, {})[a, b] = None
        table: dict[tuple[Contest, str, str], float | None] = {}
        for contest, names_here in pairs.items():
            found = [self.paired(contest, a, b).p for a, b in names_here]
            for (a, b), p in zip(names_here, holm(found), strict=True):
                table[contest, a, b] = p
        return table

    def paired(self, contest: Contest, a: str, b: str) -> Paired:
        """Return the paired comparison of two labels in a contest, over the seeds both have."""
        ours, theirs = self.values.get((contest, a), {}), self.values.get((contest, b), {})
        seeds = [seed for seed in self.manifest.seeds if seed in ours and seed in theirs]
        return compare_paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])

    def compare(self, contest: Contest, arm: str, against: str) -> Compared:
        """Return the comparison of two arms in a contest, with its problems and remarks."""
        a, b = self.label(arm) or "", self.label(against) or ""
        paired = self.paired(contest, a, b)
        row, other = self.rows.get((contest, a)), self.rows.get((contest, b))
        p = row.p_holm if row and b == self.manifest.baseline else self.adjusted.get((contest, a, b))
        measure = self.manifest.measure(contest)
        decision = decide(paired.difference, p, None, None, 0.0, measure.better)
        # The runs that did not diverge are not representative: they may show the arm worse, never better.
        if (decision == "better" and row and row.diverged) or (
            decision == "worse" and other and other.diverged
        ):
            decision = "undecided"
        trouble = ""
        rows = [found for found in (row, other) if found]
        for state in ("missing", "failed"):
            count = sum(getattr(found, state) for found in rows)
            if count:
                trouble = f"{count} runs {'are not finished' if state == 'missing' else 'failed'}"
                break
        checked = {label for row in rows for label, failed in _failed(row) if failed and label in (a, b)}
        if checked:
            trouble = f"{' and '.join(sorted(checked))} failed the causality check"
        if not trouble and paired.n < 2:
            trouble = f"{paired.n} paired seeds give no interval"
        notes = [f"{found.diverged} runs of {found.label} diverged" for found in rows if found.diverged]
        notes += (
            ["on this test set only"]
            if row and b == self.manifest.baseline and row.scope == "this test set"
            else []
        )
        remark = ", ".join(notes)
        return Compared(f"{a} - {b}", paired, p, decision, trouble, remark, measure.name, measure.better)

    def compare_best(self, contest: Contest, arm: str, against: str) -> Compared:
        """Return the comparison of two arms at each run's best step; p is not adjusted."""
        last = self.compare(contest, arm, against)
        a, b = self.label(arm) or "", self.label(against) or ""
        ours, theirs = self.best[contest, a], self.best[contest, b]
        seeds = [seed for seed in self.manifest.seeds if seed in ours and seed in theirs]
        paired = compare_paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
        trouble = last.trouble
        if not trouble and len(seeds) < last.paired.n:
            trouble = "a run without evaluations during training has no best step"
        decision = decide(paired.difference, paired.p, None, None, 0.0, last.better)
        return replace(
            last,
            label=f"{last.label} at the best step",
            paired=paired,
            p=paired.p,
            decision="undecided" if "diverged" in last.remark else decision,
            trouble=trouble,
        )

    def unlearnt(self, contest: Contest, arms: Sequence[str]) -> str:
        """Return a message if, by the 95 % interval, all of the arms may be untrained in a contest, else an empty string."""
        labels = list(dict.fromkeys(self.label(arm) or "" for arm in arms))
        measure = self.manifest.measure(contest)
        for label in labels:
            values = list(self.values.get((contest, label), {}).values())
            mean = compare_paired(values, [0.0] * len(values))
            worst = mean.ci_low if measure.better == "higher" else mean.ci_high
            worst = mean.difference if worst is None else worst
            if worst is None or not is_untrained(worst, self.manifest, contest):
                return ""
        failing = NOTHING[measure.name == METRIC]
        return f"not decided, because all compared arms may {failing}: {', '.join(labels)}"

    def gaps(self, contest: Contest, arm: str, against: str) -> dict[int, float]:
        """Return arm - other by seed."""
        a, b = self.label(arm) or "", self.label(against) or ""
        ours, theirs = self.values.get((contest, a), {}), self.values.get((contest, b), {})
        return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}

    def group(self, over: str, first: Contest) -> list[Contest]:
        """Return the contests that differ from `first` only in `over`: size, tokens per parameter or context."""
        return next((group for group in groups(self.contests, over) if first in group), [first])


def _failed(row: Verdict) -> tuple[tuple[str, list[str]], ...]:
    return ((row.label, row.failed_check), (row.baseline_label, row.baseline_failed_check))


def _best_values(
    manifest: Manifest, contest: Contest, label: str, results: Mapping[str, RunResult]
) -> dict[int, float]:
    """Return the test score of an arm's runs at their best step by seed, for runs that have one."""
    metric = manifest.measure(contest).name
    runs = manifest.runs(contest, label)
    found = {seed: results[run].best_step(metric) for seed, run in runs.items() if run in results}
    return {seed: float(best.test[metric]) for seed, best in found.items() if best is not None}
