"""The coupled integrator in Triton: all steps in registers, with one read and one write of q and k per direction.

Imported on first use (`operators.py` registers the operators), so that CPU commands do not pay for importing Triton. A
program processes blocks of rows, one row per token and head, of one set of weights, and keeps that set and its gradient
sums on the chip. Its sums are written once and reduced afterwards, always in the same order. Backward recomputes the
steps and stores the input of each in a few megabytes that stay in the L2 cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAPFROG = 1  # the number of the scheme


@triton.jit
def _inner(x, w1, b1, PRECISION: tl.constexpr):
    """W1 x + b1 and its sigmoid, (rows, hidden)."""
    inner = tl.dot(x, tl.trans(w1), input_precision=PRECISION) + b1[None, :]
    return inner, tl.sigmoid(inner)


@triton.jit
def _force(x, w1, b1, w2, b2, POTENTIAL: tl.constexpr, PRECISION: tl.constexpr):
    """f(x), (rows, dim)."""
    inner, share = _inner(x, w1, b1, PRECISION)
    if POTENTIAL:
        slope = share + inner * share * (1 - share)
        return -tl.dot((slope * w2[None, :]).to(x.dtype), w1, input_precision=PRECISION)
    else:
        return tl.dot((inner * share).to(x.dtype), tl.trans(w2), input_precision=PRECISION) + b2[None, :]


@triton.jit
def _force_back(
    x, grad, step, w1, b1, w2, b2, sum_w1, sum_b1, sum_w2, sum_b2, ones,
    BIAS_1: tl.constexpr, BIAS_2: tl.constexpr, POTENTIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For k + step f(x) with gradient `grad`: grad . f(x), the gradient of x, and the sums."""
    inner, share = _inner(x, w1, b1, PRECISION)
    slope = share + inner * share * (1 - share)
    pushed = grad.to(x.dtype)
    scaled = grad * step[:, None]
    pull = scaled.to(x.dtype)
    if POTENTIAL:
        active = (slope * w2[None, :]).to(x.dtype)
        back = tl.dot(pushed, tl.trans(w1), input_precision=PRECISION)
        along = -tl.sum(back * slope * w2[None, :], 1)
        back = back * step[:, None]
        # silu''(h) = s (1 - s) (2 + h (1 - 2 s))
        curve = share * (1 - share) * (2 + inner * (1 - 2 * share))
        sum_w2 -= tl.sum(back * slope, 0)
        grad_inner = -back * w2[None, :] * curve
        sum_w1 = tl.dot(tl.trans(active), (-scaled).to(x.dtype), sum_w1, input_precision=PRECISION)
    else:
        active = (inner * share).to(x.dtype)
        back = tl.dot(pushed, w2, input_precision=PRECISION)
        along = tl.sum(back * inner * share, 1) + tl.sum(grad * b2[None, :], 1)
        grad_inner = back * step[:, None] * slope
        sum_w2 = tl.dot(tl.trans(pull), active, sum_w2, input_precision=PRECISION)
        if BIAS_2:
            sum_b2 = tl.dot(ones, pull, sum_b2, input_precision=PRECISION)
    low = grad_inner.to(x.dtype)
    sum_w1 = tl.dot(tl.trans(low), x, sum_w1, input_precision=PRECISION)
    if BIAS_1:
        sum_b1 = tl.dot(ones, low, sum_b1, input_precision=PRECISION)
    return along, tl.dot(low, w1, input_precision=PRECISION), sum_w1, sum_b1, sum_w2, sum_b2


@triton.jit
def _step_of(place, SCHEME: tl.constexpr, STEPS: tl.constexpr):
    """The size of a kick, and whether a drift follows it: leapfrog is n + 1 kicks with n drifts between them."""
    kick = 1.0
    drift = 1.0
    if SCHEME == 1:
        kick = tl.where((place == 0) | (place == STEPS), 0.5, 1.0)
        drift = tl.where(place == STEPS, 0.0, 1.0)
    return kick, drift


