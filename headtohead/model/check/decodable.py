"""Checks of level `decodable`: a cache that agrees with the full forward and has its declared size."""

from __future__ import annotations

import random

import torch

from headtohead.mechanisms.contract.cache import Cache
from headtohead.model.check.fixture import TIME, TOLERANCE, Fixture, require, require_close


def cache_declared(bench: Fixture) -> None:
    """`cache_spec` declares the cache, and `forward` accepts one."""
    mechanism = bench.mechanism()
    declared = mechanism.cache_spec() is not None
    require(declared, "it declares no cache (cache_spec); decoding recomputes everything")
    require(mechanism.decodable, "it declares a cache but forward(x, frame, cache) does not accept one")


def cache_agrees(bench: Fixture) -> None:
    """Prefill and cached decoding equal the full forward, for random splits, batches and padding."""
    mechanism = bench.mechanism()
    choose = random.Random(0)
    with torch.no_grad():
        for trial in range(6):
            batch = choose.randint(1, 4)
            x = bench.inputs(batch=batch, seed=20 + trial)
            padded = mechanism.supports.padding and trial % 2 == 1
            real = None
            if padded:
                fillers = torch.tensor([choose.randint(0, 4) for _ in range(batch)])
                real = torch.arange(TIME) >= fillers[:, None]
            wanted = bench.run(mechanism, x, padding=real)
            cuts = sorted(choose.sample(range(1, TIME), choose.randint(1, 5)))
            parts = list(zip((0, *cuts), (*cuts, TIME), strict=True))
            cache = mechanism.new_cache(batch, TIME + trial, torch.float64)
            pieces = [bench.decode(mechanism, x[:, a:b], cache, a, real) for a, b in parts]
            got = torch.cat(pieces, 1)
            if real is not None:
                got, wanted = got[real], wanted[real]
            where = "with left padding" if padded else f"in parts of {[b - a for a, b in parts]}"
            words = f"cached decoding differs from the full forward, {where} (by {{error}})"
            require_close(got, wanted, words, max(TOLERANCE, mechanism.cache_error))


def recorded_agrees(bench: Fixture) -> None:
    """If it is graph_safe, a step captured at one position equals the full forward at others."""
    mechanism = bench.mechanism()
    if not mechanism.graph_safe:
        return
    x = bench.inputs(batch=2, seed=30)
    first = TIME // 2
    with torch.no_grad():
        wanted = bench.run(mechanism, x)
        cache = mechanism.new_cache(2, TIME + 1, torch.float64)
        bench.decode(mechanism, x[:, :first], cache, 0, None)
        for place in range(first, TIME):
            row = x[:, place : place + 1]
            # As in a replay: Python values stay those of the capture, and only the position changes.
            frame = bench.frame(row, first)
            frame.state.place = cache.place = torch.tensor([place])
            words = (
                f"it declares graph_safe, but a step captured at position {first} differs from the full forward at "
                f"position {place} (by {{error}})"
            )
            output, same = mechanism(row, frame, cache), wanted[:, place : place + 1]
            require_close(output, same, words, max(TOLERANCE, mechanism.cache_error))


def cache_bytes(bench: Fixture) -> None:
    """Declared bytes equal the allocated ones, and decoding does not replace the tensors with larger ones."""
    mechanism = bench.mechanism()
    spec = mechanism.cache_spec() or ()
    for batch, capacity, dtype in ((1, TIME, torch.float64), (3, 2 * TIME, torch.float64)):
        declared = sum(entry.bytes(batch, capacity, dtype) for entry in spec)
        cache = mechanism.new_cache(batch, capacity, dtype)
        _require_bytes(cache, declared, "new_cache allocates")
        with torch.no_grad():
            bench.decode(mechanism, bench.inputs(batch=batch), cache, 0, None)
        _require_bytes(cache, declared, "after decoding the cache holds")


def _require_bytes(cache: Cache, declared: int, subject: str) -> None:
    held = [name for name, value in vars(cache).items() if isinstance(value, torch.Tensor)]
    require(not held, f"the cache holds a tensor outside its declared entries: {', '.join(held)}")
    require(cache.bytes == declared, f"{subject} {cache.bytes} bytes; cache_spec declares {declared}")
