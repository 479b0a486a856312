"""Mechanisms as users write them: copies of standard, and cheats that each see what they must not see."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import headtohead as h2h


class Copy(h2h.Mechanism):
    """Standard attention, written by hand."""

    supports = h2h.Supports(bidirectional=False)

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))

    def mix(self, q, k, v, frame):
        return frame.attend(q, k, v)

    def heads(self, x):
        return x.unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)

    def forward(self, x, frame):
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        return self.o(self.mix(frame.rotate(q), frame.rotate(k), v, frame).transpose(1, 2).flatten(2))


class Fused(Copy):
    """With the library's kernel."""

    def mix(self, q, k, v, frame):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Masked(Copy):
    """With the whole map formed."""

    window = 0

    def mix(self, q, k, v, frame):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if self.window:
            mask = mask & ~mask.tril(-self.window)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


class Windowed(Masked):
    """Forms the whole map, and masks all of it but a window."""

    window = 8


class Understated(Copy):
    """Says that it costs nothing."""

    def flops(self, context, batch=1, mode="train"):
        return h2h.Flops(1.0, 1.0)


class OneContext(Copy):
    """Made for one context alone."""

    def forward(self, x, frame):
        if x.shape[1] != self.shape.context:
            raise ValueError("another context")
        return super().forward(x, frame)
