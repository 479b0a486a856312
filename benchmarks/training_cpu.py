"""Training on CPU beside transformers' Llama of the same shape, both eager, interleaved in one process.

    python benchmarks/training_cpu.py [--sizes nano 1m] [--threads 1] [--rounds 20]

Prints tokens/s and their ratio, and how much longer our step takes than its own matrix and attention kernels take in
a profile of the same process. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from headtohead.bench.peers import peer_step
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES, Size
from headtohead.study.environment import provenance
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Trainer

BATCH = {"nano": 64, "1m": 32, "5m": 32}  # sequences: 8,192 tokens per step
KERNELS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")


def our_step(size: Size, batch: int) -> Callable[[], object]:
    """Return one step of our trainer, data loading, clipping and optimiser included, on `standard`."""
    tokens = np.random.default_rng(0).integers(0, size.vocabulary, 400 * size.context, dtype=np.uint8)
    windows = Windows(Split(tokens, np.zeros(1, dtype=np.uint64), len(tokens)), size.context, seed=0)
    model = Decoder(size, parse_layout("standard").layers(size.layers), seed=0)
    settings = TrainSettings(tokens=10**9, batch=batch * size.context)
    return Trainer(model, windows, settings)._one_step


def seconds(step: Callable[[], object]) -> float:
    """Return how long one step takes."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def over_kernels(step: Callable[[], object], rounds: int = 6) -> float:
    """Return profiled step time over the time its matrix and attention kernels take in the same profile."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        total = sum(seconds(step) for _ in range(rounds))
    kernels = sum(
        event.self_cpu_time_total
        for event in found.key_averages()
        if event.key in KERNELS or "scaled_dot_product" in event.key
    )
    return total * 1e6 / kernels


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the comparison at one size."""
    size, batch = SIZES[name], BATCH[name]
    theirs = peer_step("transformers", size, batch, torch.device("cpu"), bf16=False, compile=False)
    steps = {"headtohead": our_step(size, batch), "transformers": theirs}
    times: dict[str, list[float]] = {key: [] for key in steps}
    for turn in range(rounds + 3):
        for key, step in steps.items():
            took = seconds(step)
            if turn >= 3:
                times[key].append(took)
    # The ratio of each round, then its median: what disturbs the machine disturbs both sides of a round.
    ratios = [theirs / ours for ours, theirs in zip(times["headtohead"], times["transformers"], strict=True)]
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {
        "size": name,
        "tokens_per_step": batch * size.context,
        "tokens_per_second": {key: batch * size.context / value for key, value in medians.items()},
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "step_over_kernels": min(over_kernels(steps["headtohead"]) for _ in range(3)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["nano", "1m"], choices=sorted(BATCH))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    import transformers

    rows = []
    for name in given.sizes:
        row = measure(name, given.rounds)
        rows.append(row)
        rate = row["tokens_per_second"]
        print(
            f"{name}: headtohead {rate['headtohead']:,.0f} tokens/s, transformers {rate['transformers']:,.0f}; "
            f"ratio {row['ratio']:.3f}; step over its own kernels {row['step_over_kernels']:.3f}",
            flush=True,
        )
    versions = provenance() | {"transformers": transformers.__version__}
    print(json.dumps({"benchmark": "training_cpu", **versions, "threads": given.threads, "rows": rows}))


if __name__ == "__main__":
    main()
