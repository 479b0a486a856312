"""No attention: a block is only its feed-forward block. A control for what the other parts achieve alone.

    x <- x + ffn(norm(x))

The norm before attention is omitted too.

Arms: even(no_attention)

Claims: None; the paper on substitutes for attention (arXiv 2510.11602) lacks this control.

Watch: The arm has no attention parameters: `shape = params` moves them to the feed-forward block. A hybrid that is no better
than `even(no_attention)` gains nothing from its substitute.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from headtohead.mechanisms.contract.base import Flops, Frame, Mechanism, Mode
from headtohead.mechanisms.contract.cache import Cache, Entry


class NoAttention(Mechanism):
    """Returns zeros: the attention part of the block is omitted."""

    name: ClassVar[str] = "no_attention"
    writes: ClassVar[bool] = False

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return zeros (batch, time, width)."""
        return torch.zeros_like(x)

    def cache_spec(self) -> tuple[Entry, ...]:
        """Nothing."""
        return ()

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return zero."""
        return Flops(0.0, 0.0)
