"""Decode with K=V in Triton, with keys rotated in the score: two kernels, whose partial results `decode_triton` joins.

The score of key j, cached unrotated, is k_j . R(-j) q. With q' = (q_1, -q_0, q_3, -q_2, ...), the query rotated by pi/2,

    R(-j) q = q cos(j) + q' sin(j)    and    (R(-j) q)' = q' cos(j) - q sin(j),

elementwise, with each pair's cosine and sine repeated twice, so that no pair has to be split. The query is rotated back to a
block's first position once per block, by the same angle each time; the rotation within a block is the same for every block.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

# Each block rotates the query by one more step, which adds a rounding error of about 1e-7: this is the maximum number of
# steps, if the context can be split into parts that short.
MAX_TRIPS = 512
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Sums:
    """Launch configuration of `sums`."""

    tiles: int
    """Tiles per block: 16 bytes each per thread, all loaded at once."""
    warps: int
    ahead: bool
    """Whether to load the next block before processing this one."""
    programs: int
    """Target number of programs per multiprocessor."""
    registers: int | None = None
    """Maximum registers per thread; None leaves it to the compiler."""

    def block(self, row: int) -> int:
        """Return the number of keys in a block whose rows are `row` bytes wide."""
        return self.tiles * max(1, 16 * 32 * self.warps // row)


@triton.jit
def keys_shared(place_at, parts, BLOCK: tl.constexpr):
    """Return the number of keys up to the query's position, and the keys and the blocks per part."""
    keys = tl.load(place_at).to(tl.int32) + 1
    shared = tl.cdiv(tl.cdiv(keys, BLOCK), parts)
    return keys, shared * BLOCK, shared


@triton.jit
def _turn_of(table_at, place, keys, dim, DIM: tl.constexpr):
    """Return cosine and sine (dim) of one position; 0 if the table has no such row, which no key of this part uses."""
    known = (dim < DIM) & (place < keys)
    at = table_at + place * DIM + 2 * (dim // 2)
    return tl.load(at, mask=known, other=0.0), tl.load(at + 1, mask=known, other=0.0)


@triton.jit
def _turns_of(table_at, row, keys, dim, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Return cosines and sines (rows, dim) of positions 0, 1, ..., composed from those of 1, 2, 4, ...

    Loading the rows would be simpler, but Triton keeps a loaded tensor in its own layout and computes the products with the
    cached tile in that layout: the tile then passes through shared memory once more, which dominated the run time.
    """
    blank = (row[:, None] + dim[None, :]).to(tl.float32) * 0.0
    cos, sin = blank + 1.0, blank
    for power in tl.static_range(8):
        if 2**power < ROWS:
            more_cos, more_sin = _turn_of(table_at, 2**power, keys, dim, DIM)
            more_cos, more_sin = more_cos[None, :], more_sin[None, :]
            taken = (row // 2**power % 2 == 1)[:, None]
            turned = cos * more_cos - sin * more_sin
            sin = tl.where(taken, sin * more_cos + cos * more_sin, sin)
            cos = tl.where(taken, turned, cos)
    return cos, sin


@triton.jit
def _queries(at, odd, wanted):
    """Return queries loaded from those addresses, and the same rotated by pi/2.

    Neighbors are loaded from contiguous addresses, not from `dim ^ 1`, whose layout would be one element per thread.
    """
    along = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
    after = tl.load(at + 1, mask=wanted & ~odd, other=0.0).to(tl.float32)
    before = tl.load(at - 1, mask=wanted & odd, other=0.0).to(tl.float32)
    return along, after - before


@triton.jit
def _turned_back(along, across, cos, sin):
    """Return both rotated back."""
    return along * cos + across * sin, across * cos - along * sin


@triton.jit
def products(
    q_at, kv_at, table_at, place_at, mix_at, log_at, trips, keys, part, scale,
    q_b, q_h, kv_b, kv_h, kv_n,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    PLACED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Process one part of the context for the query heads (share, dim) of one key head, with matrix products.

    scores = q (kv cos)^T + q' (kv sin)^T: the tile is multiplied by cosines and sines in the same registers from which the
    tensor core reads it.
    """
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
    row = tl.arange(0, BLOCK)
    inside = dim < DIM
    wanted = (query < SHARE)[:, None] & inside[None, :]
    q_place = q_at + sequence * q_b + (head * SHARE + query[:, None]) * q_h
    along, across = _queries(q_place + dim[None, :], (dim % 2 == 1)[None, :], wanted)
    cos, sin = _turn_of(table_at, first, keys, dim, DIM)
    along, across = _turned_back(along, across, cos[None, :], sin[None, :])
    step_cos, step_sin = _turn_of(table_at, BLOCK, keys, dim, DIM)
    step_cos, step_sin = step_cos[None, :], step_sin[None, :]
    cos, sin = _turns_of(table_at, row, keys, dim, BLOCK, DIM)
    cos, sin = cos.to(DTYPE), sin.to(DTYPE)
    kv_place = kv_at + sequence * kv_b + head.to(tl.int64) * kv_h
    offset = row[:, None] * kv_n + dim[None, :]
    # If the last position is known at launch, every part has a key in its first block, and the running maximum is finite
    # from there on; otherwise 0 replaces it, and weights are 0. Sums of weights are kept per position in a block and
    # reduced once, at the end.
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q, BLOCK], tl.float32)
    mix = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for trip in tl.range(trips, num_stages=STAGES):
        start = first + trip * BLOCK
        seen = row < last - start
        here = kv_place + start.to(tl.int64) * kv_n
        kv = tl.load(here + offset, mask=seen[:, None] & inside[None, :], other=0.0)
        # Two products with separate accumulators have half the latency of one that continues the other's.
        by_cos = tl.dot(along.to(DTYPE), tl.trans(kv * cos), input_precision=PRECISION)
        by_sin = tl.dot(across.to(DTYPE), tl.trans(kv * sin), input_precision=PRECISION)
        along, across = _turned_back(along, across, step_cos, step_sin)
        scores = by_cos * (scale * _LOG2E) + by_sin * (scale * _LOG2E)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        risen = tl.maximum(highest, tl.max(scores, 1))
        base = risen
        if PLACED:
            base = tl.where(risen == float("-inf"), 0.0, risen)
        weights = tl.exp2(scores - base[:, None])
        fall = tl.exp2(highest - base)
        total = total * fall[:, None] + weights
        mix = tl.dot(weights.to(DTYPE), kv, mix * fall[:, None], input_precision=PRECISION)
        highest = risen
    sums = tl.sum(total, 1)
    if PLACED:
        sums = tl.where(sums > 0, sums, 1.0)
    place = (owner * SHARE + query).to(tl.int64) * parts + tl.program_id(0)
    tl.store(mix_at + place[:, None] * DIM + dim[None, :], mix / sums[:, None], mask=wanted)
    tl.store(log_at + place, highest + tl.log2(sums), mask=query < SHARE)


