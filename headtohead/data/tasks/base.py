"""What a task is: examples in tokens with a label or targets, each with its relevant tokens, in splits that share none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headtohead.common.errors import UserError
from headtohead.common.files import digest
from headtohead.data.corpora import SPLITS, Progress
from headtohead.data.tokenizers import Tokenizer

Array = np.ndarray[Any, Any]
Spans = tuple[tuple[int, int], ...]
OWN_TOKENS = "own"
"""The tokenizer's name where a task draws its own tokens."""


@dataclass(frozen=True)
class Text:
    """One example as its source has it."""

    text: str
    label: int = -1
    """Number of the class; -1 where an answer is written out."""
    answers: tuple[str, ...] = ()
    """What may be written behind the text; the first is trained on."""
    relevant: tuple[Spans, ...] = ()
    """By annotator, the relevant characters as (start, stop); nothing where the source marks none."""
    group: str = ""
    """What scores are told apart by: a number of attractors, a construction."""
    key: str = ""
    """What no two splits may share; the text when empty."""

    @property
    def identity(self) -> str:
        """What no two splits may share."""
        return self.key or self.text


@dataclass
class Material:
    """The texts of a task by split, and what was counted on the way."""

    splits: dict[str, list[Text]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    notes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, eq=False)
class Example:
    """One example in tokens.

    A task of classes is read at the last token and has a row of relevant tokens per annotator. A task of targets is
    read wherever a target stands, and has one row for all of them or a row for each.
    """

    tokens: Array
    """(time,)"""
    relevant: Array
    """(rows, time), true at relevant tokens; one row of nothing where none are marked."""
    label: int = -1
    targets: Array | None = None
    """(time,), what is to follow each token; -1 where nothing is asked."""
    prompt: int = 0
    """Tokens before what is to be written out; 0 where nothing is."""
    answers: tuple[str, ...] = ()
    group: str = ""

    def __post_init__(self) -> None:
        time = len(self.tokens)
        if self.relevant.ndim != 2 or self.relevant.shape[1] != time or not len(self.relevant):
            raise ValueError(f"relevant tokens are {self.relevant.shape} for {time} tokens")
        if (self.label >= 0) == (self.targets is not None):
            raise ValueError("an example has a label or targets, one of the two")
        if self.targets is not None:
            asked = int((self.targets >= 0).sum())
            if self.targets.shape != (time,) or not asked or len(self.relevant) not in (1, asked):
                raise ValueError(f"{len(self.relevant)} rows of relevant tokens for {asked} targets")

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last relevant token, the last one excluded: what an extractive head should point at."""
        places = self.relevant[0].nonzero()[0]
        return (int(places[0]), int(places[-1]) + 1) if len(places) else None


@dataclass(frozen=True)
class Task:
    """A task in tokens, ready for batches."""

    name: str
    about: str
    classes: tuple[str, ...]
    """Their names; none where targets are asked for."""
    vocabulary: int
    splits: dict[str, list[Example]]
    notes: dict[str, int]
    """What was counted on the way: examples left out and why, masks that did not fit."""
    content: str
    """The digest of everything that decides the examples."""
    tokenizer: Tokenizer | None = None
    """None where the task draws its own tokens."""
    metric: str = "accuracy"
    """What it is judged by when nothing else is said."""

    def __post_init__(self) -> None:
        for split in SPLITS:
            examples = self.splits[split]
            if not examples:
                raise UserError(f"task '{self.name}': the {split} split has no examples{self._why()}")
            found = {example.label for example in examples}
            for label, words in enumerate(self.classes):
                if label not in found:
                    raise UserError(
                        f"task '{self.name}': the {split} split has no example of the class '{words}'{self._why()}"
                    )

    def _why(self) -> str:
        return "".join(f"; {words}: {count:,}" for words, count in self.notes.items())

    @property
    def written(self) -> bool:
        """Whether answers are written out: a model that looks both ways would see them."""
        return any(example.prompt for example in self.splits["train"])

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(len(example.tokens) for split in SPLITS for example in self.splits[split])


def hashed_place(key: str) -> float:
    """Return where a text stands between 0 and 1, by its hash: equal texts fall into one split."""
    return int(digest(key)[:8], 16) / 2**32


def hashed_split(key: str, valid: float, test: float) -> str:
    """Return the split of a text by its hash."""
    place = hashed_place(key)
    return "test" if place < test else "valid" if place < test + valid else "train"


def kept_apart(material: Material) -> Material:
    """Return the texts with those of train and valid left out, and counted, that a later split holds too."""
    seen: set[str] = set()
    splits: dict[str, list[Text]] = {}
    notes = Counter(material.notes)
    for split in reversed(SPLITS):
        rows = material.splits[split]
        splits[split] = [row for row in rows if row.identity not in seen]
        if left := len(rows) - len(splits[split]):
            notes[f"{split}: left out, as they stand in a later split too"] += left
        seen.update(row.identity for row in rows)
    return Material({split: splits[split] for split in SPLITS}, notes)


def encoded(
    material: Material, tokenizer: Tokenizer, context: int, progress: Progress
) -> tuple[dict[str, list[Example]], dict[str, int]]:
    """Return the splits in tokens, and what was counted; examples that are empty or longer than the context are left out.

    Nothing is ever cut: a cut could go through what is relevant.
    """
    notes, lengths = Counter(material.notes), tokenizer.token_bytes()
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    total, count = sum(map(len, material.splits.values())), 0
    for split in SPLITS:
        rows = material.splits[split]
        prompts = tokenizer.encode_all(row.text.encode("utf-8") for row in rows)
        answers = tokenizer.encode_all(row.answers[0].encode("utf-8") if row.answers else b"" for row in rows)
        for row, prompt, answer in zip(rows, prompts, answers, strict=True):
            if not len(prompt):
                notes[f"{split}: empty, left out"] += 1
            elif len(prompt) + len(answer) > context:
                notes[f"{split}: longer than {context} tokens, left out"] += 1
            else:
                tokens = prompt.astype(np.int64), answer.astype(np.int64)
                splits[split].append(_example(row, *tokens, tokenizer, lengths))
            count += 1
            if count % 1000 == 0:
                progress(f"encoding {split}", count / total)
    return splits, dict(notes)


def _example(row: Text, prompt: Array, answer: Array, tokenizer: Tokenizer, lengths: Array) -> Example:
    ends = lengths[prompt].cumsum()
    starts = ends - lengths[prompt]
    tokens, targets = prompt, None
    if row.answers:
        tokens = np.concatenate([prompt, answer])
        targets = np.full(len(tokens), -1, dtype=np.int64)
        targets[len(prompt) - 1 :] = [*answer, tokenizer.separator]
    if row.relevant and (spelled := int(lengths[prompt].sum())) != (size := len(row.text.encode("utf-8"))):
        raise UserError(
            f"tokenizer {tokenizer.name} does not spell the text of a task: {spelled} bytes in tokens for {size} of "
            f"text ({row.text[:40]!r}), so relevant tokens cannot be marked; use bytes or bpe:N"
        )
    relevant = np.zeros((max(1, len(row.relevant)), len(tokens)), dtype=bool)
    for place, spans in enumerate(row.relevant):
        for start, stop in _in_bytes(row.text, spans):
            relevant[place, : len(prompt)] |= (starts < stop) & (ends > start)
    written = len(prompt) if row.answers else 0
    return Example(tokens, relevant, row.label, targets, written, row.answers, row.group)


def _in_bytes(text: str, spans: Spans) -> Spans:
    """Return spans of characters as spans of bytes."""
    if text.isascii():
        return spans
    return tuple((len(text[:start].encode()), len(text[:stop].encode())) for start, stop in spans)


def joined(words: Sequence[str], masks: Sequence[Sequence[bool]] = ()) -> tuple[str, tuple[Spans, ...]]:
    """Return words as one text, and the characters that each mask over the words marks."""
    places, start = [], 0
    for word in words:
        places.append((start, start + len(word)))
        start += len(word) + 1
    spans = tuple(
        tuple(place for place, marked in zip(places, mask, strict=True) if marked) for mask in masks
    )
    return " ".join(words), spans
