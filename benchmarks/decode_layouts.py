"""Time the layouts of the decoding kernel on a GPU, with K=V and with separate values: milliseconds and share of copy speed.

    python benchmarks/decode_layouts.py --out layouts.json

The query's position is a device tensor, as in a step captured as a CUDA graph. A layout that fails gives a row with the
reason. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch

from headtohead.bench.clock import copy_bandwidth, seconds_of
from headtohead.bench.harness import Row, Rows, attempt
from headtohead.kernels.attention import decode_triton
from headtohead.study.environment import choose_device, device_name

KEYS, WARPS, STAGES, PROGRAMS = (32, 64, 128), (2, 4), (2, 3, 4), (4, 8)


def main() -> None:
    """Measure every layout at one shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=int, nargs=4, default=(64, 16, 8192, 64), metavar="N")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = choose_device("auto")
    if device.type != "cuda":
        parser.error("this benchmark needs a GPU; none was found")
    batch, heads, keys, dim = arguments.shape
    bandwidth = copy_bandwidth(device)
    q = torch.randn(batch, heads, dim, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads, keys, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    position = torch.tensor([keys - 40], device=device)

    def timed(config: decode_triton.Config, apart: bool) -> Row:
        read = (1 + apart) * batch * heads * (keys - 39) * dim * 2
        values = v if apart else None
        seconds = seconds_of(
            lambda: decode_triton.decode(q, k, None, 0, dim**-0.5, config, values=values, place=position),
            device,
        )
        return {"milliseconds": 1e3 * seconds, "share_of_copy": read / seconds / bandwidth}

    where = {"device": device_name(device), "shape": list(arguments.shape)}
    rows = Rows("decode layouts", arguments.out, where | {"copy_bytes_per_second": bandwidth})
    for apart in (False, True):
        for layout in itertools.product(KEYS, WARPS, STAGES, PROGRAMS):
            facts: Row = dict(zip(("keys", "warps", "stages", "programs"), layout, strict=True))
            found = attempt(timed, decode_triton.Config(*layout), apart, name="error")
            rows.add(facts | {"apart": apart} | where, found)
        best = [row for row in rows.rows if row["apart"] == apart and "error" not in row]
        for row in sorted(best, key=lambda row: float(row["milliseconds"]))[:8]:
            print(json.dumps(row), flush=True)
    print(json.dumps(rows.document()))


if __name__ == "__main__":
    main()
