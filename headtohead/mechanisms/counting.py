"""FLOPs counted on the `meta` device along the plain path: every matrix product, no memory, no time."""

from __future__ import annotations

import copy

import torch
from torch.utils.flop_counter import FlopCounterMode

from headtohead.kernels import plain
from headtohead.mechanisms.base import Companion, Frame, Mechanism, Mode, Rotary


def counted_flops(mechanism: Mechanism, context: int, batch: int, mode: Mode) -> float:
    """Return the matrix FLOPs per token that the plain path does, all keys of the window counted.

    `decode` is one token behind `context - 1` cached ones; without a cache it recomputes the whole context.
    """
    device = torch.device("meta")
    twin = copy.deepcopy(mechanism).to(device).eval()
    shape = twin.shape
    rotary = Rotary(10_000.0, context) if shape.positions == "rope" else None
    cached = mode != "train" and twin.decodable
    start, time = (context - 1, 1) if mode == "decode" and cached else (0, context)
    x = torch.zeros(batch, time, shape.width, device=device)
    frame = Frame(start=start, time=time, rotary=rotary, embeddings=x, norm=lambda tensor: tensor)
    if (needed := twin.companion_spec()) and start == 0:
        frame.companion = Companion(torch.zeros(1, needed.length, shape.width, device=device))
    with torch.no_grad(), plain():
        caches = {}
        if cached:
            caches["cache"] = twin.new_cache(batch, context, device=device)
            caches["cache"].length = start
        with FlopCounterMode(display=False) as counter:
            twin(x, frame, **caches)
    tokens = batch * (1 if mode == "decode" else context)
    return counter.get_total_flops() / tokens
