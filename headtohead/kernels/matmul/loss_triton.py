"""Cross-entropy of rows of logits, and its gradient in place, in one Triton kernel.

A row is read twice and written once: the second read comes from the cache, since few rows are in flight at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this machine: the caller uses PyTorch operations
    triton = None

# Elements per iteration and warps per row.
BLOCK, WARPS = 4096, 4
_LOG2E = 1.4426950408889634


if triton is not None:

    @triton.jit
    def _rows(  # type: ignore[no-untyped-def]  # Triton reads the annotations
        logits, targets, count, nats, objective, smoothing,
        vocabulary: tl.constexpr, padded: tl.constexpr, ignored: tl.constexpr, smooth: tl.constexpr,
        needed: tl.constexpr, block: tl.constexpr, log2e: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        logits += row * padded
        target = tl.load(targets + row)
        counted = target != ignored
        chosen = tl.where(counted, target, 0)
        # Before the first barrier: it is overwritten later.
        wanted = tl.load(logits + chosen).to(tl.float32)
        columns = tl.arange(0, block)
        # Of scores times log2(e): one multiply-add and a power of two.
        top, total, spread = -float("inf"), 0.0, 0.0
        for first in range(0, vocabulary - vocabulary % block, block):
            scores = tl.load(logits + first + columns).to(tl.float32)
            if smooth:
                spread += tl.sum(scores)
            higher = tl.maximum(top, tl.max(scores) * log2e)
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(scores * log2e - higher))
            top = higher
        if vocabulary % block:
            # Masked by `padded`, whole cache lines are read at once; by an odd vocabulary size, element by element.
            place = vocabulary - vocabulary % block + columns
            scores = tl.load(logits + place, mask=place < padded, other=0.0).to(tl.float32)
            if smooth:
                spread += tl.sum(tl.where(place < vocabulary, scores, 0.0))
            scores = tl.where(place < vocabulary, scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores) * log2e)
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(scores * log2e - higher))
            top = higher
        normaliser = top + tl.log2(total)
        aim = wanted
        if smooth:
            aim = (1 - smoothing) * wanted + smoothing * spread / vocabulary
        tl.store(nats + row, tl.where(counted, normaliser / log2e - wanted, 0.0))
        tl.store(objective + row, tl.where(counted, normaliser / log2e - aim, 0.0))
        if needed:
            share = tl.where(counted, 1.0 / tl.load(count), 0.0)
            # The factor goes into the exponent; a row that is not scored has exp2(-inf).
            shift = normaliser - tl.log2(share)
            less = 0.0
            if smooth:
                less = smoothing / vocabulary * share
            for first in range(0, vocabulary - vocabulary % block, block):
                scores = tl.load(logits + first + columns).to(tl.float32)
                grad = tl.exp2(scores * log2e - shift)
                if smooth:
                    grad -= less
                tl.store(logits + first + columns, grad.to(logits.dtype.element_ty))
            for first in range(vocabulary - vocabulary % block, padded, block):
                place = first + columns
                scores = tl.load(logits + place, mask=place < padded, other=0.0).to(tl.float32)
                grad = tl.where(place < vocabulary, tl.exp2(scores * log2e - shift) - less, 0.0)
                tl.store(logits + place, grad.to(logits.dtype.element_ty), mask=place < padded)
            tl.debug_barrier()
            grad = tl.exp2(wanted * log2e - shift) - less - (1 - smoothing) * share
            tl.store(logits + chosen, grad.to(logits.dtype.element_ty))


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
    """Return each row's nats and objective (rows,), 0 if it is not scored.

    logits is (rows, padded), of which the first `vocabulary` columns count. If `needed`, the gradient of the objective's
    mean over `count` rows replaces them, with 0 in the padding.
    """
    if not logits.is_contiguous():
        raise ValueError("logits must have contiguous rows")
    nats = logits.new_empty(len(logits), dtype=torch.float32)
    objective = torch.empty_like(nats)
    tensors = (logits, targets.contiguous(), count, nats, objective)
    _rows[(len(logits),)](
        *tensors,
        smoothing,
        vocabulary=vocabulary,
        padded=logits.shape[1],
        ignored=ignored,
        smooth=smoothing != 0,
        needed=needed,
        block=min(BLOCK, triton.next_power_of_2(logits.shape[1])),
        log2e=_LOG2E,
        num_warps=WARPS,
    )
    return nats, objective
