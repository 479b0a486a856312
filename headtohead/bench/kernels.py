"""Kernels against their peers and against the bytes they must move, all measured in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headtohead.kernels import attend, backend_name, decode, path_name, plain, rotary_table
from headtohead.mechanisms.base import Frame, Shape, seeded_draw
from headtohead.mechanisms.coupled import Coupled, CoupledOptions

Progress = Callable[[str, float], None]
_REPEATS = 5


def seconds_of(call: Callable[[], object], device: torch.device, calls: int = 10) -> float:
    """Return the median seconds of a call; on a GPU of calls replayed as one graph, so that no launch is waited for."""
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


def _event_seconds(call: Callable[[], object], calls: int) -> float:
    """Return the mean seconds of a call by the GPU's own clock."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(calls):
        call()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1000 / calls


def _clock(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes per second of a large copy, read and written bytes counted.

    Launched one by one: in a graph the same copy is another operation, and on an H200 it ran at two thirds of the speed,
    which would make every share of the bandwidth look better than it is.
    """
    source = torch.randn(2**28 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    if device.type != "cuda":
        seconds = seconds_of(lambda: target.copy_(source), device)
    else:
        target.copy_(source)
        seconds = min(_event_seconds(lambda: target.copy_(source), 10) for _ in range(_REPEATS))
    return 2 * source.numel() * source.element_size() / seconds


@dataclass(frozen=True)
class KernelCase:
    """One setting of the coupling, (batch, heads, time, dim)."""

    name: str
    options: CoupledOptions
    shape: tuple[int, int, int, int]


def kernel_cases(device: torch.device) -> list[KernelCase]:
    """Return the settings that are measured; small ones where there is no GPU."""
    shape = (64, 8, 512, 64) if device.type == "cuda" else (2, 2, 16, 16)
    settings = {
        "euler": CoupledOptions(),
        "euler, per head": CoupledOptions(per_head=True),
        "leapfrog, potential force": CoupledOptions(dynamics="leapfrog", force="potential"),
        "leapfrog, 7 steps": CoupledOptions(dynamics="leapfrog", steps=7),
    }
    return [KernelCase(f"coupled {name}", options, shape) for name, options in settings.items()]


def measure_kernels(device: torch.device, progress: Progress = lambda words, share: None) -> dict[str, Any]:
    """Return forward + backward of the coupling: fused, its plain twin (compiled on a GPU), and the byte floor."""
    bandwidth = copy_bandwidth(device)
    cases = kernel_cases(device)
    rows = []
    for place, case in enumerate(cases):
        progress(case.name, place / len(cases))
        rows.append(_coupling(case, device, bandwidth))
    return {"kernels": path_name(device), "copy_bytes_per_second": bandwidth, "rows": rows}


def _coupling(case: KernelCase, device: torch.device, bandwidth: float) -> dict[str, Any]:
    batch, heads, tokens, dim = case.shape
    gpu = device.type == "cuda"
    stage = Coupled(Shape(heads * dim, heads), case.options)
    stage.initialise(seeded_draw(1, "speed", 0.02))
    stage.to(device)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    dtype = torch.bfloat16 if gpu else torch.float32
    made = (torch.randn(batch, tokens, heads, dim, device=device, dtype=dtype) for _ in range(4))
    q, k, grad_q, grad_k = (tensor.transpose(1, 2) for tensor in made)
    leaves = [q.requires_grad_(), k.requires_grad_(), *stage.parameters()]

    def both(evolve: Callable[[Tensor, Tensor, Frame], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu, cache_enabled=False):
            outputs = evolve(q, k, Frame(time=tokens))
        return torch.autograd.grad(outputs, leaves, (grad_q, grad_k))

    ours = seconds_of(lambda: both(stage.evolve), device)
    with plain():
        peer = torch.compile(stage.evolve, dynamic=False) if gpu else stage.evolve
        theirs = seconds_of(lambda: both(peer), device)
    if gpu:
        torch.compiler.reset()
    # Forward reads and writes q and k; backward reads them and both gradients and writes two.
    floor = 10 * q.numel() * q.element_size() / bandwidth
    twin = "plain twin, compiled" if gpu else "plain twin"
    return {"case": case.name, "shape": list(case.shape), "peer": twin, "peer_seconds": theirs} | {
        "seconds": ours,
        "floor_seconds": floor,
        "over_floor": ours / floor,
        "faster": theirs / ours,
    }


@dataclass(frozen=True)
class DecodeCase:
    """One decoding step: sequences, query heads, key heads, cached tokens, width of a head."""

    batch: int
    heads: int
    kv_heads: int
    keys: int
    dim: int


def decode_cases(device: torch.device) -> list[DecodeCase]:
    """Return the settings that are measured; small ones where there is no GPU."""
    if device.type == "cuda":
        return [DecodeCase(64, 8, 8, 8192, 64), DecodeCase(32, 16, 4, 32768, 128)]
    return [DecodeCase(2, 2, 2, 64, 16), DecodeCase(2, 4, 2, 96, 32)]


def measure_decode(device: torch.device, progress: Progress = lambda words, share: None) -> dict[str, Any]:
    """Return one query's attention on a K=V cache beside the library's with separate keys and values."""
    bandwidth = copy_bandwidth(device)
    cases = decode_cases(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for place, case in enumerate(cases):
        progress(f"{case.keys} cached tokens", place / len(cases))
        q = torch.randn(case.batch, case.heads, 1, case.dim, device=device, dtype=dtype)
        kv, v = (
            torch.randn(case.batch, case.kv_heads, case.keys, case.dim, device=device, dtype=dtype)
            for _ in range(2)
        )
        table = rotary_table(torch.arange(case.keys, device=device), case.dim, 10_000.0, torch.float32)
        floor = kv.numel() * kv.element_size() / bandwidth
        with torch.no_grad():
            peer = seconds_of(lambda q=q, kv=kv, v=v: attend(q, kv, v), device)  # type: ignore[misc]
            twice = seconds_of(lambda q=q, kv=kv: attend(q, kv, kv), device)  # type: ignore[misc]
            for turn in ("nothing", "roundtrip", "score"):
                call = lambda q=q, kv=kv, table=table, turn=turn: decode(q, kv, table, turn)  # noqa: E731
                ours = seconds_of(call, device)
                rows.append(
                    {"case": vars(case), "turned": turn, "peer": f"{backend_name(q, kv, v)}, K and V"}
                    | {"peer_seconds": peer, "peer_same_tensor_seconds": twice, "seconds": ours}
                    | {"floor_seconds": floor, "share_of_copy": floor / ours, "faster": peer / ours}
                )
    return {"kernels": path_name(device), "copy_bytes_per_second": bandwidth, "rows": rows}
