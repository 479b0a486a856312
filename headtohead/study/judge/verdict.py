"""Verdicts: the result of each arm's comparison with the baseline, as far as the statistics support one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev

import numpy as np

from headtohead.common.schema import Plain
from headtohead.common.text import counted
from headtohead.study.judge.statistics import (
    ALPHA,
    compare_paired,
    decide,
    document_interval,
    holm,
    two_groups,
)
from headtohead.study.judge.trust import failed_check_label, weaken
from headtohead.study.store.history import NO_MARKS, Marks
from headtohead.study.store.manifest import METRIC, Contest, Manifest, Measure, metric_label
from headtohead.study.store.result import Blocks, RunResult

_VERDICTS = ("better", "worse", "equivalent", "undecided")
MAX_LISTED = 4
"""A headline lists up to this many contests; with more, it gives the first and the counts."""


@dataclass(kw_only=True)
class Verdict(Plain):
    """The comparison of one arm with the baseline in one contest."""

    arm: str
    baseline: str
    corpus: str
    size: str
    shape: str
    length: str
    metric: str
    n: int
    mean: float | None
    baseline_mean: float | None
    difference: float | None
    ci_low: float | None
    ci_high: float | None
    p: float | None
    p_holm: float | None = None
    margin: float
    detectable: float | None
    primary: bool = False
    verdict: str = "undecided"
    equivalence_low: float | None = None
    equivalence_high: float | None = None
    label: str = ""
    baseline_label: str = ""
    seeds: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    baseline_values: list[float] = field(default_factory=list)
    correlation: float | None = None
    documents_low: float | None = None
    documents_high: float | None = None
    scope: str = "seeds and documents"
    """What the verdict generalizes to: new seeds and documents, or only `this test set` if documents disagree."""
    diverged: int = 0
    failed: int = 0
    missing: int = 0
    added_seeds: list[int] = field(default_factory=list)
    unlearnt: int = 0
    """Runs of the arm that do not beat the bigram line, or on a task a constant answer."""
    baseline_unlearnt: int = 0
    baseline_diverged: int = 0
    falling: int = 0
    """Runs, including the baseline's, whose loss was still falling steeply at the end."""
    moved: int = 0
    """Runs, including the baseline's, that were resumed with another torch version, device or number of threads."""
    notes: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    """The notes that are part of every sentence about the verdict."""
    marks_about: dict[str, list[str]] = field(default_factory=dict)
    """Those of the marks that are about the runs of one arm, by its label."""
    better: str = "lower"
    """Whether a lower or a higher metric is better."""
    context: str = ""
    """Set if the study has several contexts; likewise `branch`."""
    branch: str = ""
    numerics: str = ""
    """The numerics version of both sides; empty in a table without that column."""
    failed_check: list[str] = field(default_factory=list)
    """The causality gate's findings for the arm, before and after training."""
    baseline_failed_check: list[str] = field(default_factory=list)
    flops_source: str = ""
    """How the arm's FLOPs were obtained: declared or counted."""
    baseline_flops_source: str = ""

    def mark(self, note: str, about: str = "") -> None:
        """Add a note that is part of every sentence about the verdict; `about` is the label of the arm that it is about."""
        self.notes.append(note)
        self.marks.append(note)
        if about:
            self.marks_about.setdefault(about, []).append(note)

    def of(self, contest: Contest) -> bool:
        """Return whether the verdict belongs to the contest."""
        return all(getattr(self, name) == value for name, value in contest.place.items())


def study_verdicts(
    manifest: Manifest,
    results: Mapping[str, RunResult],
    marks: Marks = NO_MARKS,
    measure: Measure | None = None,
) -> list[Verdict]:
    """Return one verdict per contest and arm other than the baseline, from results by run id.

    `marks` are the changes made after results existed, from the study's history. By default each contest is judged by its
    own measure. Holm's correction counts every comparison ever reported in a contest.
    """
    verdicts = []
    for contest in manifest.contests():
        used = measure or manifest.measure(contest)
        rows = [
            _compare(manifest, contest, text, label, results, marks, used)
            for text, label in manifest.arms
            if label != manifest.baseline
        ]
        arm_notes = {
            label: [
                *([marks.changed_arms[label]] if label in marks.changed_arms else []),
                *_copy_notes(manifest, contest, label, marks.copied),
                *_rate_notes(manifest, contest, label, results, used.name),
            ]
            for _, label in manifest.arms
        }
        dropped = marks.dropped.get(contest.title, ())
        for row, p in zip(rows, holm([*(row.p for row in rows), *dropped]), strict=False):
            row.p_holm = p
            _judge(row)
            weaken(row, manifest, contest, results)
            if row.added_seeds:
                row.mark(f"seeds {', '.join(map(str, row.added_seeds))} were added after results existed")
            if (contest.title, row.label) in marks.added_arms:
                row.mark("this arm was added after results existed", row.label)
            if dropped:
                row.mark(
                    f"Holm's correction also counts {len(dropped)} comparisons that were reported and later dropped"
                )
            if contest.outdated:
                row.mark(f"computed with numerics {contest.numerics}")
            for note in marks.notes:
                row.mark(note)
            for label in (row.label, row.baseline_label):
                for note in arm_notes[label]:
                    row.mark(note, label)
        verdicts += rows
    planned = marks.primary in ("", manifest.primary)
    primary = next((row for row in verdicts if row.label == manifest.primary and planned), None)
    for row in verdicts:
        row.primary = row is primary
        if not row.primary:
            row.notes.append("exploratory")
        if row.label == manifest.primary and not planned:
            row.mark("became the primary comparison after results existed", row.label)
    return verdicts


