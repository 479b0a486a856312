"""A study's plan without models and data: which run stands where. Verdicts and reports need no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from headtohead.common.errors import DamagedFile
from headtohead.common.numbers import is_number
from headtohead.common.schema import read_document
from headtohead.study.numerics import NUMERICS

METRIC = "bits_per_byte"


@dataclass(frozen=True)
class Measure:
    """What is compared: its name, which way is better, and the margin within which a difference counts as none."""

    name: str = METRIC
    better: str = "lower"
    """lower or higher."""
    margin: float | None = None
    """None: the study's."""


@dataclass(frozen=True)
class Contest:
    """One corpus or task, size, shape rule and length rule, one context and branch: what a verdict is given for."""

    corpus: str
    corpus_label: str
    size: str
    shape: str
    length: str
    context: str = ""
    """Tokens in a window, where the study has several contexts."""
    branch: str = ""
    """Tokens of the baseline's branch, where the study has branches."""
    numerics: str = ""
    """The number of the arithmetic that its runs were computed with: runs of two of them are never compared. Empty in a
    table that does not say."""

    @property
    def outdated(self) -> bool:
        """Whether its runs were computed with other numerics than this version's."""
        return self.numerics not in ("", str(NUMERICS))

    @property
    def place(self) -> dict[str, str]:
        """What sets it apart from the other contests, by name; the corpus by its label."""
        names = ("size", "context", "branch", "shape", "length", "numerics")
        return {"corpus": self.corpus_label} | {name: getattr(self, name) for name in names}

    @property
    def title(self) -> str:
        """The contest in words."""
        return ", ".join(self._words.values())

    def title_among(self, others: Sequence[Contest]) -> str:
        """Return what sets it apart from the others in words; its whole title where nothing does."""
        apart = [name for name in self._words if len({other.place[name] for other in others}) > 1]
        return ", ".join(self._words[name] for name in apart) or self.title

    @property
    def _words(self) -> dict[str, str]:
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
    """What an arm scored on valid at one learning rate of its tuning, in the contest's metric."""

    corpus: str
    size: str
    shape: str
    label: str
    lr: float
    score: float | None
    chosen: bool
    edge: bool
    """Whether the arm's best rate lies at the edge of the grid."""
    context: str = ""
    """Where the study has several."""


@dataclass(frozen=True)
class Solved:
    """The number that a rule gave an arm in a contest, and how near that brings it to the baseline."""

    label: str
    contest: Contest
    rule: str
    what: str
    """The number that was solved: feed-forward width, kv heads, width, tokens."""
    before: float
    after: float
    held: str
    """What is held equal by it."""
    mine: float
    baseline: float
    note: str = ""

    @property
    def match(self) -> float:
        """What the arm has of what is held equal, as a share of the baseline's."""
        return self.mine / self.baseline if self.baseline else math.nan


@dataclass(frozen=True)
class Check:
    """What the causality gate found before training in an arm with user code, in one contest."""

    label: str
    contest: Contest
    failed: tuple[str, ...] = ()
    """Why it was to be rejected; it was trained all the same."""
    marks: tuple[str, ...] = ()
    """What every verdict mentions."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """All runs of a study by contest, arm and seed."""

    name: str
    arms: tuple[tuple[str, str], ...]
    """Text and label of each."""
    baseline: str
    primary: str | None
    margin: float
    seeds: tuple[int, ...]
    entries: tuple[Entry, ...]
    references: dict[str, dict[str, float]] = field(default_factory=dict)
    """What one gets without a model, by corpus label: bits per byte, or a task's metric."""
    tuning: tuple[Rate, ...] = ()
    """Every learning rate that was tried, where rates were tuned."""
    solved: tuple[Solved, ...] = ()
    """What the rules gave each arm but the baseline."""
    probes: tuple[str, ...] = ()
    """What was measured on every trained run besides its loss."""
    trunks: tuple[Entry, ...] = ()
    """The runs that branches start from; their contests are the branches' with no branch named."""
    statistics: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """What each corpus is like, by its label, where there are several."""
    measures: dict[str, Measure] = field(default_factory=dict)
    """What tasks are judged by, by their label; corpora by bits per byte."""
    notes: tuple[str, ...] = ()
    """What was counted while tasks were made: examples left out, and why."""
    flops: dict[str, str] = field(default_factory=dict)
    """How each arm's FLOPs were obtained, by its label: declared or counted."""
    checks: tuple[Check, ...] = ()
    """What the causality gate found in arms with user code."""

    def measure(self, contest: Contest) -> Measure:
        """Return what a contest is judged by."""
        return self.measures.get(contest.corpus_label, Measure())

    def check(self, contest: Contest, label: str) -> Check:
        """Return what the gate found in an arm before training; nothing in arms without user code."""
        found = (row for row in self.checks if row.label == label and row.contest == contest)
        return next(found, Check(label, contest))

    def contests(self) -> list[Contest]:
        """Return the contests in order."""
        return list(dict.fromkeys(entry.contest for entry in self.entries))

    def runs(self, contest: Contest, label: str) -> dict[int, str]:
        """Return run names by seed."""
        return self._places.get((contest, label), {})

    @cached_property
    def _places(self) -> dict[tuple[Contest, str], dict[int, str]]:
        places: dict[tuple[Contest, str], dict[int, str]] = {}
        for entry in self.entries:
            places.setdefault((entry.contest, entry.label), {})[entry.seed] = entry.run
        return places

    def as_dict(self) -> dict[str, Any]:
        """Return the outline, JSON-ready."""
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
    """Return how the FLOPs of arms were obtained, by their labels."""
    listed = ", ".join(f"{source} for {label}" for label, source in sources.items())
    bound = "a count is an upper bound where code computes what it then masks (windows, sparse patterns)"
    return f"FLOPs are {listed}; {bound}"


