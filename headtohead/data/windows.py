"""Training windows in a keyed order: a stateless function of (seed, step) that visits every window once per epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.data.shards import Split
from headtohead.data.text import Array

_ROUNDS = 6
_BLOCK = 4096


def permuted(indices: Array, count: int, key: str) -> Array:
    """Return the image of each index in 0..count-1 under the permutation keyed by `key`, in O(1) per index.

    A Feistel network over the next even power of two, repeated until the result is below `count` (cycle walking).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    material = hashlib.sha256(key.encode()).digest() * 2
    keys = [np.uint64(int.from_bytes(material[8 * i : 8 * i + 8], "little")) for i in range(_ROUNDS)]
    values = indices.astype(np.uint64)
    pending = np.arange(len(values))
    while len(pending):
        left, right = values[pending] >> np.uint64(half), values[pending] & mask
        for round_key in keys:
            left, right = right, left ^ (_mixed(right, round_key) & mask)
        values[pending] = (left << np.uint64(half)) | right
        pending = pending[values[pending] >= count]
    return values.astype(np.int64)


def _mixed(value: Array, key: np.uint64) -> Array:
    """The finalizer of splitmix64: every input bit affects every output bit."""
    with np.errstate(over="ignore"):
        value = value * np.uint64(0x9E3779B97F4A7C15) + key
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


class Windows:
    """Windows of `context` tokens and their targets, in the same order for every arm with the same seed."""

    def __init__(self, split: Split, context: int, seed: int, name: str = "train split") -> None:
        self.tokens, self.context, self.seed = split.tokens, context, seed
        self.count = (len(split.tokens) - 1) // context
        self._known = (-1, -1)
        self._order = np.empty(0, dtype=np.int64)
        if self.count < 1:
            raise UserError(
                f"the {name} has {len(split.tokens):,} tokens; a context of {context} needs {context + 1:,}"
            )

    def batch(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets (size, context) of windows `first`, `first + 1`, ... of the infinite order."""
        starts = np.array([self._window(index) for index in range(first, first + size)]) * self.context
        rows = self.tokens[starts[:, None] + np.arange(self.context + 1)]
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1], both[:, 1:]

    def _window(self, index: int) -> int:
        """Return the window at an index of the infinite order; computes a block of indices at once."""
        epoch, index = divmod(index, self.count)
        block, offset = divmod(index, _BLOCK)
        if (epoch, block) != self._known:
            stop = min(self.count, (block + 1) * _BLOCK)
            self._order = permuted(np.arange(block * _BLOCK, stop), self.count, f"{self.seed}/{epoch}")
            self._known = (epoch, block)
        return int(self._order[offset])

    def epochs(self, tokens: int) -> float:
        """Return how often the split is seen in a run of that many tokens."""
        return tokens / (self.count * self.context)


def scoring_windows(tokens: Array, context: int, batch: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (tokens, targets, index of the first target) over non-overlapping windows that cover a split once.

    Every token except the first is a target exactly once; the last window may be shorter; there is no padding.
    """
    count = (len(tokens) - 1) // context
    for first in range(0, count, batch):
        rows = min(batch, count - first)
        start = first * context
        flat = np.asarray(tokens[start : start + rows * context + 1]).astype(np.int64)
        both = torch.from_numpy(flat)
        yield both[:-1].view(rows, context), both[1:].view(rows, context), start + 1
    start = count * context
    if start < len(tokens) - 1:
        both = torch.from_numpy(np.asarray(tokens[start:]).astype(np.int64))
        yield both[None, :-1], both[None, 1:], start + 1
