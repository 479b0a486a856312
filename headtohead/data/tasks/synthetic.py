"""Synthetic tasks: examples generated from a seed, with the tokens that determine each answer marked."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import torch

from headtohead.common.errors import UserError
from headtohead.data.tasks import toy
from headtohead.data.tasks.base import Array, Example
from headtohead.mechanisms.contract.options import Options, option


@dataclasses.dataclass(frozen=True)
class Synthetic(Options):
    """A task that generates its own tokens."""

    about: ClassVar[str] = ""
    metric: ClassVar[str] = "accuracy"
    """The default metric; under exact_match a list must be right as a whole."""
    words: ClassVar[tuple[str, ...]] = ()
    """Readable names of its tokens; empty if they are numbers."""
    classes: ClassVar[tuple[str, ...]] = ()
    """Names of the classes; empty if the task has targets."""
    train: int = option(20_000, "examples of the train split; valid and test have a tenth each", low=30)
    seed: int = option(0, "seed of the examples; the same for every run", low=0)

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        raise NotImplementedError

    def draw(self, random: np.random.Generator) -> Example:
        """Return one example."""
        raise NotImplementedError


def with_targets(
    tokens: Array, targets: dict[int, int], relevant: list[list[int]], group: str = ""
) -> Example:
    """Return an example with targets by position, and the relevant positions of each target."""
    row = np.full(len(tokens), -1, dtype=np.int64)
    row[list(targets)] = list(targets.values())
    marks = np.zeros((len(relevant), len(tokens)), dtype=bool)
    for row_index, positions in enumerate(relevant):
        marks[row_index, positions] = True
    return Example(tokens.astype(np.int64), marks, targets=row, group=group)


# --- lists of digits -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Lists(Synthetic):
    """A list of symbols and a list computed from it, generated after it or predicted at its positions."""

    metric: ClassVar[str] = "exact_match"

    length: int = option(16, "symbols in the list", low=2)
    symbols: int = option(10, "number of distinct symbols", low=2)
    form: str = option(
        "write",
        "write: generate the answer after the list and a mark; place: predict it at the list's positions",
        choices=("write", "place"),
    )

    @property
    def vocabulary(self) -> int:
        """The symbols and the mark."""
        return self.symbols + 1

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """Return the computed list, and for each of its symbols the positions it depends on."""
        raise NotImplementedError

    def draw(self, random: np.random.Generator) -> Example:
        """Return a list and its answer."""
        values = random.integers(self.symbols, size=self.length)
        found, relevant = self.answer(values)
        if self.form == "place":
            return with_targets(values, dict(enumerate(found.tolist())), relevant)
        tokens = np.concatenate([values, [self.symbols], found[:-1]])
        targets = {self.length + index: value for index, value in enumerate(found.tolist())}
        return dataclasses.replace(with_targets(tokens, targets, relevant), prompt=self.length + 1)


class Copy(_Lists):
    """The list itself."""

    about = "copy a list of symbols"

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """Each symbol depends on its own position."""
        return values, [[index] for index in range(len(values))]


class Reverse(_Lists):
    """The list in reverse."""

    about = "reverse a list of symbols"

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """Each symbol depends on the mirrored position."""
        return values[::-1], [[index] for index in reversed(range(len(values)))]


class Sort(_Lists):
    """The list in ascending order."""

    about = "sort a list of symbols"

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """All positions of an equal symbol are relevant."""
        found = np.sort(values)
        return found, [np.flatnonzero(values == value).tolist() for value in found]


@dataclasses.dataclass(frozen=True)
class _Halves(_Lists):
    def validate(self) -> None:
        """Two halves need an even length."""
        super().validate()
        if self.length % 2:
            raise UserError(f"length={self.length} is odd; two halves need an even length")


class Swap(_Halves):
    """The second half, then the first."""

    about = "swap the halves of a list of symbols"

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """Each symbol depends on the position half a list away."""
        half = len(values) // 2
        indices = [*range(half, len(values)), *range(half)]
        return values[indices], [[index] for index in indices]


class Subtraction(_Halves):
    """The first half minus the second, digit by digit, without borrowing."""

    about = "subtract one list of digits from another, digit by digit, modulo the number of symbols"

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """Each digit depends on two positions, half a list apart."""
        half = len(values) // 2
        found = (values[:half] - values[half:]) % self.symbols
        return found, [[index, half + index] for index in range(half)]


# --- retrieval -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recall(Synthetic):
    """Key-value pairs, then several keys whose values are the targets."""

    about = "multi-query associative recall: the values of several keys"
    pairs: int = option(8, "key-value pairs", low=1)
    queries: int = option(4, "queried keys, each once", low=1)
    keys: int = option(32, "distinct keys", low=1)
    values: int = option(32, "distinct values", low=2)

    def validate(self) -> None:
        """Check queries <= pairs <= keys."""
        if not self.queries <= self.pairs <= self.keys:
            raise UserError(
                f"queries={self.queries}, pairs={self.pairs}, keys={self.keys}: queries <= pairs <= keys is required"
            )

    @property
    def vocabulary(self) -> int:
        """Keys, then values."""
        return self.keys + self.values

    def draw(self, random: np.random.Generator) -> Example:
        """Return pairs, then queries; a key and its value are relevant to its query."""
        keys = random.permutation(self.keys)[: self.pairs]
        values = self.keys + random.integers(self.values, size=self.pairs)
        chosen = random.permutation(self.pairs)[: self.queries]
        tokens = np.concatenate([np.stack([keys, values], 1).ravel(), keys[chosen]])
        targets = {2 * self.pairs + index: int(values[pair]) for index, pair in enumerate(chosen)}
        return with_targets(tokens, targets, [[2 * pair, 2 * pair + 1] for pair in chosen.tolist()])


@dataclasses.dataclass(frozen=True)
class Induction(Synthetic):
    """Random symbols; the last one occurred once before, and the target is the symbol that followed it."""

    about = "induction: the symbol that followed the last symbol at its earlier occurrence"
    length: int = option(32, "symbols before the last one", low=3)
    symbols: int = option(32, "number of distinct symbols", low=3)

    @property
    def vocabulary(self) -> int:
        """The symbols."""
        return self.symbols

    def draw(self, random: np.random.Generator) -> Example:
        """The last symbol occurs at exactly one earlier position; it and its successor are relevant."""
        trigger = int(random.integers(self.symbols))
        others = random.integers(self.symbols - 1, size=self.length)
        tokens = np.append(others + (others >= trigger), trigger)
        position = int(random.integers(self.length - 1))
        tokens[position] = trigger
        return with_targets(tokens, {self.length: int(tokens[position + 1])}, [[position, position + 1]])


@dataclasses.dataclass(frozen=True)
class Pointers(Synthetic):
    """Pairs (node, successor) in any order, then a node; the target is the node several hops away."""

    about = "pointer chasing: follow several pointers from a node"
    nodes: int = option(8, "nodes, each with one successor", low=2)
    hops: int = option(2, "pointers to follow", low=1)

    def validate(self) -> None:
        """Check hops < nodes, so that no pair is used twice."""
        if self.hops >= self.nodes:
            most = self.nodes - 1
            raise UserError(f"hops={self.hops} is too large; at most {most} with {self.nodes} nodes")

    @property
    def vocabulary(self) -> int:
        """The nodes, and the mark before the query."""
        return self.nodes + 1

    def draw(self, random: np.random.Generator) -> Example:
        """The nodes form one ring; the pairs on the path are relevant."""
        ring, order = random.permutation(self.nodes), random.permutation(self.nodes)
        pairs = np.stack([ring, np.roll(ring, -1)], 1)
        index_of = np.argsort(order)
        start = int(random.integers(self.nodes))
        steps = [(start + step) % self.nodes for step in range(self.hops)]
        tokens = np.concatenate([pairs[order].ravel(), [self.nodes, ring[start]]])
        relevant = [index for step in steps for index in (2 * index_of[step], 2 * index_of[step] + 1)]
        answer = int(ring[(start + self.hops) % self.nodes])
        return with_targets(tokens, {len(tokens) - 1: answer}, [relevant])


# --- the toy task of faster query-key learning -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Toy(Synthetic):
    """Common tokens and tokens of one class of four, then the query of that class; the target is its label."""

    about = "the toy task of faster query-key learning: tokens of a class among common ones"
    length: int = option(64, "tokens including the label; the input has one fewer", low=3)

    @property
    def vocabulary(self) -> int:
        """Ten common tokens and ten of each class."""
        return toy.VOCABULARY

    def draw(self, random: np.random.Generator) -> Example:
        """Context tokens above 9 belong to the class and are relevant."""
        source = toy.Source(seed=0, length=self.length)
        generator = torch.Generator().manual_seed(int(random.integers(2**62)))
        drawn, classes = toy.draw_tokens(source, 1, generator)
        tokens, kind = drawn[0].numpy(), int(classes[0])
        relevant = [np.flatnonzero(tokens >= toy.COMMON).tolist()]
        return with_targets(tokens, {len(tokens) - 1: source.target + kind}, relevant, f"class {kind}")


# --- an agreement grammar --------------------------------------------------------------------------------------------

_NOUNS = (
    "dog",
    "cat",
    "author",
    "pilot",
    "teacher",
    "farmer",
    "guard",
    "child",
    "king",
    "table",
    "car",
    "ship",
)
_PLURALS = tuple("children" if noun == "child" else f"{noun}s" for noun in _NOUNS)
_VERBS = ("see", "like", "know", "help", "follow", "praise")
_THIRD = tuple(f"{verb}s" for verb in _VERBS)
_PREPOSITIONS = ("near", "behind", "beside", "with", "above", "under")
_ADJECTIVES = ("old", "small", "green", "tall", "kind", "quiet")


@dataclasses.dataclass(frozen=True)
class Grammar(Synthetic):
    """Noun phrases with nested nouns, up to the verb whose number is the label."""

    about = "an agreement grammar: the verb's number, with nouns of the other number in between"
    phrases: int = option(3, "maximum number of noun phrases between subject and verb", low=0, high=8)
    words = ("the", "that", *_NOUNS, *_PLURALS, *_VERBS, *_THIRD, *_PREPOSITIONS, *_ADJECTIVES)
    classes = ("singular", "plural")

    @property
    def vocabulary(self) -> int:
        """The words."""
        return len(self.words)

    def draw(self, random: np.random.Generator) -> Example:
        """The subject's noun is relevant; nouns of the other number in between are attractors."""

        def any_of(words: tuple[str, ...]) -> str:
            return words[int(random.integers(len(words)))]

        def phrase(plural: int) -> list[str]:
            adjective = [any_of(_ADJECTIVES)] if random.random() < 0.3 else []
            return ["the", *adjective, any_of(_PLURALS if plural else _NOUNS)]

        label = int(random.integers(2))
        words = phrase(label)
        subject, attractors = len(words) - 1, 0
        for _ in range(int(random.integers(self.phrases + 1))):
            plural = int(random.integers(2))
            attractors += plural != label
            if random.random() < 0.5:
                words += [any_of(_PREPOSITIONS), *phrase(plural)]
            else:
                words += ["that", *phrase(plural), any_of(_VERBS if plural else _THIRD)]
        ids = {word: index for index, word in enumerate(self.words)}
        tokens = np.array([ids[word] for word in words], dtype=np.int64)
        relevant = np.zeros((1, len(tokens)), dtype=bool)
        relevant[0, subject] = True
        return Example(tokens, relevant, label, group=f"{attractors} attractor{'s' * (attractors != 1)}")


SYNTHETIC: dict[str, type[Synthetic]] = {
    "toy": Toy,
    "grammar": Grammar,
    "recall": Recall,
    "induction": Induction,
    "copy": Copy,
    "reverse": Reverse,
    "sort": Sort,
    "swap": Swap,
    "subtraction": Subtraction,
    "pointers": Pointers,
}
