"""Measure the effect of each design choice in the compiled population step: the step with one of them changed.

    python benchmarks/stack_variants.py [--seeds 5] [--size 1m] [--batch 8192] [--only undivided ...] [--device cuda] [--out FILE]

Every variant is compiled separately (half a minute each on a GPU) and timed interleaved with the others; a variant that fails
gives the reason. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
from torch import Tensor
from torch.fx import GraphModule

from headtohead.bench.population import BURST, WARM, Case
from headtohead.bench.profile import kernel_times
from headtohead.common.files import write_json
from headtohead.study.environment import choose_device, device_name, provenance
from headtohead.training.compiled_step import inductor

NO = lambda *given: False  # noqa: E731
PATCHES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "undivided": {"headtohead.training.compiled_step.divide": lambda graph, processors: 0},
    "norms as kernels": {"headtohead.kernels.pointwise.norm.is_compiling": NO},
    "gate and rotation left to the compiler": {
        "headtohead.kernels.pointwise.feedforward.triton_serves": NO,
        "headtohead.kernels.pointwise.rotary.triton_serves": NO,
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "small kernels joined": {"combo_kernels": True},
    "tuned": {"coordinate_descent_tuning": True},
    "products chosen by trial": {"max_autotune_gemm": True},
}


def build(case: Case, seeds: int, name: str, warnings: list[str]) -> Callable[[], object]:
    """Return the step of a variant after its warm-up steps."""
    population = case.stack(seeds, True, warnings.append)
    if name in OPTIONS and population._compiled is not None:

        def backend(graph: GraphModule, given: list[Tensor]) -> Any:
            with torch._inductor.config.patch(OPTIONS[name]):
                return inductor(graph, given)

        population._compiled.backend = backend

    def step() -> None:
        population.one_step()
        population.first.step += 1

    with ExitStack() as patches:
        for target, value in PATCHES.get(name, {}).items():
            patches.enter_context(patch(target, value))
        for _ in range(WARM):
            step()
    case.wait()
    return step


def main() -> None:
    """Build, time and print the variants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*PATCHES, *OPTIONS]
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--size", default="1m")
    parser.add_argument("--arm", default="standard")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    where = choose_device(given.device)
    precision = "bf16" if where.type == "cuda" else "float32"
    case = Case(given.size, given.arm, given.batch, precision, str(where))
    document: dict[str, Any] = {"benchmark": "stack variants", **provenance(), "device": device_name(where)}
    document |= {"size": given.size, "arm": given.arm, "seeds": given.seeds, "batch": given.batch, "rows": {}}
    rows, steps = document["rows"], {}
    for name in given.only:
        began, warnings = time.perf_counter(), []
        try:
            steps[name] = build(case, given.seeds, name, warnings)
            rows[name] = {"start_seconds": round(time.perf_counter() - began, 1), "warnings": warnings}
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(name, rows[name], flush=True)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(5):
        for name, step in steps.items():
            case.wait()
            began = time.perf_counter()
            for _ in range(BURST):
                step()
            case.wait()
            times[name].append((time.perf_counter() - began) / BURST)
    for name, found in times.items():
        seconds = statistics.median(found)
        rows[name] |= {"milliseconds": 1e3 * seconds, "profile": kernel_times(steps[name], where)}
        rate = given.seeds * given.batch / seconds
        kinds = ", ".join(f"{kind} {spent:.2f}" for kind, spent in rows[name]["profile"]["kinds"].items())
        print(f"{name}: {1e3 * seconds:.3f} ms, {rate / 1e6:.2f} M tokens/s; {kinds}", flush=True)
        if given.out is not None:
            write_json(given.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
