"""A study's plan without models and data: which run stands where. Verdicts and reports need no more."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from headtohead.common.errors import UserError


@dataclass(frozen=True)
class Contest:
    """One corpus, size, shape rule and length rule: what a verdict is given for."""

    corpus: str
    corpus_label: str
    size: str
    shape: str
    length: str

    @property
    def title(self) -> str:
        """The contest in words."""
        return f"{self.corpus_label}, {self.size}, shape {self.shape}, length {self.length}"


@dataclass(frozen=True)
class Entry:
    """The run of one arm and seed in one contest."""

    run: str
    label: str
    seed: int
    contest: Contest


@dataclass(frozen=True)
class Outline:
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
    """Bits per byte of the reference lines, by corpus label."""

    def contests(self) -> list[Contest]:
        """Return the contests in order."""
        return list(dict.fromkeys(entry.contest for entry in self.entries))

    def runs(self, contest: Contest, label: str) -> dict[int, str]:
        """Return run names by seed."""
        return {
            entry.seed: entry.run
            for entry in self.entries
            if entry.contest == contest and entry.label == label
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the outline, JSON-ready."""
        return asdict(self)


def outline_from(record: dict[str, Any]) -> Outline:
    """Return the outline that `as_dict` gave; a damaged one is refused."""
    try:
        entries = tuple(
            Entry(str(row["run"]), str(row["label"]), int(row["seed"]), Contest(**row["contest"]))
            for row in record["entries"]
        )
        return Outline(
            name=str(record["name"]),
            arms=tuple((str(text), str(label)) for text, label in record["arms"]),
            baseline=str(record["baseline"]),
            primary=record["primary"],
            margin=float(record["margin"]),
            seeds=tuple(int(seed) for seed in record["seeds"]),
            entries=entries,
            references={str(key): dict(lines) for key, lines in record["references"].items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"damaged study outline: {type(error).__name__}: {error}") from None
