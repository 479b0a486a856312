"""Gated linear recurrences on a GPU: the formulas of `recurrence.py` by chunks.

One program walks the chunks of one head and keeps its state in registers. What does not depend on the state is computed
beforehand for all chunks at once: the scores, if each channel has its own decay, and the triangular systems of the delta rule.
L is the sum of log decays since the start of a chunk.
"""

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

# Widths of tiles (keys, values) whose results were compared on an H200. Triton 3.4 to 3.7 may compile chains of matrix
# products for this GPU wrongly, so others use PyTorch operations.
_COMPARED = {(16, 16), (32, 64), (64, 64)}
_HOPPER = 9
# Tokens of a block whose decays are computed pair by pair, and of the smallest matrix product.
BLOCK = 16


if triton is not None:

    @triton.jit
    def _load(x, t, time, stride, column, width):  # type: ignore[no-untyped-def]  # Triton reads the annotations
        real = (t < time)[:, None] & (column < width)[None, :]
        place = t[:, None].to(tl.int64) * stride + column[None, :]
        return tl.load(x + place, mask=real, other=0.0).to(tl.float32)

    @triton.jit
    def _store(x, value, t, time, stride, column, width):  # type: ignore[no-untyped-def]
        real = (t < time)[:, None] & (column < width)[None, :]
        place = t[:, None].to(tl.int64) * stride + column[None, :]
        tl.store(x + place, value.to(x.dtype.element_ty), mask=real)

    @triton.jit
    def _load_row(x, t, time, stride, column, width):  # type: ignore[no-untyped-def]
        real = (t < time) & (column < width)
        return tl.load(x + t.to(tl.int64) * stride + column, mask=real, other=0.0).to(tl.float32)

    @triton.jit
    def _pair_decays(since, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return exp(L_i - L_j) for j <= i, else 0, from L (chunk, 1)."""
        row, column = tl.arange(0, chunk)[:, None], tl.arange(0, chunk)[None, :]
        between = tl.exp(tl.minimum(since - tl.trans(since), 0.0))
        return tl.where(row >= column, between, 0.0)

    @triton.jit
    def _walk(  # type: ignore[no-untyped-def]
        q, k, v, since, state, p, scores, out, starts, end,
        q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time, s_batch, s_head, s_time,
        heads, time, chunks, keys, values, decays,
        channels: tl.constexpr, delta: tl.constexpr, precision: tl.constexpr,
        chunk: tl.constexpr, wide: tl.constexpr, high: tl.constexpr,
    ):  # fmt: skip
        one = tl.program_id(0).to(tl.int64)
        batch, which = one // heads, one % heads
        q += batch * q_batch + which * q_head
        k += batch * k_batch + which * k_head
        v += batch * v_batch + which * v_head
        since += batch * s_batch + which * s_head
        channel, decayed, inside = tl.arange(0, wide), tl.arange(0, channels), tl.arange(0, chunk)
        column = tl.program_id(1) * high + tl.arange(0, high)
        held = _load(state + one * keys * values, channel, keys, values, column, values)
        for n in range(chunks):
            t = n * chunk + inside
            _store(starts + (one * chunks + n) * keys * values, held, channel, keys, values, column, values)
            queries = _load(q, t, time, q_time, channel, keys)
            written = _load(k, t, time, k_time, channel, keys)
            total = _load(since, t, time, s_time, decayed, decays)
            last = _load_row(since, tl.minimum((n + 1) * chunk, time) - 1, time, s_time, decayed, decays)
            value = _load(v, t, time, v_time, column, values)
            if delta:
                removed = _load(p + one * time * keys, t, time, keys, channel, keys)
                value -= tl.dot(removed, held, input_precision=precision)
            if channels == 1:
                weights = tl.dot(queries, tl.trans(written), input_precision=precision)
                weights *= _pair_decays(total, chunk)
            else:
                place = scores + (one * chunks + n) * chunk * chunk
                weights = _load(place, inside, chunk, chunk, inside, chunk)
            found = tl.dot(weights, value, input_precision=precision)
            found += tl.dot(queries * tl.exp(total), held, input_precision=precision)
            _store(out + one * time * values, found, t, time, values, column, values)
            kept = written * tl.exp(tl.minimum(last[None, :] - total, 0.0))
            held = tl.exp(last)[:, None] * held + tl.dot(tl.trans(kept), value, input_precision=precision)
        _store(end + one * keys * values, held, channel, keys, values, column, values)

    @triton.jit
    def _walk_back(  # type: ignore[no-untyped-def]
        q, k, v, since, p, scores, starts, grad, grad_end,
        to_q, to_k, to_v, to_since, to_state, to_p, to_scores,
        q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time, s_batch, s_head, s_time,
        heads, time, chunks, keys, values, decays,
        channels: tl.constexpr, delta: tl.constexpr, ends: tl.constexpr, precision: tl.constexpr,
        chunk: tl.constexpr, wide: tl.constexpr, high: tl.constexpr,
    ):  # fmt: skip
        one = tl.program_id(0).to(tl.int64)
        batch, which = one // heads, one % heads
        q += batch * q_batch + which * q_head
        k += batch * k_batch + which * k_head
        v += batch * v_batch + which * v_head
        since += batch * s_batch + which * s_head
        channel, decayed, inside = tl.arange(0, wide), tl.arange(0, channels), tl.arange(0, chunk)
        column = tl.arange(0, high)
        if ends:
            slope = _load(grad_end + one * keys * values, channel, keys, values, column, values)
        else:
            slope = tl.zeros((wide, high), dtype=tl.float32)
        for step in range(chunks):
            n = chunks - 1 - step
            t = n * chunk + inside
            held = _load(starts + (one * chunks + n) * keys * values, channel, keys, values, column, values)
            value = _load(v, t, time, v_time, column, values)
            if delta:
                removed = _load(p + one * time * keys, t, time, keys, channel, keys)
                value -= tl.dot(removed, held, input_precision=precision)
            coming = _load(grad + one * time * values, t, time, values, column, values)
            to_weights = tl.dot(coming, tl.trans(value), input_precision=precision)
            to_weights = tl.where(inside[:, None] >= inside[None, :], to_weights, 0.0)
            end_row = tl.minimum((n + 1) * chunk, time) - 1
            total = _load(since, t, time, s_time, decayed, decays)
            last = _load_row(since, end_row, time, s_time, decayed, decays)
            rise, fall = tl.exp(total), tl.exp(tl.minimum(last[None, :] - total, 0.0))
            written = _load(k, t, time, k_time, channel, keys)
            own_k = tl.dot(value, tl.trans(slope), input_precision=precision) * fall
            at_last = tl.sum(slope * held, 1) * tl.exp(last) + tl.sum(written * own_k, 0)
            to_value = tl.dot(written * fall, slope, input_precision=precision)
            queries = _load(q, t, time, q_time, channel, keys)
            own_q = tl.dot(coming, tl.trans(held), input_precision=precision) * rise
            place = (one * chunks + n) * chunk * chunk
            if channels == 1:
                pairs = _pair_decays(total, chunk)
                weights = tl.dot(queries, tl.trans(written), input_precision=precision) * pairs
                to_weights *= pairs
                own_q += tl.dot(to_weights, written, input_precision=precision)
                own_k += tl.dot(tl.trans(to_weights), queries, input_precision=precision)
            else:
                weights = _load(scores + place, inside, chunk, chunk, inside, chunk)
                _store(to_scores + place, to_weights, inside, chunk, chunk, inside, chunk)
            to_value += tl.dot(tl.trans(weights), coming, input_precision=precision)
            # Queries grow with e^L and keys shrink with it; the state decays by the last L.
            slopes = queries * own_q - written * own_k
            slopes += tl.where((t == end_row)[:, None], at_last[None, :], 0.0)
            slope = tl.exp(last)[:, None] * slope
            slope += tl.dot(tl.trans(queries * rise), coming, input_precision=precision)
            if delta:
                to_removed = -tl.dot(to_value, tl.trans(held), input_precision=precision)
                _store(to_p + one * time * keys, to_removed, t, time, keys, channel, keys)
                slope -= tl.dot(tl.trans(removed), to_value, input_precision=precision)
            _store(to_q + one * time * keys, own_q, t, time, keys, channel, keys)
            _store(to_k + one * time * keys, own_k, t, time, keys, channel, keys)
            _store(to_v + one * time * values, to_value, t, time, values, column, values)
            if channels == 1:
                tl.store(to_since + one * time + t, tl.sum(slopes, 1), mask=t < time)
            else:
                _store(to_since + one * time * keys, slopes, t, time, keys, channel, keys)
        _store(to_state + one * keys * values, slope, channel, keys, values, column, values)

    @triton.jit
    def _around(since, total, first, cut, inside, time, stride, channel, keys, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the decays since a cut for the rows of the block after it, and up to it for all rows before it."""
        at = _load_row(since, first + cut - 1, time, stride, channel, keys)[None, :]
        ahead, row = tl.exp(-tl.abs(total - at)), inside[:, None]
        return tl.where((row >= cut) & (row < cut + block), ahead, 0.0), tl.where(row < cut, ahead, 0.0)

    @triton.jit
    def _scores(  # type: ignore[no-untyped-def]
        q, k, since, out,
        q_batch, q_head, q_time, k_batch, k_head, k_time, s_batch, s_head, s_time,
        heads, time, chunks, keys,
        precision: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        one = tl.program_id(0).to(tl.int64)
        batch, which, n = one // chunks // heads, one // chunks % heads, one % chunks
        q += batch * q_batch + which * q_head
        k += batch * k_batch + which * k_head
        since += batch * s_batch + which * s_head
        channel, inside = tl.arange(0, wide), tl.arange(0, chunk)
        t = n * chunk + inside
        queries = _load(q, t, time, q_time, channel, keys)
        written = _load(k, t, time, k_time, channel, keys)
        total = _load(since, t, time, s_time, channel, keys)
        found = tl.zeros((chunk, chunk), dtype=tl.float32)
        for cut in range(block, chunk, block):
            after, before = _around(since, total, n * chunk, cut, inside, time, s_time, channel, keys, block)
            found += tl.dot(queries * after, tl.trans(written * before), input_precision=precision)
        for j in range(block):
            # Token j of each row's block; token by token, since decays within a block have no common bound.
            other = inside // block * block + j
            key = _load(k, n * chunk + other, time, k_time, channel, keys)
            between = total - _load(since, n * chunk + other, time, s_time, channel, keys)
            score = tl.sum(queries * key * tl.exp(tl.minimum(between, 0.0)), 1)
            own = (inside[None, :] == other[:, None]) & (inside >= other)[:, None]
            found = tl.where(own, score[:, None], found)
        _store(out + one * chunk * chunk, found, inside, chunk, chunk, inside, chunk)

    @triton.jit
    def _scores_back(  # type: ignore[no-untyped-def]
        q, k, since, grad, to_q, to_k, to_since,
        q_batch, q_head, q_time, k_batch, k_head, k_time, s_batch, s_head, s_time,
        heads, time, chunks, keys,
        precision: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        one = tl.program_id(0).to(tl.int64)
        batch, which, n = one // chunks // heads, one // chunks % heads, one % chunks
        q += batch * q_batch + which * q_head
        k += batch * k_batch + which * k_head
        since += batch * s_batch + which * s_head
        channel, inside = tl.arange(0, wide), tl.arange(0, chunk)
        t = n * chunk + inside
        queries = _load(q, t, time, q_time, channel, keys)
        written = _load(k, t, time, k_time, channel, keys)
        total = _load(since, t, time, s_time, channel, keys)
        coming = _load(grad + one * chunk * chunk, inside, chunk, chunk, inside, chunk)
        own_q = tl.zeros((chunk, wide), dtype=tl.float32)
        own_k = tl.zeros((chunk, wide), dtype=tl.float32)
        for cut in range(block, chunk, block):
            after, before = _around(since, total, n * chunk, cut, inside, time, s_time, channel, keys, block)
            own_q += after * tl.dot(coming, written * before, input_precision=precision)
            own_k += before * tl.dot(tl.trans(coming), queries * after, input_precision=precision)
        for j in range(block):
            other = inside // block * block + j
            there = n * chunk + other
            between = total - _load(since, there, time, s_time, channel, keys)
            decay = tl.exp(-tl.abs(between))
            # As row: this token's query with key j of its block.
            pair = (inside[None, :] == other[:, None]) & (inside >= other)[:, None]
            slope = tl.sum(tl.where(pair, coming, 0.0), 1)
            own_q += slope[:, None] * _load(k, there, time, k_time, channel, keys) * decay
            # As column: this token's key with query j of its block.
            pair = (inside[:, None] == other[None, :]) & (inside <= other)[None, :]
            slope = tl.sum(tl.where(pair, coming, 0.0), 0)
            own_k += slope[:, None] * _load(q, there, time, q_time, channel, keys) * decay
        place = one // chunks * time * keys
        _store(to_q + place, own_q, t, time, keys, channel, keys)
        _store(to_k + place, own_k, t, time, keys, channel, keys)
        _store(to_since + place, queries * own_q - written * own_k, t, time, keys, channel, keys)

    @triton.jit
    def _inverse(lower, chunk: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return (I + A)^-1 of a strictly lower triangular A (chunk, chunk).

        The blocks on the diagonal are inverted together, row by row. With D their inverses and E the rest of A, the
        inverse is (I + DE)^-1 D, and (DE)^4 = 0 since a chunk has at most four blocks.
        """
        count: tl.constexpr = chunk // block
        first = tl.arange(0, count)[:, None, None, None]
        same = first == tl.arange(0, count)[None, None, :, None]
        blocks = tl.reshape(lower, (count, block, count, block))
        own = tl.sum(tl.where(same, blocks, 0.0), 2)
        row, column = tl.arange(0, block)[None, :, None], tl.arange(0, block)[None, None, :]
        found = tl.where(row == column, 1.0, 0.0) + tl.zeros((count, block, block), dtype=tl.float32)
        for r in range(block - 1):
            pivot = tl.sum(tl.where(row == r, found, 0.0), 1)
            factor = tl.sum(tl.where(column == r, own, 0.0), 2)
            found -= factor[:, :, None] * pivot[:, None, :]
        wide = tl.where(same, found[:, :, None, :], 0.0)
        diagonal = tl.reshape(wide, (chunk, chunk))
        rest = tl.reshape(tl.where(same, 0.0, blocks), (chunk, chunk))
        step = tl.dot(diagonal, rest, input_precision="tf32x3")
        twice = tl.dot(step, step, input_precision="tf32x3")
        both = diagonal + tl.dot(twice, diagonal, input_precision="tf32x3")
        return both - tl.dot(step, both, input_precision="tf32x3")

    @triton.jit
    def _delta(  # type: ignore[no-untyped-def]
        k, v, since, beta, scores, u, p, inverse,
        k_batch, k_head, k_time, v_batch, v_head, v_time, s_batch, s_head, s_time, b_batch, b_head, b_time,
        heads, time, chunks, keys, values, decays,
        channels: tl.constexpr, precision: tl.constexpr, block: tl.constexpr,
        chunk: tl.constexpr, wide: tl.constexpr, high: tl.constexpr,
    ):  # fmt: skip
        one = tl.program_id(0).to(tl.int64)
        series, n = one // chunks, one % chunks
        batch, which = series // heads, series % heads
        k += batch * k_batch + which * k_head
        v += batch * v_batch + which * v_head
        since += batch * s_batch + which * s_head
        beta += batch * b_batch + which * b_head
        channel, column, inside = tl.arange(0, wide), tl.arange(0, high), tl.arange(0, chunk)
        t = n * chunk + inside
        written = _load(k, t, time, k_time, channel, keys)
        total = _load(since, t, time, s_time, tl.arange(0, channels), decays)
        strength = tl.load(beta + t * b_time, mask=t < time, other=0.0).to(tl.float32)[:, None]
        if channels == 1:
            pairs = tl.dot(written, tl.trans(written), input_precision=precision) * _pair_decays(total, chunk)
        else:
            pairs = _load(scores + one * chunk * chunk, inside, chunk, chunk, inside, chunk)
        below = inside[:, None] > inside[None, :]
        solved = _inverse(tl.where(below, strength * pairs, 0.0), chunk, block)
        _store(inverse + one * chunk * chunk, solved, inside, chunk, chunk, inside, chunk)
        value = strength * _load(v, t, time, v_time, column, values)
        found = tl.dot(solved, value, input_precision=precision)
        _store(u + series * time * values, found, t, time, values, column, values)
        read = tl.dot(solved, strength * written * tl.exp(total), input_precision=precision)
        _store(p + series * time * keys, read, t, time, keys, channel, keys)

    @triton.jit
    def _delta_back(  # type: ignore[no-untyped-def]
        k, v, since, beta, scores, u, p, inverse, grad_u, grad_p,
        to_k, to_v, to_since, to_beta, to_scores,
        k_batch, k_head, k_time, v_batch, v_head, v_time, s_batch, s_head, s_time, b_batch, b_head, b_time,
        heads, time, chunks, keys, values, decays,
        channels: tl.constexpr, precision: tl.constexpr,
        chunk: tl.constexpr, wide: tl.constexpr, high: tl.constexpr,
    ):  # fmt: skip
        one = tl.program_id(0).to(tl.int64)
        series, n = one // chunks, one % chunks
        batch, which = series // heads, series % heads
        k += batch * k_batch + which * k_head
        v += batch * v_batch + which * v_head
        since += batch * s_batch + which * s_head
        beta += batch * b_batch + which * b_head
        channel, column, inside = tl.arange(0, wide), tl.arange(0, high), tl.arange(0, chunk)
        t = n * chunk + inside
        solved = _load(inverse + one * chunk * chunk, inside, chunk, chunk, inside, chunk)
        back = tl.trans(solved)
        place, narrow = series * time * values, series * time * keys
        strength = tl.load(beta + t * b_time, mask=t < time, other=0.0).to(tl.float32)[:, None]
        # The solution of the transposed system is the gradient of the right-hand side; times the solution, that of A.
        coming = _load(grad_u + place, t, time, values, column, values)
        right = tl.dot(back, coming, input_precision=precision)
        solution = _load(u + place, t, time, values, column, values)
        lower = -tl.dot(right, tl.trans(solution), input_precision=precision)
        value = _load(v, t, time, v_time, column, values)
        to_strength = tl.sum(right * value, 1)
        _store(to_v + place, strength * right, t, time, values, column, values)
        coming = _load(grad_p + narrow, t, time, keys, channel, keys)
        right = tl.dot(back, coming, input_precision=precision)
        solution = _load(p + narrow, t, time, keys, channel, keys)
        lower -= tl.dot(right, tl.trans(solution), input_precision=precision)
        lower = tl.where(inside[:, None] > inside[None, :], lower, 0.0)
        written = _load(k, t, time, k_time, channel, keys)
        total = _load(since, t, time, s_time, tl.arange(0, channels), decays)
        right *= tl.exp(total)
        to_strength += tl.sum(right * written, 1)
        own = strength * right
        slopes = own * written
        at = one * chunk * chunk
        if channels == 1:
            decay = _pair_decays(total, chunk)
            pairs = tl.dot(written, tl.trans(written), input_precision=precision) * decay
        else:
            pairs = _load(scores + at, inside, chunk, chunk, inside, chunk)
        to_strength += tl.sum(lower * pairs, 1)
        lower *= strength
        if channels == 1:
            each = lower * pairs
            own += tl.dot(lower * decay, written, input_precision=precision)
            own += tl.dot(tl.trans(lower * decay), written, input_precision=precision)
            found = tl.sum(slopes, 1) + tl.sum(each, 1) - tl.sum(tl.trans(each), 1)
            tl.store(to_since + series * time + t, found, mask=t < time)
        else:
            _store(to_scores + at, lower, inside, chunk, chunk, inside, chunk)
            _store(to_since + narrow, slopes, t, time, keys, channel, keys)
        tl.store(to_beta + series * time + t, to_strength, mask=t < time)
        _store(to_k + narrow, own, t, time, keys, channel, keys)


def _rows(x: Tensor) -> Tensor:
    """Return x (batch, heads, time, dim) with contiguous rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """Return the first three strides of each tensor (batch, heads, time, dim)."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def recurrence_serves(keys: int, values: int, device: torch.device) -> bool:
    """Return whether the kernels are used for heads with keys and values of these widths: on Hopper, or interpreted.

    Other GPUs have less shared memory than some of the kernels need, or were not compared.
    """
    able = device.type != "cuda" or torch.cuda.get_device_properties(device).major == _HOPPER
    return able and (_padded(keys), _padded(values)) in _COMPARED


def _padded(width: int) -> int:
    """Return the width of a tile: a power of two that matrix products support."""
    return max(BLOCK, 1 << (width - 1).bit_length())


def _settings(*tensors: Tensor) -> dict[str, Any]:
    """Return how products are computed: nearly in float32, unless an input has 16 bits anyway."""
    return {"precision": "tf32" if any(tensor.itemsize == 2 for tensor in tensors) else "tf32x3"}


def _count(time: int, chunk: int) -> int:
    return -(-time // chunk)


def _fake_walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    since: Tensor,
    state: Tensor,
    p: Tensor | None,
    scores: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, time, values = v.shape
    keys = k.shape[-1]
    return (
        since.new_empty(batch, heads, time, values),
        since.new_empty(batch, heads, _count(time, chunk), keys, values),
        since.new_empty(batch, heads, keys, values),
    )


def _fake_walk_back(
    q: Tensor, k: Tensor, v: Tensor, since: Tensor, p: Tensor | None, scores: Tensor | None, chunk: int,
    starts: Tensor, grad: Tensor, grad_end: Tensor | None,
) -> Any:  # fmt: skip
    found = [like.new_empty(like.shape) for like in (q, k, v, since, starts[:, :, 0])]
    return (
        *found,
        *(since.new_empty(since.shape[:1]) if x is None else x.new_empty(x.shape) for x in (p, scores)),
    )


@operator("gated_walk_back", _fake_walk_back)
def gated_walk_back(
    q: Tensor, k: Tensor, v: Tensor, since: Tensor, p: Tensor | None, scores: Tensor | None, chunk: int,
    starts: Tensor, grad: Tensor, grad_end: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, since, the first state, p and the scores; the last two are empty if not given."""
    q, k, v, since = (_rows(x) for x in (q, k, v, since))
    starts, grad = starts.contiguous(), grad.contiguous()
    p, scores, grad_end = (None if x is None else x.contiguous() for x in (p, scores, grad_end))
    batch, heads, time, values = v.shape
    keys = k.shape[-1]
    found = _fake_walk_back(q, k, v, since, p, scores, chunk, starts, grad, grad_end)
    wide, high = _padded(keys), _padded(values)
    decays = since.shape[-1]
    _walk_back[(batch * heads,)](
        q, k, v, since, p, scores, starts, grad, grad_end, *found,
        *_strides(q, k, v, since), heads, time, starts.shape[2], keys, values, decays,
        channels=1 if decays == 1 else wide, delta=p is not None, ends=grad_end is not None,
        chunk=chunk, wide=wide, high=high, num_warps=8 if wide * high > 2048 else 4, **_settings(q, k, v),
    )  # fmt: skip
    return found


def _walk_gradients(
    given: list[Any], grad: Tensor | None, _: Any, grad_end: Tensor | None
) -> tuple[Tensor, ...]:
    q, k, v, since, _, p, scores, chunk, starts = given
    grad = since.new_zeros(v.shape) if grad is None else grad
    found: tuple[Tensor, ...] = torch.ops.headtohead.gated_walk_back(
        q, k, v, since, p, scores, chunk, starts, grad, grad_end
    )
    return found


@operator("gated_walk", _fake_walk, _walk_gradients, saved=[1])
def gated_walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    since: Tensor,
    state: Tensor,
    p: Tensor | None,
    scores: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, the states before each chunk (batch, heads, chunks, keys, values), and the last state.

    `since` is L, with all channels or one; with all, `scores` (batch, heads, chunks, chunk, chunk) is given. `p` is that of
    the delta rule, and v its u. Inputs are (batch, heads, time, dim).
    """
    out, starts, end = _fake_walk(q, k, v, since, state, p, scores, chunk)
    q, k, v, since = (_rows(x) for x in (q, k, v, since))
    state = state.contiguous()
    p, scores = (None if x is None else x.contiguous() for x in (p, scores))
    batch, heads, time, values = v.shape
    keys, decays = k.shape[-1], since.shape[-1]
    wide, high = _padded(keys), min(32, _padded(values))
    _walk[(batch * heads, -(-values // high))](
        q, k, v, since, state, p, scores, out, starts, end,
        *_strides(q, k, v, since), heads, time, starts.shape[2], keys, values, decays,
        channels=1 if decays == 1 else wide, delta=p is not None,
        chunk=chunk, wide=wide, high=high, num_warps=4, **_settings(q, k, v),
    )  # fmt: skip
    return out, starts, end


@operator(
    "chunk_scores_back",
    lambda q, k, since, chunk, grad: tuple(x.new_empty(x.shape) for x in (q, k, since)),
)
def chunk_scores_back(
    q: Tensor, k: Tensor, since: Tensor, chunk: int, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and since."""
    q, k, since, grad = _rows(q), _rows(k), _rows(since), grad.contiguous()
    batch, heads, time, keys = k.shape
    found: Any = tuple(x.new_empty(x.shape) for x in (q, k, since))
    chunks = _count(time, chunk)
    _scores_back[(batch * heads * chunks,)](
        q, k, since, grad, *found, *_strides(q, k, since), heads, time, chunks, keys,
        block=BLOCK, chunk=chunk, wide=_padded(keys), num_warps=4, **_settings(q, k),
    )  # fmt: skip
    result: tuple[Tensor, Tensor, Tensor] = found
    return result


@operator(
    "chunk_scores",
    lambda q, k, since, chunk: since.new_empty(*k.shape[:2], _count(k.shape[2], chunk), chunk, chunk),
    lambda given, grad: torch.ops.headtohead.chunk_scores_back(*given, grad),
)
def chunk_scores(q: Tensor, k: Tensor, since: Tensor, chunk: int) -> Tensor:
    """Return (batch, heads, chunks, chunk, chunk): sum_d q_id k_jd exp(L_id - L_jd) for j <= i of each chunk, else 0."""
    q, k, since = _rows(q), _rows(k), _rows(since)
    batch, heads, time, keys = k.shape
    chunks = _count(time, chunk)
    out = since.new_empty(batch, heads, chunks, chunk, chunk)
    _scores[(batch * heads * chunks,)](
        q, k, since, out, *_strides(q, k, since), heads, time, chunks, keys,
        block=BLOCK, chunk=chunk, wide=_padded(keys), num_warps=4, **_settings(q, k),
    )  # fmt: skip
    return out


def _fake_delta(
    k: Tensor, v: Tensor, since: Tensor, beta: Tensor, scores: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    chunks = _count(k.shape[2], chunk)
    inverse = since.new_empty(*k.shape[:2], chunks, chunk, chunk)
    return since.new_empty(v.shape), since.new_empty(k.shape), inverse


def _fake_delta_back(
    k: Tensor, v: Tensor, since: Tensor, beta: Tensor, scores: Tensor | None, chunk: int,
    u: Tensor, p: Tensor, inverse: Tensor, grad_u: Tensor, grad_p: Tensor,
) -> Any:  # fmt: skip
    found = [like.new_empty(like.shape) for like in (k, v, since, beta)]
    return (*found, since.new_empty(since.shape[:1]) if scores is None else scores.new_empty(scores.shape))


@operator("delta_systems_back", _fake_delta_back)
def delta_systems_back(
    k: Tensor, v: Tensor, since: Tensor, beta: Tensor, scores: Tensor | None, chunk: int,
    u: Tensor, p: Tensor, inverse: Tensor, grad_u: Tensor, grad_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of k, v, since, beta and the scores; the last is empty if not given."""
    k, v, since = (_rows(x) for x in (k, v, since))
    u, p, inverse, grad_u, grad_p = (x.contiguous() for x in (u, p, inverse, grad_u, grad_p))
    scores = None if scores is None else scores.contiguous()
    batch, heads, time, values = v.shape
    keys, decays, chunks = k.shape[-1], since.shape[-1], inverse.shape[2]
    wide = _padded(keys)
    found = _fake_delta_back(k, v, since, beta, scores, chunk, u, p, inverse, grad_u, grad_p)
    _delta_back[(batch * heads * chunks,)](
        k, v, since, beta, scores, u, p, inverse, grad_u, grad_p, *found,
        *_strides(k, v, since, beta), heads, time, chunks, keys, values, decays,
        channels=1 if decays == 1 else wide, chunk=chunk, wide=wide, high=_padded(values), num_warps=4,
        **_settings(k, v),
    )  # fmt: skip
    return found


def _delta_gradients(
    given: list[Any], grad_u: Tensor | None, grad_p: Tensor | None, _: Any
) -> tuple[Tensor, ...]:
    u, p = given[-3:-1]
    grad_u = torch.zeros_like(u) if grad_u is None else grad_u
    grad_p = torch.zeros_like(p) if grad_p is None else grad_p
    found: tuple[Tensor, ...] = torch.ops.headtohead.delta_systems_back(*given, grad_u, grad_p)
    return found


@operator("delta_systems", _fake_delta, _delta_gradients, saved=[0, 1, 2])
def delta_systems(
    k: Tensor, v: Tensor, since: Tensor, beta: Tensor, scores: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return u = X b v and p = X b k e^L in float32, and X = (I + b T)^-1, T the scores of k and k below the diagonal.

    With one decay per channel `scores` are those of k and k; else they are computed here.
    """
    u, p, inverse = _fake_delta(k, v, since, beta, scores, chunk)
    k, v, since = (_rows(x) for x in (k, v, since))
    scores = None if scores is None else scores.contiguous()
    batch, heads, time, values = v.shape
    keys, decays, chunks = k.shape[-1], since.shape[-1], inverse.shape[2]
    wide = _padded(keys)
    _delta[(batch * heads * chunks,)](
        k, v, since, beta, scores, u, p, inverse,
        *_strides(k, v, since, beta), heads, time, chunks, keys, values, decays,
        channels=1 if decays == 1 else wide, block=BLOCK, chunk=chunk, wide=wide, high=_padded(values), num_warps=4,
        **_settings(k, v),
    )  # fmt: skip
    return u, p, inverse
