"""Cross-entropy of rows of logits, and its gradient written over them, in one Triton kernel.

A row is read twice and written once: the second reading comes from the cache, since few rows are under way at a time.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton for this machine: the caller's own passes serve
    triton = None

# Elements at a time and warps of a row.
BLOCK, WARPS = 8192, 16


def serves(x: Tensor) -> bool:
    """Return whether the kernel can run on rows like `x`: on a GPU, or in Triton's interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return triton is not None and x.dtype != torch.float64 and (x.is_cuda or interpreted)


if triton is not None:

    @triton.jit
    def _rows(  # type: ignore[no-untyped-def]  # Triton reads the annotations
        logits,
        targets,
        count,
        nats,
        objective,
        smoothing,
        vocabulary: tl.constexpr,
        padded: tl.constexpr,
        ignored: tl.constexpr,
        smooth: tl.constexpr,
        needed: tl.constexpr,
        block: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        logits += row * padded
        target = tl.load(targets + row)
        counted = target != ignored
        # Before the first barrier: later it is overwritten.
        wanted = tl.load(logits + tl.where(counted, target, 0)).to(tl.float32)
        columns = tl.arange(0, block)
        top, total, spread = -float("inf"), 0.0, 0.0
        for first in range(0, vocabulary, block):
            # Masked by `padded`, whole lines are read at once; by an odd vocabulary, number by number.
            place = first + columns
            real = place < vocabulary
            scores = tl.load(logits + place, mask=place < padded, other=0.0).to(tl.float32)
            scores = tl.where(real, scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(scores - higher))
            top = higher
            if smooth:
                spread += tl.sum(tl.where(real, scores, 0.0))
        normaliser = top + tl.log(total)
        aim = wanted
        if smooth:
            aim = (1 - smoothing) * wanted + smoothing * spread / vocabulary
        tl.store(nats + row, tl.where(counted, normaliser - wanted, 0.0))
        tl.store(objective + row, tl.where(counted, normaliser - aim, 0.0))
        if needed:
            share = tl.where(counted, 1.0 / tl.load(count), 0.0)
            for first in range(0, padded, block):
                place = first + columns
                real = place < vocabulary
                scores = tl.load(logits + place, mask=place < padded, other=0.0).to(tl.float32)
                grad = tl.exp(scores - normaliser)
                if smooth:
                    grad -= smoothing / vocabulary
                grad = tl.where(place == target, grad - (1 - smoothing), grad)
                grad = tl.where(real & counted, grad * share, 0.0)
                tl.store(logits + place, grad.to(logits.dtype.element_ty), mask=place < padded)


def cross_entropy_rows(
    logits: Tensor,
    targets: Tensor,
    count: Tensor,
    vocabulary: int,
    *,
    ignored: int,
    smoothing: float = 0.0,
    needed: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return each row's nats and objective (rows,), zero where it is not scored.

    logits is (rows, padded), of which the first `vocabulary` columns count; where the gradient is `needed`, that of the
    objective's mean over `count` rows stands in them afterwards, zero in the rest.
    """
    if not logits.is_contiguous():
        raise ValueError("rows of logits follow each other in memory")
    nats = logits.new_empty(len(logits), dtype=torch.float32)
    objective = torch.empty_like(nats)
    _rows[(len(logits),)](
        logits,
        targets,
        count,
        nats,
        objective,
        smoothing,
        vocabulary=vocabulary,
        padded=logits.shape[1],
        ignored=ignored,
        smooth=smoothing != 0,
        needed=needed,
        block=min(BLOCK, triton.next_power_of_2(logits.shape[1])),
        num_warps=WARPS,
    )
    return nats, objective
