"""Timing and memory of steps and kernels, and two rooflines: a large copy and a large matrix product."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from headtohead.kernels.cuda_graph import CudaGraph

_REPEATS = 5


def wait(device: torch.device) -> None:
    """Wait until the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release() -> None:
    """Free the memory of deleted tensors."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # the device is unusable after some errors
            torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Return the bytes of all tensors on a GPU; 0 on a CPU, which does not report them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_bytes(step: Callable[[], object], device: torch.device, others: int) -> int | None:
    """Return the peak bytes allocated during a step less those of `others`; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - others


def mean_seconds(step: Callable[[], object], device: torch.device, count: int = 1) -> float:
    """Return the mean seconds of `count` consecutive steps, timed on a GPU with CUDA events.

    It does not wait for earlier work: behind it, the launch of the first kernel costs nothing.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - began) / count
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    for _ in range(count):
        step()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1000 / count


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
        times = []
        for _ in range(_REPEATS + 2):
            before()
            times.append(mean_seconds(call, device))
        return statistics.median(times)
    if device.type != "cuda":
        call()
        return statistics.median(mean_seconds(call, device) for _ in range(_REPEATS))

    def burst() -> None:
        for _ in range(calls):
            call()  # its output is freed, so that the next call can use the same memory

    graph = CudaGraph(burst, device, warmup=1)
    graph.replay()
    return statistics.median(mean_seconds(graph.replay, device) / calls for _ in range(_REPEATS))


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
        seconds = min(mean_seconds(lambda: target.copy_(source), device, 10) for _ in range(_REPEATS))
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