def _value(result: RunResult | None, metric: str) -> float | None:
    score = None if result is None else result.tested
    return None if score is None else float(score.values[metric])


def _compare(
    manifest: Manifest,
    contest: Contest,
    text: str,
    label: str,
    results: Mapping[str, RunResult],
    marks: Marks,
    measure: Measure,
) -> Verdict:
    ours, theirs = (
        {seed: results.get(run) for seed, run in manifest.runs(contest, name).items()}
        for name in (label, manifest.baseline)
    )
    pairs = [
        (seed, a, b)
        for seed in manifest.seeds
        if (a := _value(ours.get(seed), measure.name)) is not None
        and (b := _value(theirs.get(seed), measure.name)) is not None
    ]
    seeds = [seed for seed, _, _ in pairs]
    mine, base_values = [a for _, a, _ in pairs], [b for _, _, b in pairs]
    paired = compare_paired(mine, base_values)
    mine_by, base_by = (_blocks(part, seeds, measure.name) for part in (ours, theirs))
    documents = document_interval(mine_by, base_by, _UNITS.get(measure.name, 1.0)) or (None, None)
    status, base_status = (
        ["missing" if result is None else result.status for result in part.values()]
        for part in (ours, theirs)
    )
    both = [*ours.values(), *theirs.values()]
    falls = [result.late_fall for part in (ours, theirs) for seed in seeds if (result := part[seed])]
    return Verdict(
        arm=text,
        baseline=next(other for other, name in manifest.arms if name == manifest.baseline),
        **contest.place,  # type: ignore[arg-type]
        **vars(paired),
        metric=measure.name,
        better=measure.better,
        mean=sum(mine) / len(mine) if mine else None,
        baseline_mean=sum(base_values) / len(base_values) if base_values else None,
        margin=manifest.margin if measure.margin is None else measure.margin,
        label=label,
        baseline_label=manifest.baseline,
        seeds=seeds,
        values=mine,
        baseline_values=base_values,
        documents_low=documents[0],
        documents_high=documents[1],
        diverged=status.count("diverged"),
        failed=sum(state not in ("done", "diverged", "missing") for state in status),
        missing=status.count("missing"),
        added_seeds=sorted(marks.added_seeds.intersection(seeds)),
        unlearnt=sum(is_untrained(value, manifest, contest) for value in mine),
        baseline_unlearnt=sum(is_untrained(value, manifest, contest) for value in base_values),
        baseline_diverged=base_status.count("diverged"),
        falling=sum(fall is not None and fall > STEEP for fall in falls),
        moved=sum(bool(result and result.environment_changed) for result in both),
    )


def is_untrained(value: float, manifest: Manifest, contest: Contest) -> bool:
    """Return whether a bigram model, or on a task a constant answer, scores at least as well on the test split.

    On a task the score must exceed that line by more than the margin.
    """
    line = untrained_line(manifest, contest)
    if line is None:
        return False
    if _is_task(manifest, contest):
        return value <= line + (manifest.measure(contest).margin or 0.0)
    return value >= line


def untrained_line(manifest: Manifest, contest: Contest) -> float | None:
    """Return the score a model must beat to count as trained: the bigram line, or the best of a task's trivial answers."""
    lines = manifest.references.get(contest.corpus_label, {})
    if _is_task(manifest, contest):
        return max(lines.values())
    return lines.get("bigram", lines.get("unigram"))


def _is_task(manifest: Manifest, contest: Contest) -> bool:
    return "majority class" in manifest.references.get(contest.corpus_label, {})


STEEP = 0.1
"""A loss is falling steeply if the second half of training lowered it by more than this share."""


_UNITS = {METRIC: math.log(2)}
"""Divisor that converts the sums of blocks to the metric; a loss is stored in nats."""


_NO_BLOCKS: Blocks = np.empty((0, 2))


