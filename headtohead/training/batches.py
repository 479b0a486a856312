"""What a trainer is fed: windows of a corpus or batches of a task; a step is a function of (seed, number), no state to lose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Example
from headtohead.data.tasks.batches import Batches, collated
from headtohead.data.windows import Windows
from headtohead.kernels.matmul.loss import IGNORED
from headtohead.training.settings import TrainSettings


@dataclass(frozen=True)
class Part:
    """What goes through the model at once, and its share of the step's objective."""

    tokens: Tensor
    """(batch, time)"""
    targets: Tensor
    """As the model takes them."""
    padding: Tensor | None
    """(batch, time), true at real tokens; None where all are."""
    share: float


@dataclass(frozen=True)
class PopulationPart:
    """What goes through the models of several seeds at once."""

    tokens: Tensor
    """(seeds, batch, time)"""
    targets: Tensor
    padding: Tensor | None
    share: Tensor | float
    """Of each seed's objective (seeds,), or the same for all."""


def population_parts(seeds: Sequence[Sequence[Part]]) -> Iterator[PopulationPart]:
    """Yield a step of several seeds, filled up to one shape with what counts nowhere.

    A sequence that is too short goes on with padding; a batch of too few examples with copies of its first one, of which
    nothing is asked; a step of too few parts with a copy of its first one that has no share in it.
    """
    for place in range(max(len(parts) for parts in seeds)):
        chosen = [parts[place] if place < len(parts) else parts[0] for parts in seeds]
        rows, time = (max(part.tokens.shape[dim] for part in chosen) for dim in (0, 1))
        whole = all(part.padding is None and part.tokens.shape[1] == time for part in chosen)
        shares = [
            part.share if place < len(parts) else 0.0 for part, parts in zip(chosen, seeds, strict=True)
        ]
        yield PopulationPart(
            torch.stack([_filled(part.tokens, rows, time, 0) for part in chosen]),
            torch.stack([_asked(part, rows, time) for part in chosen]),
            None if whole else torch.stack([_filled(_real(part), rows, time, False) for part in chosen]),
            torch.tensor(shares),
        )


def _filled(x: Tensor, rows: int, time: int, value: int | bool) -> Tensor:
    """Return (rows, time): longer sequences, and copies of the first."""
    x = F.pad(x, (0, time - x.shape[1]), value=value)
    return torch.cat((x, x[:1].expand(rows - len(x), -1))) if len(x) < rows else x


def _asked(part: Part, rows: int, time: int) -> Tensor:
    targets = _filled(part.targets, rows, time, IGNORED)
    targets[len(part.targets) :] = IGNORED
    return targets


def _real(part: Part) -> Tensor:
    return torch.ones_like(part.tokens, dtype=torch.bool) if part.padding is None else part.padding


class BatchSource(Protocol):
    """The steps of a run."""

    steps: int
    sequences: int
    """In one step, at most."""
    guess: float
    """Nats of a uniform guess at one target."""

    def parts(self, step: int, micro: int) -> Iterator[Part]:
        """Yield a step in parts of at most `micro` sequences."""
        ...

    def tokens(self, steps: int) -> int:
        """Return the real tokens of so many steps, padding not counted."""
        ...

    def epochs(self, steps: int) -> float:
        """Return how often the train split is seen in so many steps."""
        ...

    def unique_tokens(self, steps: int) -> int:
        """Return how many different tokens of the train split are seen."""
        ...


class WindowBatches:
    """Windows of a corpus, all of one length."""

    def __init__(self, windows: Windows, settings: TrainSettings, vocabulary: int) -> None:
        self.windows, self.batch = windows, settings.batch
        self.steps = settings.steps(windows.context)
        self.sequences = settings.batch // windows.context
        self.guess = math.log(vocabulary)

    def parts(self, step: int, micro: int) -> Iterator[Part]:
        """Yield a step in parts of at most `micro` windows."""
        first = step * self.sequences
        for start in range(0, self.sequences, micro):
            size = min(micro, self.sequences - start)
            tokens, targets = self.windows.batch(first + start, size)
            yield Part(tokens, targets, None, size / self.sequences)

    def tokens(self, steps: int) -> int:
        """Return the tokens of so many steps."""
        return steps * self.batch

    def epochs(self, steps: int) -> float:
        """Return how often the train split is seen in so many steps."""
        return self.windows.epochs(self.tokens(steps))

    def unique_tokens(self, steps: int) -> int:
        """Return how many different tokens of the train split are seen."""
        return min(self.tokens(steps), self.windows.count * self.windows.context)


@dataclass(frozen=True)
class Division:
    """How a task's train split is divided into steps: `batch` tokens on average, whole examples in each."""

    examples: int
    """In one step; the last of an epoch may hold fewer."""
    per_epoch: int
    """Steps that see every example once."""
    tokens: int
    """Real tokens of an epoch."""

    def steps(self, settings: TrainSettings) -> int:
        """Return the steps that `tokens` real tokens make, rounded down."""
        steps = settings.tokens * self.per_epoch // self.tokens
        if steps < 1:
            raise UserError(
                f"tokens={settings.tokens} do not fill one step of {self.tokens // self.per_epoch} tokens on average"
            )
        return steps

    def trained(self, steps: int) -> int:
        """Return the real tokens of so many steps, on average over the orders of examples."""
        return steps * self.tokens // self.per_epoch


def divide(lengths: Sequence[int], batch: int) -> Division:
    """Return the division of examples of these lengths into steps of about `batch` tokens."""
    tokens = sum(lengths)
    examples = min(len(lengths), max(1, round(batch * len(lengths) / tokens)))
    return Division(examples, -(-len(lengths) // examples), tokens)


def example_length(example: Example, written: bool = True) -> int:
    """Return the tokens of an example, with what is to be written out or without it."""
    return len(example.tokens) if written else example.prompt or len(example.tokens)


class TaskBatches:
    """Batches of a task, in whole examples; with `pointing` the targets are places of an answer, which is not shown."""

    def __init__(
        self,
        examples: Sequence[Example],
        settings: TrainSettings,
        seed: int,
        outputs: int,
        *,
        pointing: bool = False,
    ) -> None:
        self.examples, self.pointing = examples, pointing
        self.lengths = [example_length(example, not pointing) for example in examples]
        self.division = divide(self.lengths, settings.batch)
        self.batches = Batches(examples, self.division.examples, seed)
        self.steps, self.sequences = self.division.steps(settings), self.division.examples
        self.guess = math.log(max(self.lengths) if pointing else outputs)

    def parts(self, step: int, micro: int) -> Iterator[Part]:
        """Yield a step in parts of at most `micro` examples, each with its share of the step's targets."""
        places = self.batches.places(step)
        found = [
            collated(self.examples, places[start : start + micro], written=not self.pointing)
            for start in range(0, len(places), micro)
        ]
        targets = [batch.spans if self.pointing else batch.targets for batch in found]
        asked = [int((rows != IGNORED).sum()) for rows in targets]
        for batch, rows, count in zip(found, targets, asked, strict=True):
            yield Part(batch.tokens, rows, batch.padding, count / sum(asked))

    def tokens(self, steps: int) -> int:
        """Return the real tokens of so many steps, to the unit."""
        whole = steps // self.division.per_epoch * self.division.tokens
        return whole + sum(self.lengths[place] for place in self.batches.before(steps))

    def epochs(self, steps: int) -> float:
        """Return how often the train split is seen in so many steps."""
        return steps / self.division.per_epoch

    def unique_tokens(self, steps: int) -> int:
        """Return how many different tokens of the train split are seen."""
        return min(self.tokens(steps), self.division.tokens)
