"""The toy task: sequences of common and distinct tokens whose class the last token names.

Common tokens are 0..9; class c of four owns the tokens 10(c+1)..10(c+1)+9. A context token of class c is common with
weight 1 each, or one of its own ten with weights .1, .2 .. 1. Then comes the query 5+c, and the label is 1+c. The model
has no positions, so a sequence is fully told by how often each token occurs in it: that is what is drawn here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = 50
CLASSES = 4
COMMON = 10
FIRST_QUERY, FIRST_LABEL = 5, 1
CHUNK = 1000
"""Steps drawn at once: chunk n of a seed is a function of (seed, n), so there is no state to lose."""
TEST_SEED, TEST_SEQUENCES = 90210, 6400

# Weights 1 and .1, .2 .. 1 in tenths: 155 equally likely slots.
_SLOTS = [token for token in range(COMMON) for _ in range(10)]
_SLOTS += [COMMON + own for own in range(10) for _ in range(own + 1)]


@dataclass(frozen=True)
class Source:
    """Where a run's sequences come from; runs with the same source see the same sequences in the same order."""

    seed: int
    length: int = 64
    batch: int = 32
    balanced: bool = False
    """As many sequences of every class in each batch."""
    label_in_input: bool = False
    """The last input is 1+c and the target 5+c: the variant of the fixed-attention study."""

    @property
    def last(self) -> int:
        """The token id of class 0 at the last input."""
        return FIRST_LABEL if self.label_in_input else FIRST_QUERY

    @property
    def target(self) -> int:
        """The token id of class 0's target."""
        return FIRST_QUERY if self.label_in_input else FIRST_LABEL


def draw_tokens(source: Source, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the input tokens of `count` sequences (count, length - 1), and their classes (count,)."""
    device = generator.device
    if source.balanced:
        classes = torch.arange(count, device=device) % CLASSES
    else:
        classes = torch.randint(CLASSES, (count,), generator=generator, device=device)
    size = (count, source.length - 2)
    # A byte holds 155 slots, and bytes are drawn twice as fast.
    slots = torch.randint(len(_SLOTS), size, generator=generator, device=device, dtype=torch.uint8)
    per_class = torch.tensor(_SLOTS, device=device).repeat(CLASSES, 1)
    own = per_class >= COMMON
    per_class += own * COMMON * torch.arange(CLASSES, device=device)[:, None]
    places = slots.long().add_((classes * len(_SLOTS))[:, None])
    context = per_class.view(-1).gather(0, places.view(-1)).view(size)
    return torch.cat((context, (classes + source.last)[:, None]), 1), classes


def count_tokens(tokens: Tensor) -> Tensor:
    """Return how often each token occurs (sequences, vocabulary), as whole numbers."""
    zeros = torch.zeros(len(tokens), VOCABULARY, device=tokens.device, dtype=torch.long)
    return zeros.scatter_add_(1, tokens, tokens.new_ones(1).expand(tokens.shape))


def log_counts(counts: Tensor, length: int) -> Tensor:
    """Return the logarithm of counts, minus infinity where there are none."""
    # Looked up: on CPU the logarithm of 0 alone takes ten times as long.
    table = torch.arange(length, device=counts.device).log()
    return table.gather(0, counts.view(-1)).view(counts.shape)


def draw_chunk(source: Source, number: int, device: torch.device, logarithm: bool) -> tuple[Tensor, Tensor]:
    """Return (log) counts (CHUNK, batch, vocabulary) and classes (CHUNK, batch) of a run's steps from CHUNK * number.

    They are the same on every machine of one kind; CPU and GPU draw different ones.
    """
    generator = torch.Generator(device).manual_seed(
        source.seed * 1_000_003 + number * 7_919 + source.length * 31 + source.batch
    )
    # On CPU a few steps at a time stay in the cache, and take half as long.
    piece = CHUNK // 20 if device.type == "cpu" else CHUNK
    parts = []
    for _ in range(CHUNK // piece):
        tokens, classes = draw_tokens(source, piece * source.batch, generator)
        counts = count_tokens(tokens)
        parts.append((log_counts(counts, source.length) if logarithm else counts.float(), classes))
    counts, classes = (torch.cat(tensors) for tensors in zip(*parts))
    return counts.view(CHUNK, source.batch, VOCABULARY), classes.view(CHUNK, source.batch)


def held_out(
    source: Source, count: int = TEST_SEQUENCES, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return counts (count, vocabulary) and classes (count,) that no run trains on; the same for every seed."""
    generator = torch.Generator(device).manual_seed(TEST_SEED + source.length)
    tokens, classes = draw_tokens(source, count, generator)
    return count_tokens(tokens), classes
