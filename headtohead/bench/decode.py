"""Benchmark of one query against a long K=V cache, compared with SDPA on separate keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch

from headtohead.bench.clock import copy_bandwidth, seconds_of
from headtohead.bench.harness import Case, Progress, Row, Rows, attempt
from headtohead.common.progress import progress_bar
from headtohead.kernels import attend, backend_name, decode, path_name, rotary_table
from headtohead.kernels.attention.decode import decode_plain
from headtohead.study.environment import choose_device, device_name

_TURNED = ("nothing", "roundtrip", "score")


@dataclass(frozen=True)
class DecodeCase:
    """Shape of one decoding step; `keys` is the number of cached tokens, `dim` the head width."""

    batch: int
    heads: int
    kv_heads: int
    keys: int
    dim: int


def decode_cases(device: torch.device) -> list[DecodeCase]:
    """Return the measured cases: the two with a target, then the first at other contexts; small shapes on CPU."""
    if device.type == "cuda":
        aimed = [DecodeCase(64, 8, 8, 8192, 64), DecodeCase(32, 16, 4, 32_768, 128)]
        return aimed + [DecodeCase(64, 8, 8, keys, 64) for keys in (1024, 4096, 16_384, 32_768)]
    return [DecodeCase(2, 2, 2, 64, 16), DecodeCase(2, 4, 2, 96, 32), DecodeCase(2, 2, 2, 32, 16)]


def bench_decode(*, device: str = "auto", out: str | Path | None = None, quiet: bool = False) -> Row:
    """Return the time of decoding from a K=V cache and of SDPA with separate keys and values; small shapes on CPU.

    `error` is the relative norm of the difference from the float64 reference, over the first and last sequences. A failed
    row holds the reason. `out` stores each row as soon as it is measured; rows stored for this commit and device are
    reused.
    """
    chosen = choose_device(device)
    bandwidth, where = copy_bandwidth(chosen), {"device": device_name(chosen)}
    rows = Rows("decode", out, where | {"kernels": path_name(chosen), "copy_bytes_per_second": bandwidth})

    @lru_cache(maxsize=1)  # the tensors of one case fill gigabytes
    def prepared(case: DecodeCase) -> tuple[_Step, Row]:
        step = _Step(case, chosen)
        return step, attempt(step.peers, name="peer_failed")

    @torch.no_grad()
    def measure(case: DecodeCase, turn: str, show: Progress) -> Row:
        step, peers = prepared(case)
        found = {"floor_seconds": step.bytes / bandwidth} | peers | attempt(step.ours, turn)
        if "seconds" in found:
            found["share_of_copy"] = found["floor_seconds"] / found["seconds"]
        if "seconds" in found and "peer_seconds" in found:
            found["faster"] = found["peer_seconds"] / found["seconds"]
        return found

    cases = [
        Case(
            {"case": vars(case), "turned": turn, **where},
            f"{case.batch} x {case.heads} heads x {case.keys} cached tokens, turned: {turn}",
            partial(measure, case, turn),
        )
        for case in decode_cases(chosen)
        for turn in _TURNED
    ]
    with progress_bar("measuring decode", quiet) as progress:
        return rows.run(cases, progress)


class _Step:
    """One decoding step of a case, on random tensors."""

    def __init__(self, case: DecodeCase, device: torch.device) -> None:
        self.device = device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.q = torch.randn(case.batch, case.heads, 1, case.dim, device=device, dtype=dtype)
        self.kv, self.v = (
            torch.randn(case.batch, case.kv_heads, case.keys, case.dim, device=device, dtype=dtype)
            for _ in range(2)
        )
        self.table = rotary_table(torch.arange(case.keys, device=device), case.dim, 10_000.0, torch.float32)
        self.bytes = self.kv.numel() * self.kv.element_size()

    def peers(self) -> Row:
        """Return the times of SDPA with separate keys and values, and with one tensor as both."""
        q, kv, v = self.q, self.kv, self.v
        return {
            "peer": f"{backend_name(q, kv, v)}, K and V",
            "peer_seconds": seconds_of(lambda: attend(q, kv, v), self.device),
            "peer_same_tensor_seconds": seconds_of(lambda: attend(q, kv, kv), self.device),
        }

    def ours(self, turn: str) -> Row:
        """Return the time and error of the K=V kernel."""
        q, kv, table = self.q, self.kv, self.table
        ours = decode(q, kv, table, turn)
        ends = [0, 1, -2, -1]
        exact = decode_plain(q[ends].double(), kv[ends].double(), table.double(), turn, q.shape[-1] ** -0.5)
        error = float((ours[ends].double() - exact).norm() / exact.norm())
        return {"seconds": seconds_of(lambda: decode(q, kv, table, turn), self.device), "error": error}
