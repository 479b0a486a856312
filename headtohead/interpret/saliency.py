"""Explanations to compare with attention: gradient x input, and random scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headtohead.interpret.readout import ReadBatch, chances
from headtohead.model.decoder import Decoder


def gradient_x_input(model: Decoder, batch: ReadBatch, given: Tensor) -> Tensor:
    """Return (batch, time): each token's embedding times the gradient of the given answer's log-probability.

    Positive if the token supports the answer; 0 at padding.
    """
    embedded: list[Tensor] = []

    def capture(_: Any, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if arguments[0] is not batch.tokens:  # the companion's pass
            return None
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = model.embedding.register_forward_hook(capture)
    try:
        with torch.enable_grad():
            found = chances(model, batch.tokens, batch.padding, batch.places, batch.ends)
            total = found.gather(-1, given[:, None]).clamp_min(1e-30).log().sum()
            (gradient,) = torch.autograd.grad(total, embedded[0])
    finally:
        handle.remove()
    return (gradient * embedded[0].detach()).double().sum(-1).masked_fill(~batch.real, 0.0)


def chance(batch: ReadBatch, seed: int) -> Tensor:
    """Return random scores (batch, time); those of a read do not depend on the rest of its batch."""
    rows = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    for index, read in enumerate(batch.reads):
        draw = np.random.default_rng([seed, read.example, read.place, read.end])
        rows[index, : len(read.tokens)] = torch.from_numpy(draw.random(len(read.tokens)))
    return rows.to(batch.tokens.device)
