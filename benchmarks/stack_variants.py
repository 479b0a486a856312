"""Measure the effect of each design choice in the compiled population step: the step with one of them changed.

    python benchmarks/stack_variants.py [--seeds 5] [--size 1m] [--batch 8192] [--only undivided ...] [--device cuda] [--out FILE]

Every variant is compiled separately (half a minute each on a GPU) and timed interleaved with the others; a variant that fails
gives the reason. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
from torch import Tensor
from torch.fx import GraphModule

from headtohead.bench.harness import Contender, take_turns
from headtohead.bench.population import BURST, WARM, Setup
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


def build(setup: Setup, seeds: int, name: str, warnings: list[str]) -> Callable[[], object]:
    """Return the step of a variant after its warm-up steps."""
    population = setup.stack(seeds, True, warnings.append)
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
    return step


def show(message: str, share: float) -> None:
    """Print the progress."""
    print(f"{message} ({share:.0%})", flush=True)


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
    setup = Setup(given.size, given.arm, given.batch, precision, str(where))
    document: dict[str, Any] = {"benchmark": "stack variants", **provenance(), "device": device_name(where)}
    document |= {"size": given.size, "arm": given.arm, "seeds": given.seeds, "batch": given.batch, "rows": {}}
    warnings: dict[str, list[str]] = {name: [] for name in given.only}
    contenders = [
        Contender(name, partial(build, setup, given.seeds, name, warnings[name])) for name in given.only
    ]
    take_turns(contenders, where, show, warm=0, burst=BURST, rounds=5)
    rows: dict[str, Any] = document["rows"]
    for one in contenders:
        if one.error:
            rows[one.name] = {"error": one.error}
            print(f"{one.name}: {one.error}", flush=True)
            continue
        seconds, profile = statistics.median(one.times), kernel_times(one.step, where)
        rows[one.name] = {"start_seconds": one.start_seconds, "warnings": warnings[one.name]}
        rows[one.name] |= {"milliseconds": 1e3 * seconds, "profile": profile}
        rate = given.seeds * given.batch / seconds
        kinds = ", ".join(f"{kind} {spent:.2f}" for kind, spent in profile["kinds"].items())
        print(f"{one.name}: {1e3 * seconds:.3f} ms, {rate / 1e6:.2f} M tokens/s; {kinds}", flush=True)
    if given.out is not None:
        write_json(given.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
