"""Benchmark of every fused kernel: time against its plain reference and byte floor, error against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headtohead.bench.clock import copy_bandwidth, product_rate, seconds_of
from headtohead.bench.fused import Draw, Fused, Given, odd_cases, training_cases
from headtohead.bench.harness import Case, Progress, Row, Rows, attempt
from headtohead.common.progress import progress_bar
from headtohead.kernels import path_name
from headtohead.kernels.path import triton_serves
from headtohead.study.environment import choose_device, device_name

_STACKED = 3
# Allowed relative norm of the error against the float64 reference: one rounding step in bf16 and fp16, where products are
# rounded, and a few hundred in float32, where sums run over all rows.
BOUNDS = {"bf16": 2.0**-7, "fp16": 2.0**-10, "float32": 2e-5}
_MAX_LOST = 0.1
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


def bench_kernels(*, device: str = "auto", out: str | Path | None = None, quiet: bool = False) -> Row:
    """Return time and error of every fused kernel against its plain reference and float64; small shapes on CPU.

    Errors are those of outputs and every gradient against the float64 reference on the device, at the training shape and
    at an odd one, and those of calls under vmap against separate calls. A failed kernel is a row with the reason. `out`
    stores each row as soon as it is measured; rows stored for this commit and device are reused. An error that leaves the
    device unusable in this process ends the benchmark; another call continues after it.
    """
    chosen = choose_device(device)
    with progress_bar("measuring kernels", quiet) as progress:
        progress("copy and matrix product", 0.0)
        roofs = {
            "copy_bytes_per_second": copy_bandwidth(chosen),
            "product_flops_per_second": product_rate(chosen),
        }
        where = {"device": device_name(chosen)}
        rows = Rows("kernels", out, where | {"kernels": path_name(chosen), **roofs})
        cases = [
            Case(
                {"case": case.name, "shape": list(case.shape), "dtype": dtype, "kind": kind, **where},
                f"{case.name}, {dtype}, {kind}",
                partial(_row, case, dtype, kind, chosen, roofs),
            )
            for case, dtype, kind in _work(chosen)
        ]
        return rows.run(cases, progress)


def _work(device: torch.device) -> Iterator[tuple[Fused, str, str]]:
    """Yield (case, dtype, kind), most important first; the kind is training (timed), odd or stacked."""
    gpu = device.type == "cuda"
    dtypes = tuple(BOUNDS) if gpu else ("float32",)
    training, odd = training_cases(gpu), odd_cases(gpu)
    for case in training:
        yield case, _timed_in(case, device), "training"
    for dtype in dtypes:
        for case in odd:
            yield case, dtype, "odd"
    for case in odd:
        # Populations are of small models, whose loss is the plain reference.
        if not case.name.startswith("loss"):
            yield case, _timed_in(case, device), "stacked"
    for dtype in dtypes:
        for case in training:
            # Every setting of the coupling is compiled for every precision, so only one is measured here.
            chosen = case.name == "coupled euler" or not case.name.startswith("coupled")
            if chosen and dtype != _timed_in(case, device):
                yield case, dtype, "training"


def _timed_in(case: Fused, device: torch.device) -> str:
    return case.precision if device.type == "cuda" else "float32"


def _row(case: Fused, dtype: str, kind: str, device: torch.device, roofs: Row, progress: Progress) -> Row:
    """Return a row; `failed` holds the reason of a failure."""
    if kind == "stacked":
        return attempt(_stacked_errors, case, dtype, device)
    found = attempt(_errors, case, dtype, device)
    if kind == "training" and dtype == _timed_in(case, device):
        found |= attempt(_times, case, dtype, device, roofs)
        if "seconds" in found:
            found |= attempt(_peer, case, dtype, device, found["seconds"], name="peer_failed")
    return found


def _drawn(case: Fused, dtype: str, device: torch.device, seed: int = 0) -> Given:
    """Return random inputs of a kernel; leaves require gradients."""
    return _with_leaves(case.given(_DTYPES[dtype], _draw(device, seed)))


def _draw(device: torch.device, seed: int) -> Draw:
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(*shape, device=device, generator=generator)


def _with_leaves(given: Given) -> Given:
    return Given({name: leaf.detach().requires_grad_() for name, leaf in given.leaves.items()}, given.rest)


def _both(
    function: Callable[..., tuple[Tensor, ...]], given: Given, seed: int = 1
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Return the outputs of a function and the gradients of all leaves, for output gradients drawn from the seed."""
    outputs = list(function(*given.leaves.values(), *given.rest))
    sloped = [output for output in outputs if output.requires_grad]
    return outputs, torch.autograd.grad(sloped, list(given.leaves.values()), _slopes(sloped, seed))


def _slopes(outputs: list[Tensor], seed: int) -> list[Tensor]:
    draw = _draw(outputs[0].device, seed)
    # Same memory layout as the outputs, and values exact in every precision.
    return [
        torch.ones_like(output)
        if output.ndim == 0
        else torch.empty_like(output).copy_(draw(*output.shape).bfloat16())
        for output in outputs
    ]


def _in_place(case: Fused, given: Given) -> bool:
    """Return whether the kernel overwrites its first leaf with the gradient on this device."""
    return case.overwrites and triton_serves(next(iter(given.leaves.values())))


