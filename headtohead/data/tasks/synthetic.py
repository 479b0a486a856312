"""Tasks that need no data: examples drawn from a seed, with the tokens that decide each answer marked."""

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
    """A task that draws its own tokens."""

    about: ClassVar[str] = ""
    metric: ClassVar[str] = "accuracy"
    """What it is judged by; a list must be right as a whole."""
    words: ClassVar[tuple[str, ...]] = ()
    """What its tokens are called, for people; nothing where they are numbers."""
    train: int = option(20_000, "examples of the train split; valid and test hold a tenth each", low=30)
    seed: int = option(0, "which examples are drawn; the same for every run", low=0)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        raise NotImplementedError

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; none where targets are asked for."""
        return ()

    def draw(self, random: np.random.Generator) -> Example:
        """Return one example."""
        raise NotImplementedError


def asked(tokens: Array, targets: dict[int, int], relevant: list[list[int]], group: str = "") -> Example:
    """Return an example with targets at places, and the relevant places of each."""
    row = np.full(len(tokens), -1, dtype=np.int64)
    row[list(targets)] = list(targets.values())
    marks = np.zeros((len(relevant), len(tokens)), dtype=bool)
    for place, places in enumerate(relevant):
        marks[place, places] = True
    return Example(tokens.astype(np.int64), marks, targets=row, group=group)


# --- lists of digits -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Lists(Synthetic):
    """A list of symbols, and another made of it; written behind it, or read off at its own places."""

    metric: ClassVar[str] = "exact_match"

    length: int = option(16, "symbols in the list", low=2)
    symbols: int = option(10, "how many different ones there are", low=2)
    form: str = option(
        "write",
        "write: behind the list and a mark; place: at the list's own places",
        choices=("write", "place"),
    )

    @property
    def vocabulary(self) -> int:
        """The symbols, and the mark."""
        return self.symbols + 1

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """Return the other list, and for each of its symbols the places it is made of."""
        raise NotImplementedError

    def draw(self, random: np.random.Generator) -> Example:
        """A list, and its answer."""
        values = random.integers(self.symbols, size=self.length)
        found, places = self.answer(values)
        if self.form == "place":
            return asked(values, dict(enumerate(found.tolist())), places)
        tokens = np.concatenate([values, [self.symbols], found[:-1]])
        targets = {self.length + place: value for place, value in enumerate(found.tolist())}
        return dataclasses.replace(asked(tokens, targets, places), prompt=self.length + 1)


class Copy(_Lists):
    """The list itself."""

    about = "copy a list of symbols"

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """Every symbol comes from its own place."""
        return values, [[place] for place in range(len(values))]


class Reverse(_Lists):
    """The list from its end."""

    about = "reverse a list of symbols"

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """The last comes first."""
        return values[::-1], [[place] for place in reversed(range(len(values)))]


class Sort(_Lists):
    """The list in rising order."""

    about = "sort a list of symbols"

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """Of equal symbols any will do: all of them are relevant."""
        found = np.sort(values)
        return found, [np.flatnonzero(values == value).tolist() for value in found]


@dataclasses.dataclass(frozen=True)
class _Halves(_Lists):
    def validate(self) -> None:
        """Two halves need an even length."""
        super().validate()
        if self.length % 2:
            raise UserError(f"length={self.length} is odd; two halves need an even one")


class Swap(_Halves):
    """The second half, then the first."""

    about = "swap the halves of a list of symbols"

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """Each symbol comes from half a list away."""
        half = len(values) // 2
        places = [*range(half, len(values)), *range(half)]
        return values[places], [[place] for place in places]


class Subtraction(_Halves):
    """The first half minus the second, digit by digit, without borrowing."""

    about = "subtract one list of digits from another, digit by digit, modulo the number of symbols"

    def answer(self, values: Array) -> tuple[Array, list[list[int]]]:
        """Each digit is made of two, half a list apart."""
        half = len(values) // 2
        found = (values[:half] - values[half:]) % self.symbols
        return found, [[place, half + place] for place in range(half)]


# --- looking things up -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recall(Synthetic):
    """Keys with their values, then several keys whose values are asked for."""

    about = "multi-query associative recall: the values of several keys"
    pairs: int = option(8, "keys with a value each", low=1)
    queries: int = option(4, "keys asked for, each once", low=1)
    keys: int = option(32, "different keys", low=1)
    values: int = option(32, "different values", low=2)

    def validate(self) -> None:
        """There are no more keys in play than there are keys."""
        if not self.queries <= self.pairs <= self.keys:
            raise UserError(
                f"queries={self.queries}, pairs={self.pairs}, keys={self.keys}: each at most the next"
            )

    @property
    def vocabulary(self) -> int:
        """Keys, then values."""
        return self.keys + self.values

    def draw(self, random: np.random.Generator) -> Example:
        """Pairs, then queries; a key and its value are relevant to its query."""
        keys = random.permutation(self.keys)[: self.pairs]
        values = self.keys + random.integers(self.values, size=self.pairs)
        chosen = random.permutation(self.pairs)[: self.queries]
        tokens = np.concatenate([np.stack([keys, values], 1).ravel(), keys[chosen]])
        targets = {2 * self.pairs + place: int(values[pair]) for place, pair in enumerate(chosen)}
        return asked(tokens, targets, [[2 * pair, 2 * pair + 1] for pair in chosen.tolist()])


@dataclasses.dataclass(frozen=True)
class Induction(Synthetic):
    """Random symbols; the last one stood there once before, and what followed it then is asked for."""

    about = "induction: what followed the last symbol when it came before"
    length: int = option(32, "symbols before the last one", low=3)
    symbols: int = option(32, "how many different ones there are", low=3)

    @property
    def vocabulary(self) -> int:
        """The symbols."""
        return self.symbols

    def draw(self, random: np.random.Generator) -> Example:
        """The symbol asked about stands at one earlier place alone; it and its successor are relevant."""
        trigger = int(random.integers(self.symbols))
        others = random.integers(self.symbols - 1, size=self.length)
        tokens = np.append(others + (others >= trigger), trigger)
        place = int(random.integers(self.length - 1))
        tokens[place] = trigger
        return asked(tokens, {self.length: int(tokens[place + 1])}, [[place, place + 1]])


@dataclasses.dataclass(frozen=True)
class Pointers(Synthetic):
    """Pairs (node, where it points to) in any order, then a node: where several steps from it lead."""

    about = "pointer chasing: follow several pointers from a node"
    nodes: int = option(8, "nodes, each pointing to one", low=2)
    hops: int = option(2, "steps to take", low=1)

    def validate(self) -> None:
        """No way comes back to a pair it has used."""
        if self.hops >= self.nodes:
            raise UserError(
                f"hops={self.hops} is too large; at most {self.nodes - 1} with {self.nodes} nodes"
            )

    @property
    def vocabulary(self) -> int:
        """The nodes, and the mark before the question."""
        return self.nodes + 1

    def draw(self, random: np.random.Generator) -> Example:
        """The nodes form one ring; the pairs on the way are relevant."""
        ring, order = random.permutation(self.nodes), random.permutation(self.nodes)
        pairs = np.stack([ring, np.roll(ring, -1)], 1)
        place_of = np.argsort(order)
        start = int(random.integers(self.nodes))
        steps = [(start + step) % self.nodes for step in range(self.hops)]
        tokens = np.concatenate([pairs[order].ravel(), [self.nodes, ring[start]]])
        relevant = [place for step in steps for place in (2 * place_of[step], 2 * place_of[step] + 1)]
        answer = int(ring[(start + self.hops) % self.nodes])
        return asked(tokens, {len(tokens) - 1: answer}, [relevant])


# --- the toy of faster query-key learning ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Toy(Synthetic):
    """Common tokens and those of one class of four; then the query of that class. Its label is asked for."""

    about = "the toy of faster query-key learning: tokens of a class among common ones"
    length: int = option(64, "tokens with the label; one fewer are the input", low=3)

    @property
    def vocabulary(self) -> int:
        """Ten common tokens, ten of each class."""
        return toy.VOCABULARY

    def draw(self, random: np.random.Generator) -> Example:
        """Context tokens above 9 are of the class, and relevant."""
        source = toy.Source(seed=0, length=self.length)
        generator = torch.Generator().manual_seed(int(random.integers(2**62)))
        drawn, classes = toy.draw_tokens(source, 1, generator)
        tokens, kind = drawn[0].numpy(), int(classes[0])
        relevant = [np.flatnonzero(tokens >= toy.COMMON).tolist()]
        return asked(tokens, {len(tokens) - 1: source.target + kind}, relevant, f"class {kind}")


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
_PLACES = ("near", "behind", "beside", "with", "above", "under")
_ADJECTIVES = ("old", "small", "green", "tall", "kind", "quiet")


@dataclasses.dataclass(frozen=True)
class Grammar(Synthetic):
    """Noun phrases with other nouns inside, up to the verb whose number is asked for."""

    about = "an agreement grammar: the verb's number, with nouns of the other number in between"
    phrases: int = option(
        3, "phrases with a noun of their own between subject and verb, at most", low=0, high=8
    )
    words: ClassVar[tuple[str, ...]] = (
        *("the", "that"),
        *_NOUNS,
        *_PLURALS,
        *_VERBS,
        *_THIRD,
        *_PLACES,
        *_ADJECTIVES,
    )

    @property
    def vocabulary(self) -> int:
        """The words."""
        return len(self.words)

    @property
    def classes(self) -> tuple[str, ...]:
        """The verb's numbers."""
        return ("singular", "plural")

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
                words += [any_of(_PLACES), *phrase(plural)]
            else:
                words += ["that", *phrase(plural), any_of(_VERBS if plural else _THIRD)]
        places = {word: place for place, word in enumerate(self.words)}
        tokens = np.array([places[word] for word in words], dtype=np.int64)
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
