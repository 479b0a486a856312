"""A study's plan without models and data: contests, arms, seeds and run ids, for verdicts and reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, convert, to_builtins

from headtohead.common.errors import DamagedFile
from headtohead.common.schema import Stored, read_document
from headtohead.study.numerics import NUMERICS

METRIC = "bits_per_byte"
Finite = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]


@dataclass(frozen=True)
class Measure(Stored):
    """The metric of a comparison: its name, which direction is better, and the equivalence margin."""

    name: str = METRIC
    better: Literal["lower", "higher"] = "lower"
    margin: Finite | None = None
    """None: the study's."""


@dataclass(frozen=True)
class Contest(Stored):
    """One corpus or task, size, shape rule, length rule, context and branch; each contest has its own verdicts."""

    corpus: str
    corpus_label: str
    size: str
    shape: str
    length: str
    context: str = ""
    """Tokens in a window, if the study has several contexts."""
    branch: str = ""
    """Tokens of the baseline's branch, if the study has branches."""
    numerics: str = ""
    """The NUMERICS value of its runs; runs with different values are never compared. Empty for an external table without
    that column."""

    @property
    def outdated(self) -> bool:
        """Whether its runs were computed with another NUMERICS value than this version's."""
        return self.numerics not in ("", str(NUMERICS))

    @property
    def place(self) -> dict[str, str]:
        """The fields that identify the contest, by name; the corpus by its label."""
        names = ("size", "context", "branch", "shape", "length", "numerics")
        return {"corpus": self.corpus_label} | {name: getattr(self, name) for name in names}

    @property
    def title(self) -> str:
        """The contest as text."""
        return ", ".join(self._phrases.values())

    def title_among(self, others: Sequence[Contest]) -> str:
        """Return the part of the title that differs among `others`, or the whole title if nothing differs."""
        apart = [name for name in self._phrases if len({other.place[name] for other in others}) > 1]
        return ", ".join(self._phrases[name] for name in apart) or self.title

    @property
    def _phrases(self) -> dict[str, str]:
        forms = {
            "corpus": "{}",
            "size": "{}",
            "context": "context {}",
            "branch": "{} tokens",
            "shape": "shape {}",
            "length": "length {}",
            **({"numerics": "computed with numerics {}"} if self.outdated else {}),
        }
        return {name: form.format(self.place[name]) for name, form in forms.items() if self.place[name]}


@dataclass(frozen=True)
class Entry:
    """The run of one arm and seed in one contest."""

    run: str
    label: str
    seed: int
    contest: Contest


@dataclass(frozen=True)
class Rate(Stored):
    """Score of an arm on valid at one learning rate of its tuning, in the contest's metric."""

    corpus: str
    size: str
    shape: str
    label: str
    lr: Finite
    score: Finite | None
    chosen: bool
    edge: bool
    """Whether the arm's best rate is at the edge of the grid."""
    context: str = ""
    """Tokens in a window, if the study has several contexts."""
    seeds: int = 1
    """Runs at this rate; the score is their mean."""


@dataclass(frozen=True)
class Solved(Stored):
    """The number that a rule solved for an arm in a contest, and how closely it matches the baseline."""

    label: str
    contest: Contest
    rule: str
    what: str
    """The solved number: feed-forward width, kv heads, rows of a state, width or tokens."""
    before: Finite
    after: Finite
    held: str
    """The quantity that is held equal."""
    mine: Finite
    baseline: Finite
    note: str = ""

    @property
    def match(self) -> float:
        """The arm's value of the held quantity divided by the baseline's."""
        return self.mine / self.baseline if self.baseline else math.nan


