"""Short causal convolutions on a GPU: each number is read from memory once and written once per direction.

A thread computes a few successive tokens of a few channels, with all their inputs in registers. Backward recomputes the input
of the activation. Each program stores one sum per tap and channel for the gradient of the weights; they are added
afterwards, always in the same order.
"""

# Tuples grow while a kernel is unrolled.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headtohead.kernels.vmap import operator

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this machine: the plain reference runs
    triton = None

MAX_TAPS = 8
"""The kernels are unrolled over the taps."""
# A tile is (_RUNS, _CHANNELS), 128 bytes of a row in bf16; each of its rows goes through successive tokens, one at a time.
_RUNS, _TOKENS, _CHANNELS = 16, 8, 64


if triton is not None:

    @triton.jit
    def _tile(  # type: ignore[no-untyped-def]  # Triton reads the annotations
        time, channels: tl.constexpr, runs: tl.constexpr, tokens: tl.constexpr, wide: tl.constexpr
    ):
        """The number of a program's part of time, its sequence, the first token of each run, and the channels."""
        across, along = tl.cdiv(channels, wide), tl.cdiv(time, runs * tokens)
        part = tl.program_id(0) // across
        row = ((part % along) * runs + tl.arange(0, runs)[:, None]) * tokens
        column = (tl.program_id(0) % across) * wide + tl.arange(0, wide)[None, :]
        return part.to(tl.int64), (part // along).to(tl.int64), row, column

    @triton.jit
    def _window(  # type: ignore[no-untyped-def]
        first, row, column, time, stride, channels: tl.constexpr, low: tl.constexpr, high: tl.constexpr
    ):
        """The tiles `low` to `high` - 1 tokens after `row` of the sequence that begins at `first`; zeros outside of it."""
        tiles = ()
        for shift in tl.static_range(low, high):
            place = row + shift
            real = (place >= 0) & (place < time) & (column < channels)
            tiles += (tl.load(first + place.to(tl.int64) * stride + column, mask=real, other=0.0),)
        return tiles

    @triton.jit
    def _factors(  # type: ignore[no-untyped-def]
        weight, column, channels: tl.constexpr, rows: tl.constexpr, residual: tl.constexpr
    ):
        """The factors (1, wide) of the tokens 0, 1, ... steps back, then the bias; the residual is 1 in the first."""
        factors = ()
        for i in tl.static_range(rows):
            one = tl.load(weight + i * channels + column, mask=column < channels, other=0.0).to(tl.float32)
            factors += (one + 1.0 if residual and i == 0 else one,)
        return factors

    @triton.jit
    def _mixed(  # type: ignore[no-untyped-def]
        states, factors, place: tl.constexpr, taps: tl.constexpr, rows: tl.constexpr
    ):
        """The input (runs, wide) of the activation at the token states[place]."""
        mixed = states[place].to(tl.float32) * factors[0]
        for i in tl.static_range(1, taps):
            mixed += states[place - i].to(tl.float32) * factors[i]
        return mixed + factors[taps] if rows > taps else mixed

    @triton.jit
    def _slope(  # type: ignore[no-untyped-def]
        grads, states, factors, place: tl.constexpr, before: tl.constexpr,
        taps: tl.constexpr, rows: tl.constexpr, silu: tl.constexpr,
    ):  # fmt: skip
        """The gradient (runs, wide) of the input of the activation at the token grads[place], states[place + before]."""
        slope = grads[place].to(tl.float32)
        if silu:
            mixed = _mixed(states, factors, place + before, taps, rows)
            share = tl.sigmoid(mixed)
            slope *= share * (1.0 + mixed * (1.0 - share))
        return slope

    @triton.jit
    def _forward(  # type: ignore[no-untyped-def]
        h, weight, out, batch, time, stack_stride, batch_stride, stride,
        channels: tl.constexpr, taps: tl.constexpr, rows: tl.constexpr,
        residual: tl.constexpr, silu: tl.constexpr,
        runs: tl.constexpr, tokens: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        _, sequence, row, column = _tile(time, channels, runs, tokens, wide)
        stack, member = sequence // batch, sequence % batch
        h += stack * stack_stride + member * batch_stride
        out += sequence * time * channels
        factors = _factors(weight + stack * rows * channels, column, channels, rows, residual)
        states = _window(h, row, column, time, stride, channels, 1 - taps, tokens)
        for token in tl.static_range(tokens):
            mixed = _mixed(states, factors, token + taps - 1, taps, rows)
            if silu:
                mixed *= tl.sigmoid(mixed)
            place = row + token
            real = (place < time) & (column < channels)
            place = place.to(tl.int64) * channels + column
            tl.store(out + place, mixed.to(out.dtype.element_ty), mask=real)

    @triton.jit
    def _backward(  # type: ignore[no-untyped-def]
        h, weight, grad, grad_h, sums, batch, time, stack_stride, batch_stride, stride,
        channels: tl.constexpr, taps: tl.constexpr, rows: tl.constexpr,
        residual: tl.constexpr, silu: tl.constexpr,
        runs: tl.constexpr, tokens: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        part, sequence, row, column = _tile(time, channels, runs, tokens, wide)
        stack, member = sequence // batch, sequence % batch
        h += stack * stack_stride + member * batch_stride
        grad += sequence * time * channels
        grad_h += sequence * time * channels
        factors = _factors(weight + stack * rows * channels, column, channels, rows, residual)
        # A token reaches the outputs 0 to taps - 1 steps later; SiLU needs all inputs of those.
        before: tl.constexpr = taps - 1 if silu else 0
        after: tl.constexpr = taps - 1
        states = _window(h, row, column, time, stride, channels, -before, tokens + before)
        grads = _window(grad, row, column, time, channels, channels, 0, tokens + after)
        slopes = ()
        for later in tl.static_range(after):
            slopes += (_slope(grads, states, factors, later, before, taps, rows, silu),)
        found = (tl.zeros((runs, wide), dtype=tl.float32),) * rows
        for token in tl.static_range(tokens):
            slopes += (_slope(grads, states, factors, token + after, before, taps, rows, silu),)
            state = states[token + before].to(tl.float32)
            total = slopes[token] * factors[0]
            more = (found[0] + slopes[token] * state,)
            for i in tl.static_range(1, taps):
                total += slopes[token + i] * factors[i]
                more += (found[i] + slopes[token + i] * state,)
            if rows > taps:
                more += (found[taps] + slopes[token],)
            found = more
            place = row + token
            real = (place < time) & (column < channels)
            place = place.to(tl.int64) * channels + column
            tl.store(grad_h + place, total.to(grad_h.dtype.element_ty), mask=real)
        column = tl.arange(0, wide) + (tl.program_id(0) % tl.cdiv(channels, wide)) * wide
        for i in tl.static_range(rows):
            tl.store(
                sums + (part * rows + i) * channels + column, tl.sum(found[i], 0), mask=column < channels
            )


@operator(
    "convolve_rows_backward",
    lambda h, weight, taps, residual, silu, grad: (h.new_empty(h.shape), weight.new_empty(weight.shape)),
)
def convolve_rows_backward(
    h: Tensor, weight: Tensor, taps: int, residual: bool, silu: bool, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of h and weight; the input of the activation is recomputed."""
    h, weight, grad = _last_contiguous(h), weight.contiguous(), grad.contiguous()
    stack, batch, time, _ = h.shape
    parts = batch * triton.cdiv(time, _RUNS * _TOKENS)
    grad_h, sums = h.new_empty(h.shape), h.new_empty(stack, parts, *weight.shape[1:], dtype=torch.float32)
    sizes = _sizes(weight, taps, residual, silu)
    # With SiLU four warps would need more registers than there are.
    warps = 8 if silu else 4
    _backward[_grid(h)](h, weight, grad, grad_h, sums, batch, time, *h.stride()[:3], **sizes, num_warps=warps)
    return grad_h, sums.sum(1).to(weight.dtype)


@operator(
    "convolve_rows",
    lambda h, weight, taps, residual, silu: h.new_empty(h.shape),
    lambda given, grad: torch.ops.headtohead.convolve_rows_backward(*given, grad),
)
def convolve_rows(h: Tensor, weight: Tensor, taps: int, residual: bool, silu: bool) -> Tensor:
    """Return act(sum_i weight_i * h_(t-i) [+ bias] [+ h]) for h (population, batch, time, channels).

    `weight` is (population, taps, channels), or has the bias as one more row.
    """
    h, weight = _last_contiguous(h), weight.contiguous()
    out = h.new_empty(h.shape)
    batch, time = h.shape[1:3]
    sizes = _sizes(weight, taps, residual, silu)
    _forward[_grid(h)](h, weight, out, batch, time, *h.stride()[:3], **sizes)
    return out


def _last_contiguous(h: Tensor) -> Tensor:
    """Return h with contiguous channels; its tokens may be parts of wider rows."""
    return h if h.stride(-1) == 1 else h.contiguous()


def _grid(h: Tensor) -> tuple[int]:
    stack, batch, time, channels = h.shape
    return (stack * batch * triton.cdiv(time, _RUNS * _TOKENS) * triton.cdiv(channels, _CHANNELS),)


def _sizes(weight: Tensor, taps: int, residual: bool, silu: bool) -> dict[str, Any]:
    """Return what the kernels are compiled for."""
    _, rows, channels = weight.shape
    tile = {"runs": _RUNS, "tokens": _TOKENS, "wide": _CHANNELS}
    return {"channels": channels, "taps": taps, "rows": rows, "residual": residual, "silu": silu, **tile}
