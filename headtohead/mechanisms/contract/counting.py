"""Count FLOPs of the plain reference on the `meta` device: every matrix product, without memory or run time."""

from __future__ import annotations

import copy

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headtohead.kernels import plain
from headtohead.mechanisms.contract.base import Companion, Flops, Frame, Mechanism, Mode, Rotary

_NEAR = 0.01
"""A declaration that differs from the count by more than this fraction is not used."""


def count(mechanism: Mechanism, context: int, batch: int, mode: Mode) -> Flops:
    """Return counted FLOPs per token, with the same convention as declared ones.

    A causal token at position t needs only the t tokens so far. So `causal` is the cost per token at a context of t,
    averaged over t = 1 to `context`: for softmax attention exactly the (context + 1) / 2 keys that `standard` declares,
    whether the code masks a whole map or calls a fused kernel.
    """
    full = counted_flops(mechanism, context, batch, mode)
    if mode == "decode" or context == 1:
        return Flops(full, full)
    lengths = sorted({1, *(context // share for share in (8, 4, 2) if context >= share), context})
    try:
        # Code that pads to a chunk costs more per token at a short context; no token counts more than at the full one.
        costs = [min(full, counted_flops(mechanism, length, batch, mode)) for length in lengths]
    except Exception:  # works at one context only: the masked half is unknown
        return Flops(full, full)
    # Linear interpolation between the lengths: exact for every cost of the form a + b t.
    area = sum(
        (after - before) * (one + other) / 2
        for before, after, one, other in zip(lengths, lengths[1:], costs, costs[1:], strict=False)
    )
    return Flops(area / (context - 1), full)


def audited_flops(mechanism: Mechanism, context: int, batch: int, mode: Mode) -> tuple[Flops, bool]:
    """Return the FLOPs per token of a user's class, and whether they were counted rather than declared.

    A declaration that the count does not confirm, such as one inherited from a class that does less, is not used. The
    declaration is used if counting fails, for instance with a GPU kernel.
    """
    declared = type(mechanism).flops is not Mechanism.flops
    found = mechanism.flops(context, batch, mode)
    if not declared:
        return found, True
    try:
        full = counted_flops(mechanism, context, batch, mode)
    except Exception:
        return found, False
    if abs(found.full - full) <= _NEAR * full and found.causal <= found.full:
        return found, False
    return count(mechanism, context, batch, mode), True


def counted_flops(mechanism: Mechanism, context: int, batch: int, mode: Mode) -> float:
    """Return the matrix FLOPs per token of the plain reference, with all keys of the window counted.

    `decode` is one token after `context - 1` cached ones; without a cache it recomputes the whole context.
    """
    try:
        return _counted(copy.deepcopy(mechanism).to("meta"), context, batch, mode)
    except Exception as error:  # code that reads values, or creates tensors on a fixed device
        replica = copy.deepcopy(mechanism).to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*replica.parameters(), *replica.buffers()):
                tensor.zero_()
        try:
            return _counted(replica, context, batch, mode)
        except Exception:
            raise error from None


def _counted(replica: Mechanism, context: int, batch: int, mode: Mode) -> float:
    replica.eval()
    width = replica.shape.width
    device = next((tensor.device for tensor in replica.parameters()), torch.device("meta"))
    rotary = Rotary(10_000.0, context) if replica.shape.positions == "rope" else None
    cached = mode != "train" and replica.decodable
    start, time = (context - 1, 1) if mode == "decode" and cached else (0, context)
    x = torch.zeros(batch, time, width, device=device)
    frame = Frame(start=start, time=time, rotary=rotary, embeddings=x, norm=lambda tensor: tensor)
    if (needed := replica.companion_spec()) and start == 0:
        frame.companion = Companion(torch.zeros(1, needed.length, width, device=device))
    with torch.no_grad(), plain():
        caches = [replica.new_cache(batch, context, device=device)] if cached else []
        for cache in caches:
            cache.length = start
        # On CPU, PyTorch's fused attention is not counted, but its plain form is.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            replica(x, frame, *caches)
    tokens = batch * (1 if mode == "decode" else context)
    return counter.get_total_flops() / tokens
