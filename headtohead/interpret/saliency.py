"""Explanations to hold attention against: gradient x input, and chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headtohead.interpret.readout import ReadBatch, chances
from headtohead.model.decoder import Decoder


def gradient_x_input(model: Decoder, batch: ReadBatch, given: Tensor) -> Tensor:
    """Return (batch, time): each token's embedding times the gradient of the given answer's log-probability.

    Positive where the token speaks for the answer; nothing at padding.
    """
    held: list[Tensor] = []

    def hold(_: Any, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if arguments[0] is not batch.tokens:  # a companion's own pass
            return None
        held.append(output.detach().requires_grad_())
        return held[-1]

    handle = model.embedding.register_forward_hook(hold)
    try:
        with torch.enable_grad():
            found = chances(model, batch.tokens, batch.padding, batch.places, batch.ends)
            total = found.gather(-1, given[:, None]).clamp_min(1e-30).log().sum()
            (slope,) = torch.autograd.grad(total, held[0])
    finally:
        handle.remove()
    return (slope * held[0].detach()).double().sum(-1).masked_fill(~batch.real, 0.0)


def chance(batch: ReadBatch, seed: int) -> Tensor:
    """Return (batch, time) drawn scores, the same for a read whatever stands beside it."""
    rows = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    for place, read in enumerate(batch.reads):
        draw = np.random.default_rng([seed, read.example, read.place, read.end])
        rows[place, : len(read.tokens)] = torch.from_numpy(draw.random(len(read.tokens)))
    return rows.to(batch.tokens.device)
