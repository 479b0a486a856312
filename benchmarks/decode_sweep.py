"""Time the layouts of the kernels that decode with keys rotated in the score, at the two target shapes.

    python benchmarks/decode_sweep.py --out sweep.json                   # a GPU: bf16, about 90 seconds
    TRITON_INTERPRET=1 python benchmarks/decode_sweep.py --out sweep.json    # CPU: tiny shapes, a smoke test

Every layout gives a row: milliseconds (medians of calls replayed as one CUDA graph), share of the copy bandwidth, speed-up
over the library's attention with separate K and V, relative error against float64, registers and spilled bytes per thread.
A layout that fails, or for which --seconds leaves no time, gives a row with the reason. The fastest of each shape are printed
as lines for `CONFIGS` in headtohead/kernels/attention/decode_triton.py. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtohead.bench.clock import copy_bandwidth, seconds_of
from headtohead.bench.decode import DecodeCase, decode_cases
from headtohead.bench.harness import attempt, in_a_line
from headtohead.common.files import finite, write_json
from headtohead.kernels import attend, backend_name, rotary_table
from headtohead.kernels.attention.decode import ROPE_MODES, decode_plain
from headtohead.kernels.attention.decode_rope_triton import Sums, products, sums
from headtohead.kernels.attention.decode_triton import CONFIGS, Config, decode
from headtohead.study.environment import device_name, provenance

# The numbers of programs fill the GPU once or nearly twice: by registers, a multiprocessor of an H200 fits 16 one-warp
# programs of 128 registers, 12 of 168, or 2 four-warp ones of 255.
ALONE: list[Config | Sums] = [
    *(Sums(8, 1, False, programs) for programs in (15, 31, 20, 46)),
    *(Sums(8, 1, True, programs) for programs in (11, 23, 35)),
    *(Sums(4, 1, ahead, programs) for ahead in (False, True) for programs in (15, 31)),
    *(Sums(16, 1, False, programs) for programs in (7, 15)),
    *(Sums(8, 2, False, programs) for programs in (7, 15)),
    *(Sums(8, 4, False, programs) for programs in (3, 7, 15)),
    Sums(4, 4, True, 7),
    Sums(8, 1, False, 19, 96),
    *(Config(64, 2, stages, programs) for stages, programs in ((4, 3), (4, 7), (3, 7))),
    Config(32, 2, 4, 7, 128),
]
SHARED: list[Config | Sums] = [
    *(Config(64, 4, stages, programs) for stages in (3, 4, 5) for programs in (1, 3)),
    *(Config(64, 4, stages, 7) for stages in (2, 4)),
    *(Config(64, 4, 3, programs, 168) for programs in (2, 5)),
    *(Config(32, 4, stages, programs, 168) for stages, programs in ((4, 2), (4, 5), (6, 2), (6, 5))),
    *(Config(32, 4, 4, programs) for programs in (1, 3)),
    *(Config(32, 2, 4, programs) for programs in (3, 7)),
    Config(32, 2, 6, 3),
    Config(128, 8, 3, 1),
]


class Compiled:
    """The compiler's statistics of each layout's kernel; empty where Triton reports none."""

    def __init__(self) -> None:
        self.known: dict[Config | Sums, dict[str, Any]] = {}

    def facts(self, config: Config | Sums, kernels: int) -> dict[str, Any]:
        """Return registers and spilled bytes per thread; `kernels` is the number of compiled kernels before the call."""
        key = dataclasses.replace(config, programs=0)
        try:
            made = list(self.made(config))
            if len(made) > kernels:
                last = made[-1]
                facts = {"registers": last.n_regs, "spilled": last.n_spills}
                self.known[key] = facts | {"shared_bytes": last.metadata.shared}
        except Exception as failure:
            return {"compiler": f"{type(failure).__name__}: {failure}"[:200]}
        return self.known.get(key, {})

    def made(self, config: Config | Sums) -> list[Any]:
        """Return the kernels compiled so far, newest last."""
        kernel = sums if isinstance(config, Sums) else products
        if not torch.cuda.is_available():
            return []
        return list(kernel.device_caches[torch.cuda.current_device()][0].values())


class Measured:
    """One shape: its tensors, the library's time, and the float64 reference output for its first sequences."""

    def __init__(self, case: DecodeCase, device: torch.device, bandwidth: float) -> None:
        self.case, self.device, self.compiled = case, device, Compiled()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.q = torch.randn(case.batch, case.heads, 1, case.dim, device=device, dtype=dtype)
        self.kv, v = (
            torch.randn(case.batch, case.kv_heads, case.keys, case.dim, device=device, dtype=dtype)
            for _ in range(2)
        )
        positions = torch.arange(case.keys, device=device)
        self.table = rotary_table(positions, case.dim, 10_000.0, torch.float32)
        self.scale = case.dim**-0.5
        self.floor = self.kv.numel() * self.kv.element_size() / bandwidth
        self.peer = f"{backend_name(self.q, self.kv, v)}, K and V"
        self.peer_seconds = seconds_of(lambda: attend(self.q, self.kv, v), device)
        exact = rotary_table(positions, case.dim, 10_000.0, torch.float64)
        self.truth = decode_plain(
            self.q[:2].double(), self.kv[:2].double(), exact, "score", self.scale
        ).squeeze(2)

    def call(self, config: Config | Sums, rope_mode: int = 1) -> Tensor:
        """Return the output (batch, heads, dim) of the kernel in this layout."""
        return decode(self.q.squeeze(2), self.kv, self.table, rope_mode, self.scale, config)

    def row(self, config: Config | Sums, rope_mode: int = 1) -> dict[str, Any]:
        """Return the layout's times and error, or the reason it failed."""
        facts: dict[str, Any] = {
            "case": vars(self.case),
            "turned": ROPE_MODES[rope_mode],
            "config": repr(config),
        }
        return facts | attempt(self._timed, config, rope_mode)

    def _timed(self, config: Config | Sums, rope_mode: int) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if rope_mode == 1:
            before = len(self.compiled.made(config))
            output = self.call(config)[:2].double()
            facts["error"] = ((output - self.truth).norm() / self.truth.norm()).item()
            facts |= self.compiled.facts(config, before)
        seconds = seconds_of(lambda: self.call(config, rope_mode), self.device)
        times = {"seconds": seconds, "floor_seconds": self.floor, "share_of_copy": self.floor / seconds}
        peer = {"peer": self.peer, "peer_seconds": self.peer_seconds, "faster": self.peer_seconds / seconds}
        return facts | times | peer