@dataclass(frozen=True)
class Check(Stored):
    """Findings of the causality gate before training, for an arm with user code in one contest."""

    label: str
    contest: Contest
    failed: tuple[str, ...] = ()
    """Reasons to reject the arm; it was trained anyway."""
    marks: tuple[str, ...] = ()
    """Remarks that every verdict of the arm includes."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest(Stored):
    """All runs of a study by contest, arm and seed."""

    name: str
    arms: tuple[tuple[str, str], ...]
    """Text and label of each arm."""
    baseline: str
    primary: str | None
    margin: Finite
    seeds: tuple[int, ...]
    entries: tuple[Entry, ...]
    references: dict[str, dict[str, Finite]] = field(default_factory=dict)
    """Scores of trivial predictors by corpus label, in bits per byte or the task's metric."""
    tuning: tuple[Rate, ...] = ()
    """Every learning rate tried, if rates were tuned."""
    solved: tuple[Solved, ...] = ()
    """The numbers that the rules solved for each arm except the baseline."""
    probes: tuple[str, ...] = ()
    """Measurements on every trained run other than its loss."""
    trunks: tuple[Entry, ...] = ()
    """The runs that branches start from; their contests are those of the branches with `branch` empty."""
    statistics: dict[str, dict[str, Finite | None]] = field(default_factory=dict)
    """Statistics of each corpus by label, if there are several corpora."""
    measures: dict[str, Measure] = field(default_factory=dict)
    """Metrics of tasks by label; corpora use bits per byte."""
    notes: tuple[str, ...] = ()
    """Counts of the examples that tasks leave out, with the reason."""
    flops: dict[str, str] = field(default_factory=dict)
    """How each arm's FLOPs were obtained, by its label: declared or counted."""
    checks: tuple[Check, ...] = ()
    """Findings of the causality gate in arms with user code."""

    def measure(self, contest: Contest) -> Measure:
        """Return the metric and margin of a contest."""
        return self.measures.get(contest.corpus_label, Measure())

    def check(self, contest: Contest, label: str) -> Check:
        """Return the gate's findings for an arm before training; empty for arms without user code."""
        found = (row for row in self.checks if row.label == label and row.contest == contest)
        return next(found, Check(label, contest))

    def rates(self, contest: Contest) -> list[Rate]:
        """Return every learning rate tried for a contest; its branches share them."""
        place = (contest.corpus, contest.size, contest.shape, contest.context)
        return [rate for rate in self.tuning if (rate.corpus, rate.size, rate.shape, rate.context) == place]

    def contests(self) -> list[Contest]:
        """Return the contests in order."""
        return list(self._contests)

    @cached_property
    def _contests(self) -> tuple[Contest, ...]:
        return tuple(dict.fromkeys(entry.contest for entry in self.entries))

    def runs(self, contest: Contest, label: str) -> dict[int, str]:
        """Return run ids by seed."""
        return self._run_ids.get((contest, label), {})

    def trunk_runs(self, contest: Contest, label: str) -> dict[int, str]:
        """Return by seed the ids of the trunks that an arm's runs branch from, empty in a contest without branches."""
        if not contest.branch:
            return {}
        place, trunk = replace(contest, branch=""), trunk_label(label)
        return {
            entry.seed: entry.run for entry in self.trunks if entry.label == trunk and entry.contest == place
        }

    @cached_property
    def _run_ids(self) -> dict[tuple[Contest, str], dict[int, str]]:
        found: dict[tuple[Contest, str], dict[int, str]] = {}
        for entry in self.entries:
            found.setdefault((entry.contest, entry.label), {})[entry.seed] = entry.run
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON-compatible values."""
        record: dict[str, Any] = to_builtins(self)
        for name in ("trunks", "measures", "notes", "flops", "checks"):
            if not record[name]:
                del record[name]
        return record


def trunk_label(label: str) -> str:
    """Return the label of the trunks of an arm."""
    return f"{label}, trunk"


def flops_label(sources: dict[str, str]) -> str:
    """Return a sentence on how the FLOPs of each arm were obtained, from sources by label."""
    listed = ", ".join(f"{source} for {label}" for label, source in sources.items())
    bound = "a count is an upper bound for code that computes masked values (windows, sparse patterns)"
    return f"FLOPs are {listed}; {bound}"


def read_manifest(path: Path) -> tuple[Manifest, frozenset[int]]:
    """Return the manifest in a study.json and the seeds added after results existed; raise DamagedFile if damaged."""
    remedy = "the study's own command writes it again"
    try:
        record = read_document(path)
    except DamagedFile as error:
        raise DamagedFile(f"{error}; {remedy}") from None
    try:
        added = frozenset(int(seed) for seed in record.get("added_seeds", ()))
        return manifest_from(record["outline"]), added
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(f"damaged file {path}: {type(error).__name__}: {error}; {remedy}") from None


def rename_scores(tuning: Any) -> None:
    """Name the scores of tuned rates as this version does; older studies only have corpora."""
    for row in tuning:
        if "score" not in row:
            row["score"] = row.pop("bits_per_byte")


def manifest_from(record: Any) -> Manifest:
    """Return the manifest from the values of `as_dict`; raise if they are invalid."""
    for group in ("entries", "trunks", "solved", "checks"):
        for row in record.get(group, ()):
            row["contest"].setdefault("numerics", "1")  # studies written with NUMERICS 1 do not record it
    rename_scores(record.get("tuning", ()))
    manifest: Manifest = convert(record, Manifest)
    if manifest.baseline not in {label for _, label in manifest.arms}:
        raise ValueError(f"the baseline {manifest.baseline!r} is not an arm")
    # One object for all entries of a contest: comparing and hashing ten thousand copies takes seconds.
    shared: dict[Contest, Contest] = {}
    for row in (*manifest.entries, *manifest.trunks):
        object.__setattr__(row, "contest", shared.setdefault(row.contest, row.contest))
    return manifest


_METRIC_LABELS = {
    METRIC: "bits per byte",
    "macro_f1": "macro-F1",
    "f1": "F1",
    "exact_match": "exact match",
    "matthews": "Matthews correlation",
}


def metric_label(metric: str) -> str:
    """Return the display name of a metric; unknown metrics keep their name."""
    return _METRIC_LABELS.get(metric, metric)
