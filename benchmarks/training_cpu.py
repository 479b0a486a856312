"""Compare CPU training with transformers' Llama of the same shape: both eager, then both compiled, interleaved in one process.

    python benchmarks/training_cpu.py [--sizes nano 1m] [--ways eager compiled] [--threads 2] [--rounds 12] [--out FILE]

Prints tokens/s and their ratio, and our step time relative to its own matrix and attention kernels in a profile of the same
process. Every row is written to --out as soon as it is measured; existing rows of the same commit and setting are reused. The
last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from headtohead.bench.clock import mean_seconds
from headtohead.bench.harness import Case, Contender, Rows, silent, take_turns
from headtohead.bench.peers import peer_step
from headtohead.common.errors import UserError
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES, Size
from headtohead.study.environment import device_name
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Trainer

BATCH = {"nano": 64, "1m": 32, "5m": 32}  # sequences: 8,192 tokens per step
WARM = 2
CPU = torch.device("cpu")
KERNELS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")


def our_step(size: Size, batch: int, compiled: bool) -> Callable[[], object]:
    """Return one step of our trainer on `standard`, including data loading, clipping and optimizer."""
    tokens = np.random.default_rng(0).integers(0, size.vocabulary, 400 * size.context, dtype=np.uint8)
    windows = Windows(Split(tokens, np.zeros(1, dtype=np.uint64), len(tokens)), size.context, seed=0)
    model = Decoder(size, parse_layout("standard").layers(size.layers), seed=0)
    settings = TrainSettings(tokens=10**9, batch=batch * size.context)
    return Trainer(model, windows, settings, compile=compiled)._one_step


def over_kernels(step: Callable[[], object], rounds: int = 6) -> float:
    """Return the profiled step time divided by the time of its matrix and attention kernels in the same profile."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        total = rounds * mean_seconds(step, CPU, rounds)
    kernels = sum(
        event.self_cpu_time_total
        for event in found.key_averages()
        if event.key in KERNELS or "scaled_dot_product" in event.key
    )
    return total * 1e6 / kernels


def measure(name: str, compiled: bool, rounds: int) -> dict[str, Any]:
    """Return the comparison at one size, both contenders eager or both compiled."""
    size, batch = SIZES[name], BATCH[name]
    steps = {"headtohead": our_step(size, batch, compiled)}
    steps["transformers"] = peer_step("transformers", size, batch, CPU, bf16=False, compile=compiled)
    # The first step, and later ones one by one: on a shared machine the median of many is steadier than a mean.
    first = {key: mean_seconds(step, CPU) for key, step in steps.items()}
    contenders = [Contender(key, lambda step=step: step) for key, step in steps.items()]  # type: ignore[misc]
    take_turns(contenders, CPU, silent, warm=WARM, burst=1, rounds=rounds)
    if failed := next((one.error for one in contenders if one.error), ""):
        raise RuntimeError(failed)
    times = {one.name: one.times for one in contenders}
    # The median of per-round ratios: other load on the machine affects both sides of a round.
    ratios = [theirs / ours for ours, theirs in zip(times["headtohead"], times["transformers"], strict=True)]
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {
        "tokens_per_second": {key: batch * size.context / value for key, value in medians.items()},
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "step_over_kernels": min(over_kernels(steps["headtohead"]) for _ in range(3)),
        "first_step_seconds": {key: round(value, 2) for key, value in first.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["nano", "1m"], choices=sorted(BATCH))
    parser.add_argument("--ways", nargs="+", default=["eager", "compiled"], choices=("eager", "compiled"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each contender (at least 2)")
    parser.add_argument("--out", help="JSON file for the rows; existing rows are reused")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds {given.rounds}: quartiles need at least 2 rounds")
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    import transformers

    try:
        rows = Rows("training_cpu", given.out, {"transformers": transformers.__version__})
    except UserError as error:
        parser.error(str(error))
    cases = [
        Case(
            {
                "size": name,
                "compiled": way == "compiled",
                "threads": given.threads,
                "tokens_per_step": BATCH[name] * SIZES[name].context,
                "rounds": given.rounds,
                "device": device_name(CPU),
            },
            f"{name}, {way}",
            lambda show, name=name, way=way: measure(name, way == "compiled", given.rounds),  # type: ignore[misc]
        )
        for way in given.ways
        for name in given.sizes
    ]
    document = rows.run(cases, lambda message, share: print(f"{message}: measuring", flush=True))
    for case in cases:
        row = rows.find(case.facts) or {}
        rate = row["tokens_per_second"]
        print(
            f"{case.label}: headtohead {rate['headtohead']:,.0f} tokens/s, transformers "
            f"{rate['transformers']:,.0f}; ratio {row['ratio']:.3f}; step over its own kernels "
            f"{row['step_over_kernels']:.3f}",
            flush=True,
        )
    print(json.dumps(document))


if __name__ == "__main__":
    main()
