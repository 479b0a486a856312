"""Kernel timing, and the two rooflines it is compared with: a large copy and a large matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_REPEATS = 5


def seconds_of(
    call: Callable[[], object],
    device: torch.device,
    calls: int = 10,
    before: Callable[[], object] | None = None,
) -> float:
    """Return the median seconds of a call; on a GPU calls are replayed as one CUDA graph, without launch overhead.

    A call that overwrites its input needs `before`, which restores it untimed; such calls are timed one by one.
    """
    if before is not None:
        return statistics.median(_alone(call, before, device) for _ in range(_REPEATS + 2))
    if device.type != "cuda":
        call()
        return statistics.median(_clock(call) for _ in range(_REPEATS))
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    return statistics.median(_event_seconds(graph.replay, 1) / calls for _ in range(_REPEATS))


def _alone(call: Callable[[], object], before: Callable[[], object], device: torch.device) -> float:
    before()
    return _clock(call) if device.type != "cuda" else _event_seconds(call, 1)


def _event_seconds(call: Callable[[], object], calls: int) -> float:
    """Return the mean seconds of a call, timed with CUDA events."""
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    for _ in range(calls):
        call()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1000 / calls


def _clock(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes per second of a large copy, counting bytes read and written.

    Copies are launched one by one: in a CUDA graph the same copy is another operation and ran at two thirds of the speed
    on an H200, which would overstate every share of the bandwidth.
    """
    source = torch.randn(2**28 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    if device.type != "cuda":
        seconds = seconds_of(lambda: target.copy_(source), device)
    else:
        target.copy_(source)
        seconds = min(_event_seconds(lambda: target.copy_(source), 10) for _ in range(_REPEATS))
    return 2 * source.numel() * source.element_size() / seconds


def product_rate(device: torch.device) -> float:
    """Return FLOP/s of a large matrix product, in bf16 on a GPU."""
    gpu = device.type == "cuda"
    size = 8192 if gpu else 256
    left, right = (
        torch.randn(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
        for _ in range(2)
    )
    return 2.0 * size**3 / seconds_of(lambda: left @ right, device)
