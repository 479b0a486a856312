"""Training batches: windows of a corpus or examples of a task; a step is a pure function of (seed, step number)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    """One micro-batch of a run, or of every row of a population, and its share of the step's objective."""

    tokens: Tensor
    """(batch, time), or (seeds, batch, time)"""
    targets: Tensor
    """In the form the model takes."""
    padding: Tensor | None
    """The shape of tokens, True at real tokens; None if all are real."""
    share: Tensor | float
    """Of a population: one share for all rows, or each row's (seeds,)."""

    def on(self, device: torch.device) -> Part:
        """Return the part with its tensors on a device."""
        given = (self.tokens, self.targets, self.padding, self.share)
        return Part(*(moved(x, device) if isinstance(x, Tensor) else x for x in given))  # type: ignore[arg-type]


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Return x on the device; the copy from pinned memory does not wait for kernels in flight."""
    if device.type == "cuda" and not x.is_cuda:
        x = x.contiguous().pin_memory()
    return x.to(device, non_blocking=True)


def micro_batches(tokens: Tensor, targets: Tensor, micro: int) -> Iterator[Part]:
    """Yield windows (..., sequences, context) in parts of at most `micro` sequences."""
    for part, wanted in zip(tokens.split(micro, -2), targets.split(micro, -2), strict=True):
        yield Part(part, wanted, None, part.shape[-2] / tokens.shape[-2])


def population_parts(seeds: Sequence[Sequence[Part]]) -> Iterator[Part]:
    """Yield the parts of one step of several seeds, padded to one shape without affecting the objective.

    Short sequences are padded. Batches with too few examples repeat their first one with ignored targets. Steps with too
    few parts repeat their first one with share 0.
    """
    for index in range(max(len(parts) for parts in seeds)):
        chosen = [parts[index] if index < len(parts) else parts[0] for parts in seeds]
        rows, time = (max(part.tokens.shape[dim] for part in chosen) for dim in (0, 1))
        whole = all(part.padding is None and part.tokens.shape[1] == time for part in chosen)
        shares = [
            part.share if index < len(parts) else 0.0 for part, parts in zip(chosen, seeds, strict=True)
        ]
        yield Part(
            torch.stack([_padded(part.tokens, rows, time, 0) for part in chosen]),
            torch.stack([_padded_targets(part, rows, time) for part in chosen]),
            None if whole else torch.stack([_padded(_real(part), rows, time, False) for part in chosen]),
            torch.tensor(shares),
        )


def _padded(x: Tensor, rows: int, time: int, value: int | bool) -> Tensor:
    """Return x as (rows, time): sequences padded with `value`, missing rows filled with copies of the first."""
    x = F.pad(x, (0, time - x.shape[1]), value=value)
    return torch.cat((x, x[:1].expand(rows - len(x), -1))) if len(x) < rows else x


def _padded_targets(part: Part, rows: int, time: int) -> Tensor:
    targets = _padded(part.targets, rows, time, IGNORED)
    targets[len(part.targets) :] = IGNORED
    return targets


def _real(part: Part) -> Tensor:
    return torch.ones_like(part.tokens, dtype=torch.bool) if part.padding is None else part.padding


class BatchSource(ABC):
    """The steps of a run."""

    steps: int
    sequences: int
    """The most sequences in one step."""
    guess: float
    """Nats per target of a uniform guess."""
    distinct: int
    """Distinct tokens in an epoch of the train split."""

    @abstractmethod
    def parts(self, step: int, micro: int) -> Iterator[Part]:
        """Yield a step in parts of at most `micro` sequences."""

    @abstractmethod
    def tokens(self, steps: int) -> int:
        """Return the number of real tokens in `steps` steps, without padding."""

    @abstractmethod
    def epochs(self, steps: int) -> float:
        """Return how often the train split is seen in `steps` steps."""

    def unique_tokens(self, steps: int) -> int:
        """Return how many distinct tokens of the train split are seen in `steps` steps."""
        return min(self.tokens(steps), self.distinct)


class WindowBatches(BatchSource):
    """Windows of a corpus, all of one length."""

    def __init__(self, windows: Windows, settings: TrainSettings, vocabulary: int) -> None:
        self.windows, self.batch = windows, settings.batch
        self.steps = settings.steps(windows.context)
        self.sequences = settings.batch // windows.context
        self.guess = math.log(vocabulary)
        self.distinct = windows.count * windows.context

    def parts(self, step: int, micro: int) -> Iterator[Part]:
        """Yield a step in parts of at most `micro` windows."""
        first = step * self.sequences
        for start in range(0, self.sequences, micro):
            size = min(micro, self.sequences - start)
            tokens, targets = self.windows.batch(first + start, size)
            yield Part(tokens, targets, None, size / self.sequences)

    def tokens(self, steps: int) -> int:
        """Return the number of tokens in `steps` steps."""
        return steps * self.batch

    def epochs(self, steps: int) -> float:
        """Return how often the train split is seen in `steps` steps."""
        return self.windows.epochs(self.tokens(steps))


@dataclass(frozen=True)
class Division:
    """How a task's train split is divided into steps: `batch` tokens on average, in whole examples."""

    examples: int
    """Examples per step; the last step of an epoch may have fewer."""
    per_epoch: int
    """Steps per epoch."""
    tokens: int
    """Real tokens per epoch."""

    def steps(self, settings: TrainSettings) -> int:
        """Return the number of steps in `settings.tokens` real tokens, rounded down."""
        steps = settings.tokens * self.per_epoch // self.tokens
        if steps < 1:
            raise UserError(
                f"tokens={settings.tokens} do not fill one step of {self.tokens // self.per_epoch} tokens on average"
            )
        return steps

    def trained(self, steps: int) -> int:
        """Return the number of real tokens in `steps` steps, averaged over the orders of examples."""
        return steps * self.tokens // self.per_epoch


def divide(lengths: Sequence[int], batch: int) -> Division:
    """Return the division of examples of these lengths into steps of about `batch` tokens."""
    tokens = sum(lengths)
    examples = min(len(lengths), max(1, round(batch * len(lengths) / tokens)))
    return Division(examples, -(-len(lengths) // examples), tokens)


def example_length(example: Example, written: bool = True) -> int:
    """Return the number of tokens of an example, with or without the answer that is to be generated."""
    return len(example.tokens) if written else example.prompt or len(example.tokens)


class TaskBatches(BatchSource):
    """Batches of a task, in whole examples; with `pointing` the targets are positions of an answer that is not shown."""

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
        self.distinct = self.division.tokens

    def parts(self, step: int, micro: int) -> Iterator[Part]:
        """Yield a step in parts of at most `micro` examples, each with its share of the step's targets."""
        indices = self.batches.places(step)
        found = [
            collated(self.examples, indices[start : start + micro], written=not self.pointing)
            for start in range(0, len(indices), micro)
        ]
        targets = [batch.spans if self.pointing else batch.targets for batch in found]
        counts = [int((rows != IGNORED).sum()) for rows in targets]
        for batch, rows, count in zip(found, targets, counts, strict=True):
            yield Part(batch.tokens, rows, batch.padding, count / sum(counts))

    def tokens(self, steps: int) -> int:
        """Return the exact number of real tokens in `steps` steps."""
        whole = steps // self.division.per_epoch * self.division.tokens
        return whole + sum(self.lengths[index] for index in self.batches.before(steps))

    def epochs(self, steps: int) -> float:
        """Return how often the train split is seen in `steps` steps."""
        return steps / self.division.per_epoch