def line(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    if "seconds" not in row:
        return f"{row['config']}: {row['failed']}"
    chip = f"{row.get('registers', '?')} registers, {row.get('spilled', '?')} spilled"
    error = f"error {row['error']:.1e}  {chip}" if "error" in row else f"rotation: {row['turned']}"
    times = f"{row['seconds'] * 1e3:.4f} ms  {row['share_of_copy']:.0%} of copy  {row['faster']:.2f}x"
    return f"{times}  {error}  {row['config']}"


def sweep(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the document; it is rewritten after every row."""
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(device)
    document = {"benchmark": "decode_sweep", **provenance(), "device": device_name(device)}
    rows: list[dict[str, Any]] = []
    document |= {"copy_bytes_per_second": bandwidth, "rows": rows}
    cases = decode_cases(device)[:2]
    # Each shape gets an equal share of the time: a slow compiler must not leave the second without rows.
    for index, case in enumerate(cases):
        layouts = ALONE if case.heads == case.kv_heads else SHARED
        layouts = layouts if device.type == "cuda" else layouts[:: len(layouts) // 3]
        ends = given.started + given.seconds * (index + 1) / len(cases)
        try:
            measured = Measured(case, device, bandwidth)
        except Exception as failure:
            rows.append({"case": vars(case), "config": "all", "failed": in_a_line(failure)})
            continue
        print(f"{case}: {measured.peer} {measured.peer_seconds * 1e3:.4f} ms", flush=True)
        for rope_mode, config in [(0, CONFIGS[False, False]), *((1, layout) for layout in layouts)]:
            late = {"case": vars(case), "config": repr(config), "failed": "no time left"}
            rows.append(measured.row(config, rope_mode) if time.monotonic() < ends else late)
            print(line(rows[-1]), flush=True)
            write_json(given.out, finite(document))
        del measured
    return document


def main() -> None:
    """Measure, print the fastest, and one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file, rewritten after every row")
    parser.add_argument("--seconds", type=float, default=100.0, help="start no layout after this time")
    given = parser.parse_args()
    given.started = time.monotonic()
    document = sweep(given, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for case in decode_cases(torch.device("cuda" if torch.cuda.is_available() else "cpu"))[:2]:
        timed = [
            row
            for row in document["rows"]
            if row["case"] == vars(case) and "error" in row and "seconds" in row
        ]
        for row in sorted(timed, key=lambda row: row["seconds"])[:1]:
            print(f"(True, {case.heads == case.kv_heads}): {row['config']},  # {row['seconds'] * 1e3:.4f} ms")
    print(json.dumps(finite(document)))


if __name__ == "__main__":
    main()