def _blocks(results: Mapping[int, RunResult | None], seeds: list[int], metric: str) -> list[Blocks]:
    """Return the blocks of each seed; a task has blocks for each metric that is a mean over examples."""
    found = [results[seed] for seed in seeds]
    scores = [result.test for result in found if result is not None and result.test is not None]
    return [score.blocks.get(metric, _NO_BLOCKS) for score in scores]


_WITHHELD = " is withheld: "
_LONGER = "train longer"
NOTHING = {
    True: "score no better than a bigram model (the bigram line)",
    False: "score no better than chance or a constant answer",
}


def _judge(row: Verdict) -> None:
    """Decide after Holm's correction, then withhold what the data do not support."""
    row.verdict = decide(
        row.difference, row.p_holm, row.equivalence_low, row.equivalence_high, row.margin, row.better
    )
    note = row.notes.append
    if row.n < 2:
        note(f"{row.n} paired seeds give no interval")
    elif row.n == 2:
        note("an interval from two seeds depends entirely on the assumption of a normal distribution")
    if row.p is not None and row.p_holm is not None and row.p < ALPHA <= row.p_holm:
        note(f"p is {row.p:.2g} before and {row.p_holm:.2g} after Holm's correction for several arms")
    if row.n >= 2 and row.p is None:
        note("the difference is the same for every seed; with zero spread no test is possible")
    if row.diverged:
        note(f"{row.diverged} of its runs diverged")
    if row.baseline_diverged:
        note(f"{row.baseline_diverged} runs of the baseline diverged")
    if row.diverged or row.baseline_diverged:
        _withhold(row, _VERDICTS[:3], "the runs that did not diverge are not representative")
    if (groups := two_groups(row.values)) is not None:
        note(f"its seeds may form two groups, up to {groups[0]:.3f} and from {groups[1]:.3f}")
    if row.failed:
        note(f"{row.failed} of its runs failed")
    if row.missing:
        note(f"{row.missing} of its runs are not finished")
    untrained = f"are untrained: they {NOTHING[row.metric == METRIC]}"
    if row.unlearnt:
        note(f"{row.unlearnt} of its runs {untrained}")
        _withhold(
            row, ("better", "equivalent"), f"an untrained arm can be neither better nor equivalent; {_LONGER}"
        )
    if row.baseline_unlearnt:
        note(f"{row.baseline_unlearnt} runs of the baseline {untrained}")
        reason = f"compared with an untrained baseline an arm can be neither worse nor equivalent; {_LONGER}"
        _withhold(row, ("worse", "equivalent"), reason)
    compared = "of the compared runs"
    if row.falling:
        note(f"the loss of {row.falling} {compared} was still falling steeply at the end; {_LONGER}")
    if row.moved:
        note(f"{row.moved} {compared} were resumed with another torch version, device or number of threads")
    low, high = row.documents_low, row.documents_high
    if row.verdict in ("better", "worse") and low is not None and high is not None and low <= 0 <= high:
        row.scope = "this test set"
        parts = "documents" if row.metric == METRIC else "examples"
        note(f"on this test set only: the interval over its {parts} includes 0")
    if row.verdict in ("better", "worse") and row.difference is not None and abs(row.difference) < row.margin:
        note(f"a significant difference, but within the margin of {row.margin:g}")


def _rate_notes(
    manifest: Manifest, contest: Contest, label: str, results: Mapping[str, RunResult], metric: str
) -> list[str]:
    """Return what is doubtful about the rate that was chosen for an arm: at an edge of the grid, or by less than the noise.

    Two means over `seeds` trials differ by chance by the standard deviation of the arm's score over seeds times
    sqrt(2 / seeds).
    """
    rates = [rate for rate in manifest.rates(contest) if rate.label == label]
    best = next((rate for rate in rates if rate.chosen), None)
    if best is None:
        return []
    notes = [f"the best learning rate of {best.label} is at the edge of the grid"] if best.edge else []
    score = math.nan if best.score is None else best.score
    leads = {
        rate.lr: abs(rate.score - score) for rate in rates if rate.score is not None and rate is not best
    }
    scores = (_value(results.get(run), metric) for run in manifest.runs(contest, label).values())
    values = [value for value in scores if value is not None]
    if leads and len(values) > 1:
        second, noise = min(leads, key=leads.__getitem__), stdev(values) * math.sqrt(2 / best.seeds)
        if leads[second] < noise:
            notes.append(
                f"the learning rate of {best.label} could as well be {second:g}: {best.lr:g} leads by {leads[second]:.2g} on "
                f"valid, less than the noise of its trials ({noise:.2g}); tune with more seeds"
            )
    return notes


