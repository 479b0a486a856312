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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from headtohead.bench.harness import Contender, Step, silent, take_turns
from headtohead.bench.peers import peer_step
from headtohead.bench.train import find_shape
from headtohead.common.files import write_json
from headtohead.model.sizes import Size
from headtohead.study.environment import device_name, provenance

SETTINGS: dict[str, dict[str, Any]] = {
    "documented": {"attention": "sdpa"},
    "causal": {"attention": "causal"},
}
WARM, BURST = 5, 10


def start(size: Size, batch: int, device: torch.device, settings: dict[str, Any]) -> Step:
    """Return the compiled step of one setting."""
    torch._dynamo.reset()
    return peer_step("transformers", size, batch, device, True, True, **settings)


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
        "peer": {"transformers": metadata.version("transformers")},
        "tokens_per_step": given.batch,
        "rows": [],
    }
    for name in given.sizes:
        size = find_shape(name)
        contenders = [
            Contender(label, partial(start, size, given.batch // size.context, device, settings))
            for label, settings in SETTINGS.items()
        ]
        take_turns(contenders, device, silent, warm=WARM, burst=BURST, rounds=given.rounds)
        for one in contenders:
            row: dict[str, Any] = {"size": name, "setting": one.name}
            times = [1e3 * seconds for seconds in one.times]
            if one.error:
                row["failed"] = one.error
            else:
                row |= {"milliseconds": statistics.median(times), "all": times}
            document["rows"].append(row)
            print(f"{name} {one.name}: {one.error or '{milliseconds:.1f} ms'.format(**row)}", flush=True)
            one.end()
        if given.out:
            write_json(given.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
