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
from typing import Any

import torch

from headtohead.bench.clock import copy_bandwidth, seconds_of
from headtohead.common.files import write_json
from headtohead.kernels.attention import decode_triton
from headtohead.study.environment import choose_device, device_name, provenance

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
    rows: list[dict[str, Any]] = []
    for apart in (False, True):
        read = (1 + apart) * batch * heads * (keys - 39) * dim * 2
        for layout in itertools.product(KEYS, WARPS, STAGES, PROGRAMS):
            row: dict[str, Any] = dict(zip(("keys", "warps", "stages", "programs"), layout, strict=True))
            row["apart"] = apart
            config = decode_triton.Config(*layout)
            values = v if apart else None
            try:
                seconds = seconds_of(
                    lambda config=config, values=values: decode_triton.decode(  # type: ignore[misc]
                        q, k, None, 0, dim**-0.5, config, values=values, place=position
                    ),
                    device,
                )
                row |= {"milliseconds": 1e3 * seconds, "share_of_copy": read / seconds / bandwidth}
            except Exception as error:
                row["error"] = (
                    str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                )
            rows.append(row)
        best = sorted(
            (row for row in rows if row["apart"] == apart and "error" not in row), key=_milliseconds
        )
        for row in best[:8]:
            print(json.dumps(row), flush=True)
    document = {"benchmark": "decode layouts", **provenance(), "device": device_name(device)}
    document |= {"shape": list(arguments.shape), "copy_bytes_per_second": bandwidth, "rows": rows}
    if arguments.out is not None:
        write_json(arguments.out, document)
    print(json.dumps(document))


def _milliseconds(row: dict[str, Any]) -> float:
    return float(row["milliseconds"])


if __name__ == "__main__":
    main()
