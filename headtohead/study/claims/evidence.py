"""A study's verdicts in the form that claims are judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from headtohead.study.claims.criteria import PLACE, At, RunCriterion
from headtohead.study.claims.outcome import Compared
from headtohead.study.claims.scale import other_scale
from headtohead.study.config.spec import StudySpec
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.statistics import Paired, compare_by_seed, compare_paired, decide, holm
from headtohead.study.judge.trends import groups
from headtohead.study.judge.verdict import NOTHING, Verdict, is_untrained
from headtohead.study.store.manifest import METRIC, Contest


class Evidence:
    """The verdicts of one study of a paper, with the comparisons that the claims' criteria about it need."""

    def __init__(self, criteria: Sequence[RunCriterion], spec: StudySpec, study: Analysis) -> None:
        manifest = study.manifest
        self.criteria, self.spec, self.manifest, self.results = criteria, spec, manifest, study.results
        self.axes = study.axes
        self.contests = manifest.contests()
        self.rows: dict[tuple[Contest, str], Verdict] = {}
        self.values: dict[tuple[Contest, str], dict[int, float]] = {}
        """The score of each seed, by contest and label."""
        for contest in self.contests:
            for row in study.verdicts:
                if row.of(contest):
                    self.rows[contest, row.label] = row
                    self.values[contest, row.label] = dict(zip(row.seeds, row.values, strict=True))
                    base = self.values.setdefault((contest, manifest.baseline), {})
                    base.update(zip(row.seeds, row.baseline_values, strict=True))
        self.found = cache(study.probe)  # read from a file, like curves
        self.curve = cache(study.curve)
        self.adjusted = self._adjusted()

    def label(self, arm: str) -> str | None:
        """Return the label of an arm, the baseline's if `arm` is empty, or None if the study has no such arm."""
        if not arm:
            return self.manifest.baseline
        return next((label for text, label in self.manifest.arms if arm in (text, label)), None)

    def contest(self, place: Mapping[str, tuple[str, ...]]) -> Contest | None:
        """Return the contest with the given fields; fields not given default to the study's first."""
        found = self.contests
        for key in PLACE:
            here = [getattr(contest, key) for contest in found]
            wanted = next((value for value in place.get(key, here) if value in here), None)
            found = [contest for contest in found if getattr(contest, key) == wanted]
        return found[0] if found else None

    def marks(self, contests: Sequence[Contest], arms: Sequence[str]) -> list[str]:
        """Return the marks of the verdicts in these contests, without those about other arms than the given ones."""
        labels = {self.label(arm) for arm in arms}
        found: dict[str, None] = {}
        for contest, label in self.rows:
            if contest in contests and (label in labels or labels == {self.manifest.baseline}):
                row = self.rows[contest, label]
                others = [about for name, about in row.marks_about.items() if name not in labels]
                found |= dict.fromkeys(
                    mark for mark in row.marks if not any(mark in about for about in others)
                )
        return list(found)

    def runs(self, contests: Sequence[Contest], arms: Sequence[str]) -> list[str]:
        """Return the ids of the arms' runs."""
        labels = [self.label(arm) or "" for arm in arms]
        found = (self.manifest.runs(contest, label) for contest in contests for label in labels)
        return [run for by_seed in found for run in by_seed.values()]

    def other_scale(self, at: At, contests: Sequence[Contest], arm: str) -> str:
        """Return how an arm's training here differs from the published one, or an empty string."""
        return other_scale(self, at, contests, arm)

    def _adjusted(self) -> dict[tuple[Contest, str, str], float | None]:
        """Return Holm-adjusted p values, per contest, of the claims' comparisons that have no verdict."""
        pairs: dict[Contest, dict[tuple[str, str], None]] = {}
        for criterion in self.criteria:
            contest = self.contest(criterion.place)
            for arm, against in criterion.pairs if contest is not None else ():
                a, b = self.label(arm), self.label(against)
                if contest is not None and a is not None and b is not None and b != self.manifest.baseline:
                    pairs.setdefault(contest, {})[a, b] = None
        return {
            (contest, a, b): p
            for contest, names in pairs.items()
            for (a, b), p in zip(names, holm([self._paired(contest, *pair).p for pair in names]), strict=True)
        }

    def _paired(self, contest: Contest, a: str, b: str) -> Paired:
        return compare_by_seed(self.values.get((contest, a), {}), self.values.get((contest, b), {}))

    def sides(
        self, contest: Contest, arm: str, against: str
    ) -> tuple[str, str, dict[int, float], dict[int, float]]:
        """Return the labels of two arms and their scores by seed."""
        a, b = self.label(arm) or "", self.label(against) or ""
        return a, b, self.values.get((contest, a), {}), self.values.get((contest, b), {})

    def gaps(self, contest: Contest, arm: str, against: str) -> dict[int, float]:
        """Return arm - other by seed."""
        _, _, ours, theirs = self.sides(contest, arm, against)
        return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}

    def compare(self, contest: Contest, arm: str, against: str) -> Compared:
        """Return the comparison of two arms in a contest, with its problems and remarks."""
        a, b, *_ = self.sides(contest, arm, against)
        paired = self._paired(contest, a, b)
        row, other = self.rows.get((contest, a)), self.rows.get((contest, b))
        with_baseline = b == self.manifest.baseline
        p = row.p_holm if row and with_baseline else self.adjusted.get((contest, a, b))
        measure = self.manifest.measure(contest)
        decision = decide(paired.difference, p, None, None, 0.0, measure.better)
        # The runs that did not diverge are not representative: they may show the arm worse, never better.
        doubted = {"better": row, "worse": other}.get(decision)
        if doubted and doubted.diverged:
            decision = "undecided"
        rows = [found for found in (row, other) if found]
        notes = [f"{found.diverged} runs of {found.label} diverged" for found in rows if found.diverged]
        if row and with_baseline and row.scope == "this test set":
            notes.append("on this test set only")
        trouble = self._trouble(rows, (a, b)) or (
            f"{paired.n} paired seeds give no interval" if paired.n < 2 else ""
        )
        return Compared(
            f"{a} - {b}", paired, p, decision, trouble, ", ".join(notes), measure.name, measure.better
        )

    @staticmethod
    def _trouble(rows: Sequence[Verdict], labels: tuple[str, str]) -> str:
        """Return why the runs of two arms cannot be compared, or an empty string."""
        checks = [
            check
            for row in rows
            for check in ((row.label, row.failed_check), (row.baseline_label, row.baseline_failed_check))
        ]
        if checked := {label for label, failed in checks if failed and label in labels}:
            return f"{' and '.join(sorted(checked))} failed the causality check"
        for state, words in (("missing", "are not finished"), ("failed", "failed")):
            if count := sum(getattr(row, state) for row in rows):
                return f"{count} runs {words}"
        return ""

    def compare_best(self, contest: Contest, arm: str, against: str) -> Compared:
        """Return the comparison of two arms at each run's best step; p is not adjusted."""
        last = self.compare(contest, arm, against)
        a, b, *_ = self.sides(contest, arm, against)
        paired = compare_by_seed(self._best(contest, a), self._best(contest, b))
        trouble = last.trouble
        if not trouble and paired.n < last.paired.n:
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

    def _best(self, contest: Contest, label: str) -> dict[int, float]:
        """Return the test score of an arm's runs at their best step by seed, for runs that have one."""
        metric = self.manifest.measure(contest).name
        runs = self.manifest.runs(contest, label)
        found = {
            seed: self.results[run].best_step(metric) for seed, run in runs.items() if run in self.results
        }
        return {seed: float(best.test[metric]) for seed, best in found.items() if best is not None}

    def untrained(self, contest: Contest, arms: Sequence[str]) -> str:
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

    def group(self, over: str, first: Contest) -> list[Contest]:
        """Return the contests that differ from `first` only in `over`: size, tokens per parameter or context."""
        return next((group for group in groups(self.contests, over) if first in group), [first])
