"""Find the settings that make a peer's training step fastest: transformers' Llama, all settings interleaved in one process.

    python benchmarks/peer_settings.py [--sizes 51m 124m] [--batch 32768] [--rounds 4] [--out FILE]

documented: `torch.compile(model)` with `attn_implementation="sdpa"`. Under `torch.compile` transformers builds the causal
mask as a tensor, and PyTorch's SDPA then falls back from its flash kernel. causal: an attention function registered through
transformers' own interface, which sets `is_causal` instead of a mask.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headtohead.bench.peers import peer_step, version
from headtohead.bench.train import find_shape
from headtohead.common.files import write_json
from headtohead.study.environment import device_name, provenance

SETTINGS: dict[str, dict[str, Any]] = {
    "documented": {"attention": "sdpa"},
    "causal": {"attention": "causal"},
}
WARM, BURST = 5, 10


def timed(step: Callable[[], object]) -> float:
    """Return the mean seconds per step over a burst."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(BURST):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / BURST


def main() -> None:
    """Measure every size and setting; print and write the rows."""
    parser = argparse.ArgumentParser(description="find a peer's fastest settings")
    parser.add_argument("--sizes", nargs="+", default=["51m", "124m"])
    parser.add_argument("--batch", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda")
    document: dict[str, Any] = {
        "benchmark": "peer settings",
        **provenance(),
        "device": device_name(device),
        "peer": {"transformers": version("transformers")},
        "tokens_per_step": given.batch,
        "rows": [],
    }
    for name in given.sizes:
        size = find_shape(name)
        steps = {}
        for label, settings in SETTINGS.items():
            torch._dynamo.reset()
            try:
                step = peer_step(
                    "transformers", size, given.batch // size.context, device, True, True, **settings
                )
                for _ in range(WARM):
                    step()
            except Exception as error:
                document["rows"].append({"size": name, "setting": label, "failed": str(error)[:300]})
                continue
            steps[label] = step
        times: dict[str, list[float]] = {label: [] for label in steps}
        for _ in range(given.rounds):
            for label, step in steps.items():
                times[label].append(1000 * timed(step))
        for label, found in times.items():
            row = {"size": name, "setting": label, "milliseconds": statistics.median(found), "all": found}
            document["rows"].append(row)
            print(f"{name} {label}: {row['milliseconds']:.1f} ms", flush=True)
        if given.out:
            write_json(given.out, document)
        del steps
        torch.cuda.empty_cache()
    print(json.dumps(document))


if __name__ == "__main__":
    main()