@triton.jit
def _integrate(
    q, k, step, w1, b1, w2, b2,
    DTYPE: tl.constexpr, SCHEME: tl.constexpr, STEPS: tl.constexpr, POTENTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q and k (rows, dim) after all steps."""
    for place in range(STEPS + (SCHEME == 1)):
        push = _force(q.to(DTYPE), w1, b1, w2, b2, POTENTIAL, PRECISION)
        if SCHEME == 0:
            q += step[:, None] * k
            k += step[:, None] * push
        else:
            kick, drift = _step_of(place, SCHEME, STEPS)
            k += (kick * step)[:, None] * push
            q += (drift * step)[:, None] * k
    return q, k


@triton.jit
def _weights(
    w1_at, b1_at, w2_at, b2_at, group,
    DTYPE: tl.constexpr, DIM: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, POTENTIAL: tl.constexpr, BIAS_1: tl.constexpr, BIAS_2: tl.constexpr,
):  # fmt: skip
    """One set of weights, padded with zeros; matrices in the precision of q."""
    dim, hidden = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
    inside = (hidden[:, None] < HIDDEN) & (dim[None, :] < DIM)
    w1 = tl.load(
        w1_at + group * HIDDEN * DIM + hidden[:, None] * DIM + dim[None, :], mask=inside, other=0.0
    ).to(DTYPE)
    b1 = tl.zeros([BLOCK_H], tl.float32)
    if BIAS_1:
        b1 = tl.load(b1_at + group * HIDDEN + hidden, mask=hidden < HIDDEN, other=0.0).to(tl.float32)
    b2 = tl.zeros([BLOCK_D], tl.float32)
    if BIAS_2:
        b2 = tl.load(b2_at + group * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    if POTENTIAL:
        w2 = tl.load(w2_at + group * HIDDEN + hidden, mask=hidden < HIDDEN, other=0.0).to(tl.float32)
    else:
        across = (dim[:, None] < DIM) & (hidden[None, :] < HIDDEN)
        w2 = tl.load(
            w2_at + group * DIM * HIDDEN + dim[:, None] * HIDDEN + hidden[None, :], mask=across, other=0.0
        ).to(DTYPE)
    return w1, b1, w2, b2


@triton.jit
def _places(row, group, tokens, times, HEADS: tl.constexpr, GROUPS: tl.constexpr):
    """Population row, sequence, token and head of rows of a group of weights, and their index in a list of all of them."""
    SHARE: tl.constexpr = HEADS // GROUPS
    stack = group // GROUPS
    head = (group % GROUPS) * SHARE + row % SHARE
    token = row // SHARE
    return stack, token // times, token % times, head, (stack * tokens + token) * HEADS + head


@triton.jit
def _forward(
    q_at, k_at, dt_at, w1_at, b1_at, w2_at, b2_at, q_out, k_out, trips, tokens, times,
    q_s, q_b, q_t, q_h, k_s, k_b, k_t, k_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, SCHEME: tl.constexpr, STEPS: tl.constexpr,
    POTENTIAL: tl.constexpr, BIAS_1: tl.constexpr, BIAS_2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = q_at.dtype.element_ty
    group = tl.program_id(1)
    rows = tokens * (HEADS // GROUPS)
    w1, b1, w2, b2 = _weights(
        w1_at, b1_at, w2_at, b2_at, group, DTYPE, DIM, HIDDEN, BLOCK_D, BLOCK_H, POTENTIAL, BIAS_1, BIAS_2
    )
    dim = tl.arange(0, BLOCK_D)
    for trip in tl.range(trips, num_stages=1):
        row = (trip * tl.num_programs(0) + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (dim < DIM)[None, :]
        stack, sequence, time, head, flat = _places(row, group, tokens, times, HEADS, GROUPS)
        step = tl.load(dt_at + stack * HEADS + head).to(tl.float32)
        q_place = stack * q_s + sequence * q_b + time * q_t + head * q_h
        k_place = stack * k_s + sequence * k_b + time * k_t + head * k_h
        q = tl.load(q_at + q_place[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        k = tl.load(k_at + k_place[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        q, k = _integrate(q, k, step, w1, b1, w2, b2, DTYPE, SCHEME, STEPS, POTENTIAL, PRECISION)
        out = flat[:, None] * DIM + dim[None, :]
        tl.store(q_out + out, q.to(DTYPE), mask=inside)
        tl.store(k_out + out, k.to(DTYPE), mask=inside)


@triton.jit
def _backward(
    q_at, k_at, dt_at, w1_at, b1_at, w2_at, b2_at, gq_at, gk_at, q_out, k_out, sums_at, trace_at,
    trips, tokens, times,
    q_s, q_b, q_t, q_h, k_s, k_b, k_t, k_h, gq_s, gq_b, gq_t, gq_h, gk_s, gk_b, gk_t, gk_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, SCHEME: tl.constexpr, STEPS: tl.constexpr,
    POTENTIAL: tl.constexpr, BIAS_1: tl.constexpr, BIAS_2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = q_at.dtype.element_ty
    group = tl.program_id(1)
    rows = tokens * (HEADS // GROUPS)
    w1, b1, w2, b2 = _weights(
        w1_at, b1_at, w2_at, b2_at, group, DTYPE, DIM, HIDDEN, BLOCK_D, BLOCK_H, POTENTIAL, BIAS_1, BIAS_2
    )
    dim, hidden = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
    sum_w1 = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    # Bias sums are products with ones: a reduction over rows would cross all threads in every block.
    ones = tl.full([16, BLOCK], 1.0, DTYPE)
    sum_b1 = tl.zeros([16, BLOCK_H], tl.float32)
    sum_b2 = tl.zeros([16, BLOCK_D], tl.float32)
    if POTENTIAL:
        sum_w2 = tl.zeros([BLOCK_H], tl.float32)
    else:
        sum_w2 = tl.zeros([BLOCK_D, BLOCK_H], tl.float32)
    sum_step = tl.zeros([BLOCK], tl.float32)
    SHARE: tl.constexpr = HEADS // GROUPS
    USED: tl.constexpr = BLOCK // SHARE * SHARE
    KICKS: tl.constexpr = STEPS + (SCHEME == 1)
    SIZE: tl.constexpr = BLOCK * BLOCK_D
    slot = group * tl.num_programs(0) + tl.program_id(0)
    tile = tl.arange(0, BLOCK)[:, None] * BLOCK_D + dim[None, :]
    trace = trace_at + slot * (2 * KICKS * SIZE)
    for trip in tl.range(trips, num_stages=1):
        here = tl.arange(0, BLOCK)
        row = (trip * tl.num_programs(0) + tl.program_id(0)) * USED + here
        inside = ((row < rows) & (here < USED))[:, None] & (dim < DIM)[None, :]
        stack, sequence, time, head, flat = _places(row, group, tokens, times, HEADS, GROUPS)
        step = tl.load(dt_at + stack * HEADS + head).to(tl.float32)
        q_place = stack * q_s + sequence * q_b + time * q_t + head * q_h
        k_place = stack * k_s + sequence * k_b + time * k_t + head * k_h
        gq_place = stack * gq_s + sequence * gq_b + time * gq_t + head * gq_h
        gk_place = stack * gk_s + sequence * gk_b + time * gk_t + head * gk_h
        x = tl.load(q_at + q_place[:, None] + dim[None, :], mask=inside, other=0.0)
        if KICKS > 1:
            # The input of f and the velocity of q at every step, in the precision of q, in memory that stays in the cache.
            q = x.to(tl.float32)
            k = tl.load(k_at + k_place[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
            for place in range(KICKS):
                kick, drift = _step_of(place, SCHEME, STEPS)
                saw = q.to(DTYPE)
                push = _force(saw, w1, b1, w2, b2, POTENTIAL, PRECISION)
                if SCHEME == 0:
                    mover = k.to(DTYPE)
                    q += step[:, None] * k
                    k += step[:, None] * push
                else:
                    k += (kick * step)[:, None] * push
                    mover = k.to(DTYPE)
                    q += (drift * step)[:, None] * k
                tl.store(trace + 2 * place * SIZE + tile, saw, cache_modifier=".cg")
                tl.store(trace + (2 * place + 1) * SIZE + tile, mover, cache_modifier=".cg")
            tl.debug_barrier()
        gk = tl.load(gk_at + gk_place[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        gq = gk
        if SCHEME != 0 or KICKS > 1:
            gq = tl.load(gq_at + gq_place[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        for done in range(KICKS):
            place = KICKS - 1 - done
            kick, drift = _step_of(place, SCHEME, STEPS)
            if KICKS > 1:
                x = tl.load(trace + 2 * place * SIZE + tile, cache_modifier=".cg")
            if SCHEME != 0:
                if KICKS > 1:
                    k = tl.load(trace + (2 * place + 1) * SIZE + tile, cache_modifier=".cg").to(tl.float32)
                else:
                    k = tl.load(k_at + k_place[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
                    k += step[:, None] * _force(x, w1, b1, w2, b2, POTENTIAL, PRECISION)
                sum_step += drift * tl.sum(gq * k, 1)
                gk += (drift * step)[:, None] * gq
            along, grad_x, sum_w1, sum_b1, sum_w2, sum_b2 = _force_back(
                x, gk, kick * step, w1, b1, w2, b2, sum_w1, sum_b1, sum_w2, sum_b2, ones,
                BIAS_1, BIAS_2, POTENTIAL, PRECISION,
            )  # fmt: skip
            sum_step += kick * along
            if SCHEME == 0:
                # The other half of the step, loaded when needed, to hold fewer registers meanwhile.
                if KICKS > 1:
                    k = tl.load(trace + (2 * place + 1) * SIZE + tile, cache_modifier=".cg").to(tl.float32)
                else:
                    k = tl.load(k_at + k_place[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
                    gq = tl.load(gq_at + gq_place[:, None] + dim[None, :], mask=inside, other=0.0).to(
                        tl.float32
                    )
                sum_step += tl.sum(gq * k, 1)
                gk += step[:, None] * gq
            gq += grad_x
        out = flat[:, None] * DIM + dim[None, :]
        tl.store(q_out + out, gq.to(DTYPE), mask=inside)
        tl.store(k_out + out, gk.to(DTYPE), mask=inside)
        if KICKS > 1:
            tl.debug_barrier()
    # One slot per program: the order of summation is fixed.
    SECOND: tl.constexpr = HIDDEN if POTENTIAL else HIDDEN * DIM
    sums = sums_at + slot.to(tl.int64) * (HIDDEN * DIM + HIDDEN + SECOND + DIM + BLOCK)
    weights = (hidden[:, None] < HIDDEN) & (dim[None, :] < DIM)
    tl.store(sums + hidden[:, None] * DIM + dim[None, :], sum_w1, mask=weights)
    sums += HIDDEN * DIM
    # Sixteen equal rows: their mean equals each of them.
    tl.store(sums + hidden, tl.sum(sum_b1, 0) / 16, mask=hidden < HIDDEN)
    sums += HIDDEN
    if POTENTIAL:
        tl.store(sums + hidden, sum_w2, mask=hidden < HIDDEN)
    else:
        across = (dim[:, None] < DIM) & (hidden[None, :] < HIDDEN)
        tl.store(sums + dim[:, None] * HIDDEN + hidden[None, :], sum_w2, mask=across)
    sums += SECOND
    tl.store(sums + dim, tl.sum(sum_b2, 0) / 16, mask=dim < DIM)
    tl.store(sums + DIM + tl.arange(0, BLOCK), sum_step)


@triton.jit
def _add_up(
    sums_at, w1_at, b1_at, w2_at, b2_at, step_at, trips, slots,
    FIRST: tl.constexpr, HIDDEN: tl.constexpr, SECOND: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The programs' sums for one set of weights, added in program order."""
    WIDTH: tl.constexpr = FIRST + HIDDEN + SECOND + DIM + BLOCK
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * 64 + tl.arange(0, 64)
    slot = tl.arange(0, 32)
    total = tl.zeros([32, 64], tl.float32)
    for trip in range(trips):
        there = slot + trip * 32
        at = sums_at + (group * slots + there[:, None]) * WIDTH + column[None, :]
        total += tl.load(at, mask=(there < slots)[:, None] & (column < WIDTH)[None, :], other=0.0)
    found = tl.sum(total, 0)
    tl.store(w1_at + group * FIRST + column, found, mask=column < FIRST)
    column -= FIRST
    tl.store(b1_at + group * HIDDEN + column, found, mask=(column >= 0) & (column < HIDDEN))
    column -= HIDDEN
    tl.store(w2_at + group * SECOND + column, found, mask=(column >= 0) & (column < SECOND))
    column -= SECOND
    tl.store(b2_at + group * DIM + column, found, mask=(column >= 0) & (column < DIM))
    column -= DIM
    tl.store(step_at + group * BLOCK + column, found, mask=(column >= 0) & (column < BLOCK))


class Inputs(NamedTuple):
    """What is integrated: states (population, batch, time, heads, dim), dt (population, heads), and the sets of weights."""

    q: Tensor
    k: Tensor
    dt: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None


@dataclass(frozen=True)
class Config:
    """Launch configuration of a kernel."""

    rows: int
    warps: int
    programs: int
    """Programs per multiprocessor."""


def chosen(kernel: str, w1: Tensor, w2: Tensor) -> Config:
    """Return the fastest configuration on an H200 in bf16 (docs/log.md), by the number of elements of a weight matrix.

    Compiled by Triton 3.6, backward with 64 rows and a hidden width of 16 reads out of bounds; with 32 it does not.
    """
    hidden, dim = map(_padded, w1.shape[-2:])
    if kernel == "forward":
        return Config(64, 4, 8 if dim <= 64 else 4)
    if hidden * dim <= 2048:
        return Config(32, 2, 4)
    if hidden * dim <= 4096:
        return Config(32, 4, 2)
    return Config(16, 4, 2) if w2.ndim < w1.ndim else Config(32, 8, 1)


def forward(inputs: Inputs, scheme: int, steps: int) -> tuple[Tensor, Tensor]:
    """Return q and k after all steps."""
    q, k = (torch.empty(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device) for _ in range(2))
    if q.numel():
        config = chosen("forward", inputs.w1, inputs.w2)
        _launch(_forward, config, config.rows, inputs, (), (q, k), scheme, steps)
    return q, k


def backward(inputs: Inputs, grad_q: Tensor, grad_k: Tensor, scheme: int, steps: int) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, dt, w1, b1, w2, b2; the caller drops those of absent biases."""
    q, w1, w2 = inputs.q, inputs.w1, inputs.w2
    config = chosen("backward", w1, w2)
    stack, groups, hidden, dim = w1.shape
    sets, share = stack * groups, q.shape[3] // groups
    slots, second = _programs(q, sets, config), w2.shape[2:].numel()
    used, kicks = config.rows // share * share, steps + (scheme == LEAPFROG)
    grads = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2)]
    # The programs' sums: the gradients of w1, b1, w2, b2, and of dt by row of a block.
    lead = (stack, groups)
    shapes = [tuple(w1.shape), (*lead, hidden), tuple(w2.shape), (*lead, dim), (sets, config.rows)]
    make = torch.empty if q.numel() else torch.zeros
    found = [make(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    if q.numel():
        width = hidden * dim + hidden + second + dim + config.rows
        sums = torch.empty(sets * slots, width, dtype=torch.float32, device=q.device)
        kept = 2 * kicks * config.rows * _padded(dim) if kicks > 1 else 1
        trace = torch.empty(sets * slots, kept, dtype=q.dtype, device=q.device)
        outputs = (*grads, sums, trace)
        _launch(_backward, config, used, inputs, (grad_q, grad_k), outputs, scheme, steps)
        sizes = {"FIRST": hidden * dim, "HIDDEN": hidden, "SECOND": second, "DIM": dim, "BLOCK": config.rows}
        _add_up[(-(-width // 64), sets)](sums, *found, count(-(-slots // 32)), slots, **sizes)
    # A row of a block belongs to the same head in every block.
    grad_dt = found.pop()[:, :used].view(stack, groups, used // share, share).sum(2).view(stack, -1)
    return (*grads, grad_dt.to(inputs.dt.dtype), *(part.to(w1.dtype) for part in found))


def _launch(
    kernel: Any,
    config: Config,
    used: int,
    inputs: Inputs,
    grads: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    scheme: int,
    steps: int,
) -> None:
    """Run a kernel whose blocks process `used` rows each."""
    q, k, *grads_read = (readable(tensor) for tensor in (*inputs[:2], *grads))
    weights = [q if tensor is None else tensor.contiguous() for tensor in inputs[2:]]
    _, batch, time, heads, dim = q.shape
    stack, groups, hidden, _ = inputs.w1.shape
    grid = (_programs(q, stack * groups, config), stack * groups)
    trips = count(-(-batch * time * heads // (groups * grid[0] * used)))
    tensors = (q, k, *weights, *grads_read, *outputs)
    strides = [stride for tensor in (q, k, *grads_read) for stride in tensor.stride()[:4]]
    kernel[grid](
        *tensors,
        trips,
        batch * time,
        time,
        *strides,
        HEADS=heads,
        GROUPS=groups,
        DIM=dim,
        HIDDEN=hidden,
        BLOCK=config.rows,
        BLOCK_D=_padded(dim),
        BLOCK_H=_padded(hidden),
        SCHEME=scheme,
        STEPS=steps,
        POTENTIAL=inputs.w2.ndim == 3,
        BIAS_1=inputs.b1 is not None,
        BIAS_2=inputs.b2 is not None,
        PRECISION="ieee",
        num_warps=config.warps,
    )


def _padded(size: int) -> int:
    """Return the size of a block's axis: a power of two, and at least 16, as products need it."""
    return max(16, triton.next_power_of_2(size))


def count(trips: int) -> Any:
    """Return a loop's trip count as the kernel takes it: the interpreter needs numbers known in advance."""
    return tl.constexpr(trips) if os.environ.get("TRITON_INTERPRET") == "1" else trips


def _programs(q: Tensor, groups: int, config: Config) -> int:
    """Return how many programs share one group's rows: enough to fill the chip, with work for each."""
    rows = q.shape[:-1].numel() // groups
    wanted = -(-multiprocessors(q.device) * config.programs // groups)
    return max(1, min(wanted, -(-rows // config.rows)))


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def readable(x: Tensor) -> Tensor:
    """Return x with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()
