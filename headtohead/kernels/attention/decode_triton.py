"""Decode with K=V in Triton: the cached tensor is read once, as keys and as values.

Imported on first use (`decode.py` registers the operators). The context is split into parts. A program processes one part
of one key head for all query heads that share it, and stores its output and the log of its sum of weights. A second
kernel joins the parts by those logs. Keys rotated in the score have separate kernels (`decode_rope_triton.py`).

A CUDA graph cannot depend on the number of keys: `place` is the query's position on the device, and the programs split the
keys up to it. Separate values are optional.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headtohead.kernels.attention.decode_rope_triton import MAX_TRIPS, Sums, keys_shared, products, sums
from headtohead.kernels.dynamics.integrator_triton import count, multiprocessors, readable

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _parts(
    q_at, kv_at, v_at, place_at, mix_at, log_at, trips, keys, part, scale,
    q_b, q_h, kv_b, kv_h, kv_n, v_b, v_h, v_n,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    APART: tl.constexpr, PLACED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Process one part of the context for the query heads (share, dim) of one key head."""
    DTYPE: tl.constexpr = kv_at.dtype.element_ty
    parts = tl.num_programs(0)
    owner = tl.program_id(1)
    if PLACED:
        keys, part, shared = keys_shared(place_at, parts, BLOCK)
        if not COUNTED:
            trips = shared
    sequence = (owner // KV_HEADS).to(tl.int64)
    head = owner % KV_HEADS
    first = tl.program_id(0) * part
    last = tl.minimum(first + part, keys)
    query = tl.arange(0, BLOCK_Q)
    dim = tl.arange(0, BLOCK_D)
    q_place = q_at + sequence * q_b + (head * SHARE + query) * q_h
    kv_place = kv_at + sequence * kv_b + head.to(tl.int64) * kv_h
    v_place = v_at + sequence * v_b + head.to(tl.int64) * v_h
    row = tl.arange(0, BLOCK)
    wanted = (query[:, None] < SHARE) & (dim[None, :] < DIM)
    q = tl.load(q_place[:, None] + dim[None, :], mask=wanted, other=0.0)
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    mix = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for trip in tl.range(trips, num_stages=STAGES):
        start = first + trip * BLOCK
        key = start + row
        seen = key < last
        inside = seen[:, None] & (dim < DIM)[None, :]
        kv = tl.load(kv_place + key[:, None].to(tl.int64) * kv_n + dim[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(kv), input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores * (scale * _LOG2E), float("-inf"))
        risen = tl.maximum(highest, tl.max(scores, 1))
        # A part without a visible key so far has no maximum; 0 replaces it, and its weights are 0.
        base = tl.where(risen == float("-inf"), 0.0, risen)
        weights = tl.exp2(scores - base[:, None])
        fall = tl.exp2(highest - base)
        total = total * fall + tl.sum(weights, 1)
        if APART:
            v = tl.load(v_place + key[:, None].to(tl.int64) * v_n + dim[None, :], mask=inside, other=0.0)
        else:
            v = kv
        mix = tl.dot(weights.to(DTYPE), v, mix * fall[:, None], input_precision=PRECISION)
        highest = risen
    place = (owner * SHARE + query).to(tl.int64) * parts + tl.program_id(0)
    wanted = query < SHARE
    share = tl.where(total > 0, total, 1.0)
    tl.store(
        mix_at + place[:, None] * DIM + dim[None, :],
        mix / share[:, None],
        mask=wanted[:, None] & (dim < DIM)[None, :],
    )
    logs = tl.where(total > 0, highest + tl.log2(share), float("-inf"))
    tl.store(log_at + place, logs, mask=wanted)


@triton.jit
def _join(
    mix_at, log_at, table_at, place_at, out_at, parts,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BACK: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Join the parts of one query head; BACK rotates back by a row (dim / 2, 2): the table's first, or the position's."""
    owner = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    logs = tl.load(log_at + owner * parts + part, mask=part < parts, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, 0))
    weights = weights / tl.sum(weights, 0)
    pair = tl.arange(0, BLOCK_D // 2)
    inside = (part < parts)[:, None] & (2 * pair < DIM)[None, :]
    place = mix_at + (owner * parts + part[:, None]) * DIM + 2 * pair[None, :]
    even = tl.sum(weights[:, None] * tl.load(place, mask=inside, other=0.0), 0)
    odd = tl.sum(
        weights[:, None] * tl.load(place + 1, mask=inside & (2 * pair + 1 < DIM)[None, :], other=0.0), 0
    )
    if BACK:
        if PLACED:
            table_at += tl.load(place_at) * DIM
        cos = tl.load(table_at + 2 * pair, mask=2 * pair < DIM, other=0.0)
        sin = tl.load(table_at + 2 * pair + 1, mask=2 * pair < DIM, other=0.0)
        even, odd = even * cos + odd * sin, odd * cos - even * sin
    tl.store(out_at + owner * DIM + 2 * pair, even.to(out_at.dtype.element_ty), mask=2 * pair < DIM)
    tl.store(out_at + owner * DIM + 2 * pair + 1, odd.to(out_at.dtype.element_ty), mask=2 * pair + 1 < DIM)


@dataclass(frozen=True)
class Config:
    """Launch configuration of the kernel."""

    keys: int
    warps: int
    stages: int
    programs: int
    """Target number of programs per multiprocessor."""
    registers: int | None = None
    """Maximum registers per thread; None leaves it to the compiler."""


# The fastest in sweeps on an H200 (docs/log.md), by whether keys are rotated in the score and have one query head each.
CONFIGS: dict[tuple[bool, bool], Config | Sums] = {
    (False, False): Config(64, 2, 3, 4),
    (False, True): Config(64, 2, 3, 4),
    (True, False): Config(64, 4, 5, 1),
    (True, True): Sums(8, 1, True, 11),
}
# With separate values.
BESIDE = Config(128, 2, 2, 4)
_MAX_PARTS = 256


def decode(
    q: Tensor,
    kv: Tensor,
    table: Tensor | None,
    rope_mode: int,
    scale: float,
    config: Config | Sums | None = None,
    *,
    values: Tensor | None = None,
    place: Tensor | None = None,
) -> Tensor:
    """Return (batch, heads, dim) from q (batch, heads, dim) and kv (batch, kv_heads, keys, dim).

    The query is at the position of the last key, or at `place` (1,), and later keys are masked. `values`, of the keys'
    shape, replace the keys as values; keys rotated in the score are always their own values.
    """
    batch, heads, dim = q.shape
    kv_heads, keys = kv.shape[1:3]
    q, kv = readable(q), readable(kv)
    v = kv if values is None else readable(values)
    table = q.new_empty(0, dtype=torch.float32) if table is None else table.contiguous()
    share = heads // kv_heads
    wide = max(32, triton.next_power_of_2(dim))
    config = config or (CONFIGS[rope_mode == 1, share == 1] if values is None else BESIDE)
    if isinstance(config, Sums) and (rope_mode != 1 or share > 1):
        raise ValueError("sums needs rotated keys with one query head each")
    if rope_mode == 1 and values is not None:
        raise ValueError("keys rotated in the score take no separate values")
    width = wide * kv.element_size()
    if isinstance(config, Sums):
        block = config.block(width)
    else:
        # The configurations were tuned for rows of at most 256 bytes; wider ones exceed registers and shared memory.
        narrow = min(config.keys, max(16, config.keys * 256 // width))
        block = config.keys if rope_mode != 1 and values is None else narrow
    blocks = -(-keys // block)
    parts = -(-multiprocessors(q.device) * config.programs // (batch * kv_heads))
    parts = max(parts, -(-blocks // MAX_TRIPS)) if rope_mode == 1 else parts
    parts = max(1, min(parts, blocks, _MAX_PARTS))
    trips = -(-blocks // parts)
    parts = -(-blocks // trips)
    mix = torch.empty(batch, heads, parts, dim, dtype=torch.float32, device=q.device)
    logs = torch.empty(batch, heads, parts, dtype=torch.float32, device=q.device)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grid = (parts, batch * kv_heads)
    shape = {"KV_HEADS": kv_heads, "DIM": dim, "BLOCK_D": wide}
    given = (mix, logs, count(trips), keys, trips * block, scale, *q.stride()[:2], *kv.stride()[:3])
    chip = {"num_warps": config.warps, "maxnreg": config.registers}
    at = table if place is None else place
    placed = {"PLACED": place is not None, "COUNTED": isinstance(count(trips), tl.constexpr)}
    if isinstance(config, Sums):
        tiles = {"TILES": config.tiles, "ROWS": block // config.tiles, "AHEAD": config.ahead}
        sums[grid](q, kv, table, at, *given, **shape, **tiles, **placed, **chip)
    else:
        shape |= {"SHARE": share, "BLOCK_Q": max(16, triton.next_power_of_2(share)), "BLOCK": block}
        loop = {"PRECISION": "ieee", "STAGES": config.stages, **placed}
        if rope_mode == 1:
            products[grid](q, kv, table, at, *given, **shape, **loop, **chip)
        else:
            apart = values is not None
            _parts[grid](q, kv, v, at, *given, *v.stride()[:3], **shape, **loop, APART=apart, **chip)
    back = rope_mode == 2
    row = table[-1] if back and place is None else table
    sizes = {"DIM": dim, "BLOCK": triton.next_power_of_2(parts), "BLOCK_D": wide}
    _join[(batch * heads,)](
        mix, logs, row, at, output, parts, **sizes, BACK=back, PLACED=place is not None, num_warps=4
    )
    return output