def read_manifest(path: Path) -> tuple[Manifest, frozenset[int]]:
    """Return the outline in a study.json and the seeds added after looking; a damaged file is refused by name."""
    record = read_document(path)
    try:
        added = frozenset(int(seed) for seed in record.get("added_seeds", ()))
        return manifest_from(record["outline"]), added
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        remedy = "the study's own command writes it again"
        raise DamagedFile(f"damaged file {path}: {type(error).__name__}: {error}; {remedy}") from None


def manifest_from(record: dict[str, Any]) -> Manifest:
    """Return the outline that `as_dict` gave; anything that is not one raises."""
    # Studies of before have no trunks.
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
        # Studies of before have none.
        solved=tuple(_solved(row) for row in record.get("solved", ())),
        probes=tuple(_text(name) for name in record.get("probes", ())),
        trunks=trunks,
        statistics={
            _text(label): {
                _text(name): None if value is None else _number(value) for name, value in row.items()
            }
            for label, row in record.get("statistics", {}).items()
        },
        notes=tuple(_text(words) for words in record.get("notes", ())),
        flops={_text(label): _text(source) for label, source in record.get("flops", {}).items()},
        checks=tuple(_check(row) for row in record.get("checks", ())),
        measures={_text(label): _measure(row) for label, row in record.get("measures", {}).items()},
    )
    if manifest.baseline not in {label for _, label in arms}:
        raise ValueError(f"the baseline {manifest.baseline!r} is no arm")
    return manifest


def _measure(row: dict[str, Any]) -> Measure:
    margin = None if row["margin"] is None else _number(row["margin"])
    if row["better"] not in ("lower", "higher"):
        raise ValueError(f"{row['better']!r} is neither lower nor higher")
    return Measure(_text(row["name"]), row["better"], margin)


def _rate(row: dict[str, Any]) -> Rate:
    # Studies of before have corpora alone.
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
    # Studies written before the numerics were bumped do not name them.
    return Contest(**{"numerics": "1"} | {key: _text(value) for key, value in row.items()})


def _solved(row: dict[str, Any]) -> Solved:
    facts: dict[str, Any] = {key: _text(row[key]) for key in ("label", "rule", "what", "held", "note")}
    facts |= {key: _number(row[key]) for key in ("before", "after", "mine", "baseline")}
    return Solved(contest=_contest(row["contest"]), **facts)


def _check(row: dict[str, Any]) -> Check:
    words = (tuple(_text(one) for one in row[key]) for key in ("failed", "marks", "warnings"))
    return Check(_text(row["label"]), _contest(row["contest"]), *words)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _number(value: Any) -> float:
    if not is_number(value) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


_WORDS = {
    METRIC: "bits per byte",
    "macro_f1": "macro-F1",
    "f1": "F1",
    "exact_match": "exact match",
    "matthews": "Matthews correlation",
}


def metric_label(metric: str) -> str:
    """Return a metric's name for people; a column of somebody's table keeps its own."""
    return _WORDS.get(metric, metric)
