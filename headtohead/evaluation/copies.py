"""Loss by copy depth: how much of a token's context has occurred earlier in its window."""

from __future__ import annotations

import torch
from torch import Tensor

from headtohead.evaluation.loss import evaluating, windows_per_pass
from headtohead.model.decoder import Decoder


def match_lengths(tokens: Tensor) -> Tensor:
    """Return (windows, time) for tokens (windows, time): the length of the longest match that ends at each token.

    A match of length n at t is an earlier place u < t with the same last n tokens: tokens[u - n + 1 .. u] equal
    tokens[t - n + 1 .. t]. The two may overlap.
    """
    count, time = tokens.shape
    place = torch.arange(time, device=tokens.device)
    # run[:, u] is the length of the match of the places t and u, from that of t - 1 and u - 1.
    run = torch.zeros(count, time, dtype=torch.long, device=tokens.device)
    found = torch.zeros_like(run)
    for t in range(time):
        longer = torch.nn.functional.pad(run[:, :-1], (1, 0)) + 1
        run = torch.where((tokens == tokens[:, t : t + 1]) & (place < t), longer, 0)
        found[:, t] = run.max(1).values
    return found


@torch.no_grad()
def nats_and_matches(model: Decoder, windows: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return the nats of each predicted token of windows (windows, time), and the match that ends just before it."""
    device = model.readout.device
    tokens, targets = windows[:, :-1], windows[:, 1:]
    size = windows_per_pass(device, tokens.shape[1])
    with evaluating(model), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        passes = zip(tokens.split(size), targets.split(size), strict=True)
        nats = torch.cat([model.nats(one, other).double() for one, other in passes])
    return nats, match_lengths(tokens)