@triton.jit
def _tiles(at, kv_n, row, left, inside, TILES: tl.constexpr, ROWS: tl.constexpr):
    """Return the block's keys as tiles (rows, dim) of consecutive positions; `left` keys remain."""
    tiles = ()
    for tile in tl.static_range(TILES):
        seen = (row < left - tile * ROWS)[:, None] & inside
        tiles = tiles + (tl.load(at + tile * ROWS * kv_n, mask=seen, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def sums(
    q_at, kv_at, table_at, place_at, mix_at, log_at, trips, keys, part, scale,
    q_b, q_h, kv_b, kv_h, kv_n,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, AHEAD: tl.constexpr, PLACED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Process one part of the context for the single query head (dim) of a key head, with sums in registers.

    It uses no shared memory. A thread keeps its own softmax state for its row of every tile; they are merged at the end.
    From tile to tile the rotated query follows R(-2t) q = 2 cos(t) R(-t) q - q: one multiply-add per element read.
    """
    BLOCK: tl.constexpr = TILES * ROWS
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
    dim = tl.arange(0, BLOCK_D)
    row = tl.arange(0, ROWS)
    inside = (dim < DIM)[None, :]
    q_place = q_at + sequence * q_b + head * q_h
    along, across = _queries(q_place + dim[None, :], (dim % 2 == 1)[None, :], inside)
    along, across = along * (scale * _LOG2E), across * (scale * _LOG2E)
    cos, sin = _turn_of(table_at, first, keys, dim, DIM)
    along, across = _turned_back(along, across, cos[None, :], sin[None, :])
    cos, sin = _turns_of(table_at, row, keys, dim, ROWS, DIM)
    along, across = _turned_back(along, across, cos, sin)
    tile_cos, tile_sin = _turn_of(table_at, ROWS, keys, dim, DIM)
    tile_cos, tile_sin = tile_cos[None, :], tile_sin[None, :]
    step_cos, step_sin = _turn_of(table_at, BLOCK, keys, dim, DIM)
    step_cos, step_sin = step_cos[None, :], step_sin[None, :]
    kv_place = kv_at + sequence * kv_b + head.to(tl.int64) * kv_h
    offset = row[:, None] * kv_n + dim[None, :]
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mix = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if AHEAD:
        coming = _tiles(
            kv_place + first.to(tl.int64) * kv_n + offset, kv_n, row, last - first, inside, TILES, ROWS
        )
    for trip in tl.range(trips, num_stages=1):
        start = first + trip * BLOCK
        if AHEAD:
            tiles = coming
            here = kv_place + (start + BLOCK).to(tl.int64) * kv_n + offset
            coming = _tiles(here, kv_n, row, last - start - BLOCK, inside, TILES, ROWS)
        else:
            here = kv_place + start.to(tl.int64) * kv_n + offset
            tiles = _tiles(here, kv_n, row, last - start, inside, TILES, ROWS)
        scores = ()
        risen = highest
        turned, further = along, along * tile_cos + across * tile_sin
        for tile in tl.static_range(TILES):
            score = tl.sum(tiles[tile].to(tl.float32) * turned, 1)
            score = tl.where(row < last - start - tile * ROWS, score, float("-inf"))
            scores = scores + (score,)  # type: ignore[assignment]  # noqa: RUF005
            risen = tl.maximum(risen, score)
            turned, further = further, 2 * tile_cos * further - turned
        along, across = _turned_back(along, across, step_cos, step_sin)
        # A row without a visible key has no maximum; 0 replaces it, and its weights are 0.
        base = tl.where(risen == float("-inf"), 0.0, risen)
        fall = tl.exp2(highest - base)
        total = total * fall
        mix = mix * fall[:, None]
        for tile in tl.static_range(TILES):
            weights = tl.exp2(scores[tile] - base)
            total += weights
            mix += weights[:, None] * tiles[tile].to(tl.float32)
        highest = risen
    top = tl.max(highest, 0)
    base = top
    if PLACED:
        base = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp2(highest - base)
    whole = tl.sum(total * share, 0)
    if PLACED:
        whole = tl.where(whole > 0, whole, 1.0)
    mixed = tl.sum(mix * share[:, None], 0) / whole
    place = owner.to(tl.int64) * parts + tl.program_id(0)
    tl.store(mix_at + place * DIM + dim, mixed, mask=dim < DIM)
    tl.store(log_at + place, top + tl.log2(whole))
