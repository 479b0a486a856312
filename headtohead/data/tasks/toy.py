"""The toy task of faster query-key learning: common tokens and tokens of a class that the last token names.

Common tokens are 0..9; class c of four has the tokens 10(c+1)..10(c+1)+9. A context token in a sequence of class c is one
of the common ten with weight 1 each, or one of the class's ten with weights .1, .2 .. 1. The query 5+c follows, and the
label is 1+c.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = 50
CLASSES = 4
COMMON = 10
FIRST_QUERY, FIRST_LABEL = 5, 1

# Weights 1 and .1, .2 .. 1 in tenths: 155 equally likely slots.
_SLOTS = [token for token in range(COMMON) for _ in range(10)]
_SLOTS += [COMMON + own for own in range(10) for _ in range(own + 1)]


@dataclass(frozen=True)
class Source:
    """The settings that determine a run's sequences; runs with equal sources see the same sequences in the same order."""

    seed: int
    length: int = 64
    batch: int = 32
    balanced: bool = False
    """Equally many sequences of every class in each batch."""
    label_in_input: bool = False
    """The last input is 1+c and the target 5+c: the variant of the fixed-attention study."""

    @property
    def last(self) -> int:
        """The token id of class 0 at the last input position."""
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
    # 155 slots fit in a byte, and drawing bytes is twice as fast.
    slots = torch.randint(len(_SLOTS), size, generator=generator, device=device, dtype=torch.uint8)
    per_class = torch.tensor(_SLOTS, device=device).repeat(CLASSES, 1)
    own = per_class >= COMMON
    per_class += own * COMMON * torch.arange(CLASSES, device=device)[:, None]
    indices = slots.long().add_((classes * len(_SLOTS))[:, None])
    context = per_class.view(-1).gather(0, indices.view(-1)).view(size)
    return torch.cat((context, (classes + source.last)[:, None]), 1), classes