def _copy_notes(manifest: Manifest, contest: Contest, label: str, copied: Mapping[str, str]) -> list[str]:
    """Return for how many seeds the run of an arm, or the trunk that it branches from, was copied from another study."""
    trunks = manifest.trunk_runs(contest, label)
    origins = [
        study
        for seed, run in manifest.runs(contest, label).items()
        if (study := copied.get(run) or copied.get(trunks.get(seed, "")))
    ]
    if not origins:
        return []
    runs, studies = counted(len(origins), "run"), ", ".join(dict.fromkeys(origins))
    return [f"{runs} of {label} copied from another study, whose results were known before: {studies}"]


def _withhold(row: Verdict, verdicts: Sequence[str], reason: str) -> None:
    """Replace the given verdicts by `undecided` and note the reason."""
    if row.verdict in verdicts:
        row.notes.append(f"{row.verdict}{_WITHHELD}{reason}")
        row.verdict = "undecided"


def sentence(row: Verdict, among: Sequence[Verdict] = ()) -> str:
    """Return the verdict as a sentence; corpus, size, context and branch are named if they differ in `among`."""
    return f"{_clause(row, among, first=True)}."


def _clause(row: Verdict, among: Sequence[Verdict], first: bool = False) -> str:
    """Return the verdict as the first clause of a sentence about an arm, or as a further one."""
    where = _where(row, among)
    marked = f" [{'; '.join(row.marks)}]" if row.marks else ""
    if row.difference is None:
        return f"{f'{row.label}: ' if first else ''}no finished pair of runs yet{where}"
    if row.verdict in ("better", "worse"):
        start = f"{row.label} is {row.verdict} than {row.baseline_label}" if first else row.verdict
        return f"{start}{_by(row)}{where}{marked}"
    if row.verdict == "equivalent":
        start = f"{row.label} is equivalent to {row.baseline_label}" if first else "equivalent"
        unit = f" {metric_label(row.metric)}" if first else ""
        return f"{start} within {row.margin:g}{unit}{where}{marked}"
    start = f"{row.label} against {row.baseline_label} is undecided" if first else "undecided"
    withheld = "".join(f"; {note}" for note in row.notes if _WITHHELD in note)
    return f"{start}{where}{_span(row)}{withheld}{marked}"


def headlines(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """Return one sentence per arm over all its contests, with their common verdict or `mixed`.

    With more than MAX_LISTED contests, the sentence gives the first and counts the verdicts of all.
    """
    lines = []
    for label in dict.fromkeys(row.label for row in verdicts):
        rows = [row for row in verdicts if row.label == label]
        first = _clause(rows[0], verdicts, first=True)
        many = len(rows) > MAX_LISTED
        rest = [_counted(rows)] if many else [_clause(row, verdicts) for row in rows[1:]]
        found = {row.verdict for row in rows}
        lines.append((found.pop() if len(found) == 1 else "mixed", f"{'; '.join([first, *rest])}."))
    return lines


def _counted(rows: Sequence[Verdict]) -> str:
    """Return the number of contests of an arm with each verdict."""
    judged = [row for row in rows if row.difference is not None]
    counts = {word: sum(row.verdict == word for row in judged) for word in _VERDICTS}
    parts = [f"{word} in {number}" for word, number in counts.items() if number]
    if len(judged) < len(rows):
        parts.append(f"no finished pair of runs yet in {len(rows) - len(judged)}")
    return f"of all {len(rows)} contests, {', '.join(parts)}"


def _by(row: Verdict) -> str:
    if row.ci_low is None or row.ci_high is None:
        return ""
    low, high = sorted((abs(row.ci_low), abs(row.ci_high)))
    form = _form(row)
    return f" by {low:{form}} to {high:{form}} {metric_label(row.metric)}"


def _span(row: Verdict) -> str:
    if row.ci_low is None:
        return ""
    form = _form(row)
    return f" (between {row.ci_low:+{form}} and {row.ci_high:+{form}} {metric_label(row.metric)})"


def _form(row: Verdict) -> str:
    # Metrics other than bits per byte can have any magnitude.
    return ".3f" if row.metric == METRIC else ".3g"


def _where(row: Verdict, among: Sequence[Verdict]) -> str:
    """Return what was held equal, and the corpus, size, context and branch if there are several."""
    length = {"time_plain": "plain-path time"}.get(row.length, row.length)
    shape = {"as_is": "", "params": " and parameters"}.get(row.shape, f" and {row.shape}")
    scope = " on this test set" if row.scope == "this test set" else ""
    forms = {
        "corpus": "{}",
        "size": "{}",
        "context": "context {}",
        "branch": "{} tokens",
        "numerics": "numerics {}",
    }
    names = [
        form.format(getattr(row, key))
        for key, form in forms.items()
        if len({getattr(other, key) for other in among}) > 1
    ]
    place = f" ({', '.join(names)})" if names else ""
    # A table of runs trained elsewhere may not state what was held equal.
    return (f" at equal {length}{shape}" if row.length else "") + place + scope + failed_check_label(row)