def _errors(case: Fused, dtype: str, device: torch.device) -> Row:
    """Return the errors of outputs and gradients against the float64 reference on the same rounded inputs."""
    given = _drawn(case, dtype, device)
    if _in_place(case, given):
        (leaf,) = given.leaves.values()
        room = leaf.detach().clone()
        outputs = [*case.kernel(room, *given.rest)]
        grads: tuple[Tensor, ...] = (room,)
    else:
        outputs, grads = _both(case.kernel, given)
    exact = _both(case.twin, _in_double(given))
    names = [*(f"output {index}" for index in range(len(outputs))), *given.leaves]
    return _compared(names, (*outputs, *grads), (*exact[0], *exact[1]), dtype)


def _in_double(given: Given) -> Given:
    leaves = {name: leaf.detach().double() for name, leaf in given.leaves.items()}
    rest = tuple(part.double() if part.is_floating_point() else part for part in given.rest)
    return _with_leaves(Given(leaves, rest))


def _compared(names: list[str], ours: tuple[Tensor, ...], exact: tuple[Tensor, ...], dtype: str) -> Row:
    errors, bounds = {}, {}
    for name, one, other in zip(names, ours, exact, strict=True):
        errors[name] = _distance(one, other)
        # Numbers that underflow in a precision are lost in any implementation.
        lost = 2 * _distance(other.to(one.dtype), other)
        bounds[name] = max(BOUNDS[dtype], lost if lost < _MAX_LOST else 0.0)
    worst = max(names, key=lambda name: errors[name] / bounds[name])
    return {
        "errors": errors,
        "worst": worst,
        "error": errors[worst],
        "bound": bounds[worst],
        "within": all(errors[name] <= bounds[name] for name in names),
    }


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the relative norm of a difference; infinite if it is NaN."""
    exact = other.detach().double()
    found = float((one.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))
    return math.inf if math.isnan(found) else found


def _stacked_errors(case: Fused, dtype: str, device: torch.device) -> Row:
    """Return the errors of three calls under vmap against the same calls one by one."""
    parts = [_drawn(case, dtype, device, seed) for seed in range(_STACKED)]
    stacked = {name: torch.stack([part.leaves[name].detach() for part in parts]) for name in parts[0].leaves}
    together = _with_leaves(Given(stacked, parts[0].rest))
    dims = (*(0 for _ in stacked), *(None for _ in together.rest))
    outputs, grads = _both(torch.vmap(case.kernel, in_dims=dims), together)
    slopes = _slopes(outputs, 1)
    apart = []
    for index, part in enumerate(parts):
        alone = case.kernel(*part.leaves.values(), *part.rest)
        found = torch.autograd.grad(alone, list(part.leaves.values()), [slope[index] for slope in slopes])
        apart.append((*alone, *found))
    names = [*(f"output {index}" for index in range(len(outputs))), *stacked]
    separate = tuple(torch.stack(list(found)) for found in zip(*apart, strict=True))
    return {"stacked": _STACKED} | _compared(names, (*outputs, *grads), separate, dtype)


def _times(case: Fused, dtype: str, device: torch.device, roofs: Row) -> Row:
    """Return seconds of forward + backward, and the lower bounds by bytes and by FLOPs."""
    given = _drawn(case, dtype, device)
    if _in_place(case, given):
        (leaf,) = given.leaves.values()
        kept, room = leaf.detach(), leaf.detach().clone()
        ours = seconds_of(lambda: case.kernel(room, *given.rest), device, before=lambda: room.copy_(kept))
    else:
        ours = seconds_of(_step(case.kernel, given, dtype), device)
    moved = case.numbers * _DTYPES[dtype].itemsize
    floor = moved / roofs["copy_bytes_per_second"]
    roof = max(floor, case.flops / roofs["product_flops_per_second"])
    return {
        "seconds": ours,
        "bytes": moved,
        "flops": case.flops,
        "floor_seconds": floor,
        "over_floor": ours / floor,
        "roof_seconds": roof,
        "over_roof": ours / roof,
    }


def _peer(case: Fused, dtype: str, device: torch.device, ours: float) -> Row:
    """Return seconds of the plain reference, compiled on a GPU."""
    gpu = device.type == "cuda"
    given = _drawn(case, dtype, device)
    twin = torch.compile(case.twin, dynamic=False) if gpu else case.twin
    try:
        theirs = seconds_of(_step(twin, given, dtype), device)
    finally:
        if gpu:
            torch.compiler.reset()
    name = "plain reference, compiled" if gpu else "plain reference"
    return {"peer": name, "peer_seconds": theirs, "faster": theirs / ours}


def _step(function: Callable[..., tuple[Tensor, ...]], given: Given, dtype: str) -> Callable[[], object]:
    """Return a function that runs forward + backward, under autocast below float32, with precomputed output gradients."""
    leaves = list(given.leaves.values())
    device = leaves[0].device.type
    slopes: list[Tensor] = []

    def step() -> tuple[Tensor, ...]:
        with torch.autocast(device, _DTYPES[dtype], enabled=dtype != "float32", cache_enabled=False):
            outputs = [output for output in function(*leaves, *given.rest) if output.requires_grad]
        if not slopes:
            slopes.extend(_slopes(outputs, 1))
        return torch.autograd.grad(outputs, leaves, slopes)

    return step
