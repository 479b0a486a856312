"""The data model of a task: tokenized examples with a label or targets and relevant tokens, in disjoint splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from headtohead.common.errors import UserError
from headtohead.data.text import SPLITS, Array, Progress
from headtohead.data.tokenizers import Tokenizer

T = TypeVar("T")
Spans = tuple[tuple[int, int], ...]
OWN_TOKENS = "own"
"""The tokenizer's name of a task that generates its own tokens."""


@dataclass(frozen=True)
class Text:
    """One example as text."""

    text: str
    label: int = -1
    """Index of the class; -1 if an answer is generated."""
    answers: tuple[str, ...] = ()
    """Correct continuations of the text; the first is the training target."""
    relevant: tuple[Spans, ...] = ()
    """By annotator, the relevant characters as (start, stop); empty if the source marks none."""
    group: str = ""
    """The group for which scores are reported separately: a number of attractors, a construction."""
    key: str = ""
    """Deduplication key across splits; the text when empty."""

    @property
    def identity(self) -> str:
        """The deduplication key across splits."""
        return self.key or self.text


@dataclass
class Material:
    """The texts of a task by split, and counts of skipped ones."""

    splits: dict[str, list[Text]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, found: tuple[str, Text] | str) -> None:
        """Add a text to a split, or count the reason why one is skipped."""
        if isinstance(found, str):
            self.notes[found] += 1
        else:
            split, text = found
            self.splits[split].append(text)


@dataclass(frozen=True, eq=False)
class Example:
    """One tokenized example.

    With classes, the model predicts at the last token, and there is a row of relevant tokens per annotator. With targets,
    the model predicts at every target, and there is one row for all targets or a row for each.
    """

    tokens: Array
    """(time,)"""
    relevant: Array
    """(rows, time), True at relevant tokens; one row of False if none are marked."""
    label: int = -1
    targets: Array | None = None
    """(time,), the target at each token; -1 where there is none."""
    prompt: int = 0
    """Tokens before the answer to generate; 0 if nothing is generated."""
    answers: tuple[str, ...] = ()
    group: str = ""

    def __post_init__(self) -> None:
        time = len(self.tokens)
        if self.relevant.ndim != 2 or self.relevant.shape[1] != time or not len(self.relevant):
            raise ValueError(f"relevant has shape {self.relevant.shape} for {time} tokens")
        if (self.label >= 0) == (self.targets is not None):
            raise ValueError("an example needs either a label or targets")
        if self.targets is not None:
            count = int((self.targets >= 0).sum())
            if self.targets.shape != (time,) or not count or len(self.relevant) not in (1, count):
                raise ValueError(f"{len(self.relevant)} rows of relevant tokens for {count} targets")

    @property
    def span(self) -> tuple[int, int] | None:
        """(start, stop) of the relevant tokens, the target of an extractive head."""
        indices = self.relevant[0].nonzero()[0]
        return (int(indices[0]), int(indices[-1]) + 1) if len(indices) else None


@dataclass(frozen=True)
class Task:
    """A tokenized task, ready for batches."""

    name: str
    about: str
    classes: tuple[str, ...]
    """Names of the classes; empty if the task has targets."""
    vocabulary: int
    splits: dict[str, list[Example]]
    notes: dict[str, int]
    """Counts of skipped examples and masks by reason."""
    content: str
    """The digest of everything that determines the examples."""
    tokenizer: Tokenizer | None = None
    """None if the task generates its own tokens."""
    metric: str = "accuracy"
    """The default metric."""

    def __post_init__(self) -> None:
        for split in SPLITS:
            examples = self.splits[split]
            if not examples:
                raise UserError(f"task '{self.name}': the {split} split has no examples{self._why()}")
            found = {example.label for example in examples}
            for label, class_name in enumerate(self.classes):
                if label not in found:
                    missing = f"the {split} split has no example of class '{class_name}'"
                    raise UserError(f"task '{self.name}': {missing}{self._why()}")

    def _why(self) -> str:
        return "".join(f"; {reason}: {count:,}" for reason, count in self.notes.items())

    @property
    def written(self) -> bool:
        """Whether answers are generated; a bidirectional model would see them."""
        return any(example.prompt for example in self.splits["train"])

    @property
    def longest(self) -> int:
        """Number of tokens of the longest example."""
        return max(len(example.tokens) for split in SPLITS for example in self.splits[split])


def spread(items: Sequence[T], limit: int) -> Sequence[T]:
    """Return at most `limit` items, spread evenly; 0 keeps all."""
    count = len(items)
    return [items[index * count // limit] for index in range(limit)] if 0 < limit < count else items


def kept_apart(material: Material) -> Material:
    """Return the texts without those of train and valid that are also in a later split; counts them in the notes."""
    seen: set[str] = set()
    splits: dict[str, list[Text]] = {}
    notes = Counter(material.notes)
    for split in reversed(SPLITS):
        rows = material.splits[split]
        splits[split] = [row for row in rows if row.identity not in seen]
        if left := len(rows) - len(splits[split]):
            notes[f"{split}: skipped, also in a later split"] += left
        seen.update(row.identity for row in rows)
    return Material({split: splits[split] for split in SPLITS}, notes)


def encoded(
    material: Material, tokenizer: Tokenizer, context: int, progress: Progress
) -> tuple[dict[str, list[Example]], dict[str, int]]:
    """Return the tokenized splits and the counts of skipped examples: empty ones and those longer than the context.

    Examples are never truncated, because that could remove relevant tokens.
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
                notes[f"{split}: skipped, empty"] += 1
            elif len(prompt) + len(answer) > context:
                notes[f"{split}: skipped, longer than {context} tokens"] += 1
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
            f"tokenizer {tokenizer.name} is lossy: {spelled} bytes in tokens for {size} of text ({row.text[:40]!r}), "
            "so relevant tokens cannot be marked; use bytes or bpe:N"
        )
    relevant = np.zeros((max(1, len(row.relevant)), len(tokens)), dtype=bool)
    for index, spans in enumerate(row.relevant):
        for start, stop in _in_bytes(row.text, spans):
            relevant[index, : len(prompt)] |= (starts < stop) & (ends > start)
    written = len(prompt) if row.answers else 0
    return Example(tokens, relevant, row.label, targets, written, row.answers, row.group)


def _in_bytes(text: str, spans: Spans) -> Spans:
    """Return spans of characters as spans of bytes."""
    if text.isascii():
        return spans
    return tuple((len(text[:start].encode()), len(text[:stop].encode())) for start, stop in spans)


def joined(words: Sequence[str], masks: Sequence[Sequence[bool]] = ()) -> tuple[str, tuple[Spans, ...]]:
    """Return the words joined by spaces, and the character spans of the words that each mask marks."""
    bounds, start = [], 0
    for word in words:
        bounds.append((start, start + len(word)))
        start += len(word) + 1
    spans = tuple(tuple(span for span, marked in zip(bounds, mask, strict=True) if marked) for mask in masks)
    return " ".join(words), spans
