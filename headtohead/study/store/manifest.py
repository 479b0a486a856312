"""A study's plan without models and data: contests, arms, seeds and run ids, for verdicts and reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from headtohead.common.errors import DamagedFile
from headtohead.common.numbers import is_number
from headtohead.common.schema import read_document
from headtohead.study.numerics import NUMERICS

METRIC = "bits_per_byte"


@dataclass(frozen=True)
class Measure:
    """The metric of a comparison: its name, which direction is better, and the equivalence margin."""

    name: str = METRIC
    better: str = "lower"
    """lower or higher."""
    margin: float | None = None
    """None: the study's."""


@dataclass(frozen=True)
class Contest:
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
class Rate:
    """Score of an arm on valid at one learning rate of its tuning, in the contest's metric."""

    corpus: str
    size: str
    shape: str
    label: str
    lr: float
    score: float | None
    chosen: bool
    edge: bool
    """Whether the arm's best rate is at the edge of the grid."""
    context: str = ""
    """Tokens in a window, if the study has several contexts."""


@dataclass(frozen=True)
class Solved:
    """The number that a rule solved for an arm in a contest, and how closely it matches the baseline."""

    label: str
    contest: Contest
    rule: str
    what: str
    """The solved number: feed-forward width, kv heads, width or tokens."""
    before: float
    after: float
    held: str
    """The quantity that is held equal."""
    mine: float
    baseline: float
    note: str = ""

    @property
    def match(self) -> float:
        """The arm's value of the held quantity divided by the baseline's."""
        return self.mine / self.baseline if self.baseline else math.nan


