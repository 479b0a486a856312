"""The toy task as token counts: its model has no positions, so the counts of a sequence determine its output.

The sequences are those of the task `toy` (data/tasks/toy.py).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from headtohead.data.tasks.toy import VOCABULARY, Source, draw_tokens

CHUNK = 1000
"""Steps drawn at once; chunk n is a stateless function of (seed, n)."""
TEST_SEED, TEST_SEQUENCES = 90210, 6400


def count_tokens(tokens: Tensor) -> Tensor:
    """Return the count of each token (sequences, vocabulary), as integers."""
    zeros = torch.zeros(len(tokens), VOCABULARY, device=tokens.device, dtype=torch.long)
    return zeros.scatter_add_(1, tokens, tokens.new_ones(1).expand(tokens.shape))


def log_counts(counts: Tensor, length: int) -> Tensor:
    """Return the logarithm of counts; minus infinity for 0."""
    # From a table, because on CPU the logarithm of 0 takes ten times as long.
    table = torch.arange(length, device=counts.device).log()
    return table.gather(0, counts.view(-1)).view(counts.shape)


def draw_chunk(source: Source, number: int, device: torch.device, logarithm: bool) -> tuple[Tensor, Tensor]:
    """Return (log) counts (CHUNK, batch, vocabulary) and classes (CHUNK, batch) of a run's steps from CHUNK * number.

    They are the same on every CPU and on every GPU, but CPU and GPU draw different ones.
    """
    generator = torch.Generator(device).manual_seed(
        source.seed * 1_000_003 + number * 7_919 + source.length * 31 + source.batch
    )
    # On CPU, drawing a few steps at a time stays in the cache and takes half as long.
    piece = CHUNK // 20 if device.type == "cpu" else CHUNK
    parts = []
    for _ in range(CHUNK // piece):
        tokens, classes = draw_tokens(source, piece * source.batch, generator)
        counts = count_tokens(tokens)
        parts.append((log_counts(counts, source.length) if logarithm else counts.float(), classes))
    counts, classes = (torch.cat(tensors) for tensors in zip(*parts))
    return counts.view(CHUNK, source.batch, VOCABULARY), classes.view(CHUNK, source.batch)


@cache
def held_out(source: Source, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return counts (sequences, vocabulary) and classes (sequences,) of the test sequences; the same for every seed."""
    generator = torch.Generator(device).manual_seed(TEST_SEED + source.length)
    tokens, classes = draw_tokens(source, TEST_SEQUENCES, generator)
    return count_tokens(tokens), classes
