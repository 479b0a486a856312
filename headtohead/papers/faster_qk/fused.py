"""A window of steps of the collapsed form, CACO, in one kernel: each run is one program that keeps its two matrices.

The long toy runs are millions of steps of nine dependent kernels; here a step waits only for memory. The plain reference
is `forms.sgd_step`; the first window on a device is computed by both and compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headtohead.data.tasks.toy import CLASSES, VOCABULARY
from headtohead.kernels.path import triton_serves
from headtohead.papers.faster_qk.forms import SCALE, State

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this machine: the plain reference is used
    triton = None

FORM, BATCH = "CACO", 32


def serves(form: str, batch: int, device: torch.device) -> bool:
    """Return whether the kernel supports a form on a device."""
    fits = form == FORM and batch == BATCH and triton is not None
    return fits and triton_serves(torch.empty(0, device=device))


if triton is not None:
    # The kernel sees global constants only as constexpr; blocks of matrix products have powers of 2, at least 16.
    _BATCH, _TOKENS, _CLASSES = tl.constexpr(BATCH), tl.constexpr(VOCABULARY), tl.constexpr(CLASSES)
    _SCALE, _WIDE, _DEEP = tl.constexpr(SCALE), tl.constexpr(64), tl.constexpr(16)

    @triton.jit
    def _window(  # type: ignore[no-untyped-def]  # Triton reads the annotations
        known, ask, pull, qk, ov, losses, runs, rate, window: tl.constexpr, target: tl.constexpr
    ):
        run = tl.program_id(0)
        row = tl.arange(0, _BATCH)
        column = tl.arange(0, _WIDE)
        query = tl.arange(0, _DEEP)
        real = (column < _TOKENS)[None, :]
        square = (run * _TOKENS + column)[:, None] * _TOKENS + column[None, :]
        whole = (column < _TOKENS)[:, None] & real
        w = tl.load(ov + square, mask=whole, other=0.0)
        four = (run * _CLASSES + query)[:, None] * _TOKENS + column[None, :]
        some = (query < _CLASSES)[:, None] & real
        s = tl.load(qk + four, mask=some, other=0.0)
        # The class that each column of the error belongs to.
        label = column[None, :] - target
        labels = (label >= 0) & (label < _CLASSES)
        total = tl.zeros((_BATCH,), tl.float32)
        for step in range(window):
            # A window of all runs has fewer than 2^31 numbers, so 32-bit offsets suffice.
            line = ((step * runs + run) * _BATCH + row)[:, None]
            counts = tl.load(known + line * _TOKENS + column[None, :], mask=real, other=float("-inf"))
            one = tl.load(
                ask + line * _CLASSES + query[None, :],
                mask=(query < _CLASSES)[None, :] & (row >= 0)[:, None],
                other=0.0,
            )
            right = tl.load(ask + line * _CLASSES + label, mask=labels & (row >= 0)[:, None], other=0.0)
            pulls = tl.load(
                pull + (step * runs + run) * _CLASSES * _BATCH + query[:, None] * _BATCH + row[None, :],
                mask=(query < _CLASSES)[:, None] & (row >= 0)[None, :],
                other=0.0,
            )
            scores = counts + _SCALE * tl.dot(one, s, input_precision="ieee")
            scores = tl.exp(scores - tl.max(scores, 1)[:, None])
            mass = scores / tl.sum(scores, 1)[:, None]
            logits = tl.where(real, tl.dot(mass, w, input_precision="ieee"), float("-inf"))
            logits = tl.exp(logits - tl.max(logits, 1)[:, None])
            chance = logits / tl.sum(logits, 1)[:, None]
            total -= tl.log(tl.sum(chance * right, 1))
            error = chance - right
            slope = tl.dot(error, tl.trans(w), input_precision="ieee")
            w -= rate * tl.dot(tl.trans(mass), error, input_precision="ieee")
            slope = mass * (slope - tl.sum(slope * mass, 1)[:, None])
            s -= tl.dot(pulls, slope, input_precision="ieee")
        tl.store(ov + square, w, mask=whole)
        tl.store(qk + four, s, mask=some)
        tl.store(losses + run, tl.sum(total, 0) / (window * _BATCH))


def window_steps(state: State, known: Tensor, ask: Tensor, pull: Tensor, target: int, rate: float) -> Tensor:
    """Do a window of steps of every run in place; return each run's mean loss (runs,).

    `known` (window, runs, batch, vocabulary) has log counts; `ask` and `pull` are as for `sgd_step`, with a leading window.
    """
    window, runs = known.shape[:2]
    losses = torch.empty(runs, device=known.device)
    # 4 warps spill twice as much, 16 read 1.5 times as much shared memory.
    _window[(runs,)](
        known, ask, pull, state["qk"], state["ov"], losses, runs, rate / BATCH, window, target, num_warps=8
    )
    return losses