@dataclass(frozen=True)
class Check:
    """Findings of the causality gate before training, for an arm with user code in one contest."""

    label: str
    contest: Contest
    failed: tuple[str, ...] = ()
    """Reasons to reject the arm; it was trained anyway."""
    marks: tuple[str, ...] = ()
    """Remarks that every verdict of the arm includes."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """All runs of a study by contest, arm and seed."""

    name: str
    arms: tuple[tuple[str, str], ...]
    """Text and label of each arm."""
    baseline: str
    primary: str | None
    margin: float
    seeds: tuple[int, ...]
    entries: tuple[Entry, ...]
    references: dict[str, dict[str, float]] = field(default_factory=dict)
    """Scores of trivial predictors by corpus label, in bits per byte or the task's metric."""
    tuning: tuple[Rate, ...] = ()
    """Every learning rate tried, if rates were tuned."""
    solved: tuple[Solved, ...] = ()
    """The numbers that the rules solved for each arm except the baseline."""
    probes: tuple[str, ...] = ()
    """Measurements on every trained run other than its loss."""
    trunks: tuple[Entry, ...] = ()
    """The runs that branches start from; their contests are those of the branches with `branch` empty."""
    statistics: dict[str, dict[str, float | None]] = field(default_factory=dict)
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

    def contests(self) -> list[Contest]:
        """Return the contests in order."""
        return list(self._contests)

    @cached_property
    def _contests(self) -> tuple[Contest, ...]:
        return tuple(dict.fromkeys(entry.contest for entry in self.entries))

    def runs(self, contest: Contest, label: str) -> dict[int, str]:
        """Return run ids by seed."""
        return self._run_ids.get((contest, label), {})

    @cached_property
    def _run_ids(self) -> dict[tuple[Contest, str], dict[int, str]]:
        found: dict[tuple[Contest, str], dict[int, str]] = {}
        for entry in self.entries:
            found.setdefault((entry.contest, entry.label), {})[entry.seed] = entry.run
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON-compatible values."""
        entries, trunks = (
            [{**vars(entry), "contest": dict(vars(entry.contest))} for entry in group]
            for group in (self.entries, self.trunks)
        )
        return {
            "name": self.name,
            "arms": [list(arm) for arm in self.arms],
            "baseline": self.baseline,
            "primary": self.primary,
            "margin": self.margin,
            "seeds": list(self.seeds),
            "entries": entries,
            "references": self.references,
            "tuning": [dict(vars(row)) for row in self.tuning],
            **({"trunks": trunks} if trunks else {}),
            "solved": [{**vars(row), "contest": dict(vars(row.contest))} for row in self.solved],
            "probes": list(self.probes),
            "statistics": self.statistics,
            **(
                {"measures": {label: vars(row) for label, row in self.measures.items()}}
                if self.measures
                else {}
            ),
            **({"notes": list(self.notes)} if self.notes else {}),
            **({"flops": self.flops} if self.flops else {}),
            **(
                {"checks": [{**vars(row), "contest": dict(vars(row.contest))} for row in self.checks]}
                if self.checks
                else {}
            ),
        }


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
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedFile(f"damaged file {path}: {type(error).__name__}: {error}; {remedy}") from None


def manifest_from(record: dict[str, Any]) -> Manifest:
    """Return the manifest from the values of `as_dict`; raise if they are invalid."""
    # Older studies have no trunks.
    entries, trunks = (
        tuple(
            Entry(_text(row["run"]), _text(row["label"]), int(row["seed"]), _contest(row["contest"]))
            for row in (record["entries"] if group == "entries" else record.get(group, ()))
        )
        for group in ("entries", "trunks")
    )
    arms = tuple((_text(text), _text(label)) for text, label in record["arms"])
    manifest = Manifest(
        name=_text(record["name"]),
        arms=arms,
        baseline=_text(record["baseline"]),
        primary=None if record["primary"] is None else _text(record["primary"]),
        margin=_number(record["margin"]),
        seeds=tuple(int(seed) for seed in record["seeds"]),
        entries=entries,
        references={
            _text(key): {_text(name): _number(value) for name, value in lines.items()}
            for key, lines in record["references"].items()
        },
        tuning=tuple(_rate(row) for row in record.get("tuning", ())),
        # Older studies have no such key.
        solved=tuple(_solved(row) for row in record.get("solved", ())),
        probes=tuple(_text(name) for name in record.get("probes", ())),
        trunks=trunks,
        statistics={
            _text(label): {
                _text(name): None if value is None else _number(value) for name, value in row.items()
            }
            for label, row in record.get("statistics", {}).items()
        },
        notes=tuple(_text(note) for note in record.get("notes", ())),
        flops={_text(label): _text(source) for label, source in record.get("flops", {}).items()},
        checks=tuple(_check(row) for row in record.get("checks", ())),
        measures={_text(label): _measure(row) for label, row in record.get("measures", {}).items()},
    )
    if manifest.baseline not in {label for _, label in arms}:
        raise ValueError(f"the baseline {manifest.baseline!r} is not an arm")
    return manifest


def _measure(row: dict[str, Any]) -> Measure:
    margin = None if row["margin"] is None else _number(row["margin"])
    if row["better"] not in ("lower", "higher"):
        raise ValueError(f"{row['better']!r} is neither lower nor higher")
    return Measure(_text(row["name"]), row["better"], margin)


def _rate(row: dict[str, Any]) -> Rate:
    # Older studies only have corpora.
    score = row["score"] if "score" in row else row["bits_per_byte"]
    return Rate(
        corpus=_text(row["corpus"]),
        size=_text(row["size"]),
        shape=_text(row["shape"]),
        label=_text(row["label"]),
        lr=_number(row["lr"]),
        score=None if score is None else _number(score),
        chosen=bool(row["chosen"]),
        edge=bool(row["edge"]),
        context=_text(row.get("context", "")),
    )


def _contest(row: dict[str, Any]) -> Contest:
    # Studies written with NUMERICS 1 do not record it.
    facts = {"numerics": "1"} | {key: _text(value) for key, value in row.items()}
    return _shared_contest(tuple(facts.items()))


@lru_cache(maxsize=1024)
def _shared_contest(facts: tuple[tuple[str, str], ...]) -> Contest:
    """Return one object for all entries of a contest: comparing and hashing ten thousand copies takes seconds."""
    return Contest(**dict(facts))


def _solved(row: dict[str, Any]) -> Solved:
    facts: dict[str, Any] = {key: _text(row[key]) for key in ("label", "rule", "what", "held", "note")}
    facts |= {key: _number(row[key]) for key in ("before", "after", "mine", "baseline")}
    return Solved(contest=_contest(row["contest"]), **facts)


def _check(row: dict[str, Any]) -> Check:
    lists = (tuple(_text(one) for one in row[key]) for key in ("failed", "marks", "warnings"))
    return Check(_text(row["label"]), _contest(row["contest"]), *lists)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _number(value: Any) -> float:
    if not is_number(value) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


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
