"""Measure training throughput over rows and sizes: a population beside single runs, compiled and not, in one process.

    python benchmarks/rows.py [--sizes 1m 5m 10m 60m] [--rows 2 4 8 16] [--rounds 3] [--out FILE]

Each row has the batch that the size has by default; bf16, CUDA graphs on a GPU. Single runs of size 5m and larger are
compiled by default, so a population pays where it is faster than both single runs. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from headtohead.bench.harness import Contender, silent, take_turns
from headtohead.bench.population import Setup
from headtohead.common.files import write_json
from headtohead.model.sizes import SIZES
from headtohead.study.environment import choose_device, device_name, provenance
from headtohead.training.settings import defaults_of


def measure(size: str, counts: list[int], rounds: int, device: torch.device) -> dict[str, object]:
    """Return the tokens per second of single runs and of populations, and the peak memory of each."""
    setup = Setup(size, "standard", defaults_of(SIZES[size])["batch"], "bf16", str(device))
    found: dict[str, object] = {"size": size, "tokens_per_step": setup.batch}
    cases = {"single": (1, lambda: setup.single(0)), "single, compiled": (1, lambda: setup.single(0, True))}
    cases |= {f"{count} rows": (count, lambda count=count: setup.stacked(count)) for count in counts}
    for name, (count, make) in cases.items():
        torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
        contender = Contender(name, make)
        timed = take_turns([contender], device, silent, warm=6, burst=10, rounds=rounds)
        if timed:
            rate = statistics.median(count * setup.batch / seconds for seconds in timed[0].times)
            peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
            found[name] = {"tokens_per_second": round(rate), "peak_bytes": peak}
        else:
            found[name] = {"error": contender.error}
        contender.end()
        print(size, name, found[name], flush=True)
    return found


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["1m", "5m", "10m", "60m"])
    parser.add_argument("--rows", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = choose_device(given.device)
    document = {"benchmark": "rows", **provenance(), "device": device_name(device), "rows": []}
    for size in given.sizes:
        document["rows"].append(measure(size, given.rows, given.rounds, device))
        if given.out:
            write_json(given.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
