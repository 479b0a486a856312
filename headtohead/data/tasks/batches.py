"""Batches of a task: examples of similar length, padded on the right; padding is masked in loss and attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Example
from headtohead.data.windows import permuted
from headtohead.kernels.matmul.loss import IGNORED

_BUCKET = 32
"""Batches per bucket in which examples are sorted by length: less padding, and still a new mixture every epoch."""


@dataclass(frozen=True)
class Batch:
    """A batch of examples."""

    tokens: Tensor
    """(batch, time); tokens at padding are masked."""
    padding: Tensor | None
    """(batch, time), True at real tokens; None if all are real."""
    ends: Tensor
    """(batch,): index of the last real token, where the class is predicted."""
    labels: Tensor
    """(batch,), IGNORED if the task has targets."""
    targets: Tensor
    """(batch, time): a label at the last real token, or targets; IGNORED elsewhere and at padding."""
    spans: Tensor
    """(batch, 2): first and last relevant token of the first row; both 0 if there are none."""
    places: Tensor
    """(batch,): index of each example in the split."""


def collated(examples: Sequence[Example], places: Sequence[int], written: bool = True) -> Batch:
    """Return the examples at indices `places` as a batch; `written` includes the answers to generate.

    Without them the last real token is the end of the prompt, and there are no targets.
    """
    chosen = [examples[index] for index in places]
    lengths = [
        len(example.tokens) if written else example.prompt or len(example.tokens) for example in chosen
    ]
    count, time = len(chosen), max(lengths)
    tokens = np.zeros((count, time), dtype=np.int64)
    targets = np.full((count, time), IGNORED, dtype=np.int64)
    spans = np.zeros((count, 2), dtype=np.int64)
    for row, (example, length) in enumerate(zip(chosen, lengths, strict=True)):
        tokens[row, :length] = example.tokens[:length]
        if len(marked := np.flatnonzero(example.relevant[0, :length])):
            spans[row] = marked[0], marked[-1]
        if example.targets is None:
            targets[row, length - 1] = example.label
        elif written:
            targets[row, :length] = example.targets
    real = torch.arange(time) < torch.tensor(lengths)[:, None]
    return Batch(
        tokens=torch.from_numpy(tokens),
        padding=None if min(lengths) == time else real,
        ends=torch.tensor(lengths) - 1,
        labels=torch.tensor([example.label for example in chosen]),
        targets=torch.from_numpy(targets),
        spans=torch.from_numpy(spans),
        places=torch.tensor(list(places)),
    )


class Batches:
    """An infinite order of batches, the same for every arm with the same seed: a stateless function of (seed, number).

    Every example is in one batch of every epoch; the last batch of an epoch may be smaller.
    """

    def __init__(self, examples: Sequence[Example], size: int, seed: int) -> None:
        if size < 1:
            raise UserError(f"batch={size} examples is too small; at least 1 is allowed")
        self.examples, self.size, self.seed = examples, size, seed
        self.per_epoch = -(-len(examples) // size)
        self._lengths = np.array([len(example.tokens) for example in examples])
        self._known: tuple[int, list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = (-1, [])

    def batch(self, number: int) -> Batch:
        """Return the batch of that number, counted from 0 across epochs."""
        return collated(self.examples, self.places(number))

    def places(self, number: int) -> list[int]:
        """Return the indices of the examples in the batch of that number."""
        epoch, index = divmod(number, self.per_epoch)
        return [int(example) for example in self._order(epoch)[index]]

    def before(self, number: int) -> list[int]:
        """Return the indices of the examples that precede the batch of that number in its epoch."""
        epoch, index = divmod(number, self.per_epoch)
        return [int(example) for batch in self._order(epoch)[:index] for example in batch]

    def _order(self, epoch: int) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        if epoch != self._known[0]:
            self._known = (epoch, self._epoch(epoch))
        return self._known[1]

    def _epoch(self, epoch: int) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        count = len(self.examples)
        order = permuted(np.arange(count), count, f"task/{self.seed}/{epoch}")
        batches = []
        for start in range(0, count, _BUCKET * self.size):
            bucket = order[start : start + _BUCKET * self.size]
            bucket = bucket[np.argsort(self._lengths[bucket], kind="stable")]
            batches += [bucket[first : first + self.size] for first in range(0, len(bucket), self.size)]
        # Otherwise short batches would always come before long ones.
        shuffled = permuted(np.arange(len(batches)), len(batches), f"task/{self.seed}/{epoch}/batches")
        return [batches[index] for index in shuffled]


def by_length(lengths: Sequence[int], limit: int, padded: bool) -> Iterator[list[int]]:
    """Yield indices in groups of similar length, shortest first: at most `limit` tokens in each, including padding.

    Without `padded` a group has equal lengths.
    """
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        full = (len(group) + 1) * lengths[index] > limit
        if group and (full or (not padded and lengths[group[0]] != lengths[index])):
            yield group
            group = []
        group.append(index)
    if group:
        yield group
