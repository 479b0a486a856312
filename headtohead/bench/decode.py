"""One query against a long K=V cache, beside the library's attention with separate keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headtohead.bench.clock import copy_bandwidth, seconds_of
from headtohead.kernels import attend, backend_name, decode, path_name, rotary_table
from headtohead.kernels.decode import decode_plain

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class DecodeCase:
    """One decoding step: sequences, query heads, key heads, cached tokens, width of a head."""

    batch: int
    heads: int
    kv_heads: int
    keys: int
    dim: int


def decode_cases(device: torch.device) -> list[DecodeCase]:
    """Return the settings that are measured: the two that are aimed at, then the first at other contexts.

    Small ones where there is no GPU.
    """
    if device.type == "cuda":
        aimed = [DecodeCase(64, 8, 8, 8192, 64), DecodeCase(32, 16, 4, 32_768, 128)]
        return aimed + [DecodeCase(64, 8, 8, keys, 64) for keys in (1024, 4096, 16_384, 32_768)]
    return [DecodeCase(2, 2, 2, 64, 16), DecodeCase(2, 4, 2, 96, 32), DecodeCase(2, 2, 2, 32, 16)]


def measure_decode(device: torch.device, progress: Progress = lambda words, share: None) -> dict[str, Any]:
    """Return one query's attention on a K=V cache beside the library's with separate keys and values.

    `error` is the relative norm of the difference from the float64 twin, over the first and last sequences.
    """
    bandwidth = copy_bandwidth(device)
    cases = decode_cases(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for place, case in enumerate(cases):
        progress(f"{case.batch} x {case.heads} heads x {case.keys} cached tokens", place / len(cases))
        q = torch.randn(case.batch, case.heads, 1, case.dim, device=device, dtype=dtype)
        kv, v = (
            torch.randn(case.batch, case.kv_heads, case.keys, case.dim, device=device, dtype=dtype)
            for _ in range(2)
        )
        table = rotary_table(torch.arange(case.keys, device=device), case.dim, 10_000.0, torch.float32)
        floor = kv.numel() * kv.element_size() / bandwidth
        with torch.no_grad():
            peer = seconds_of(lambda q=q, kv=kv, v=v: attend(q, kv, v), device)  # type: ignore[misc]
            twice = seconds_of(lambda q=q, kv=kv: attend(q, kv, kv), device)  # type: ignore[misc]
            for turn in ("nothing", "roundtrip", "score"):
                row = {"case": vars(case), "turned": turn, "peer": f"{backend_name(q, kv, v)}, K and V"}
                row |= {"peer_seconds": peer, "peer_same_tensor_seconds": twice, "floor_seconds": floor}
                try:
                    row |= _ours(q, kv, table, turn, device)
                    row |= {"share_of_copy": floor / row["seconds"], "faster": peer / row["seconds"]}
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:300]
                rows.append(row)
    return {"kernels": path_name(device), "copy_bytes_per_second": bandwidth, "rows": rows}


def _ours(q: Tensor, kv: Tensor, table: Tensor, turn: str, device: torch.device) -> dict[str, Any]:
    ours = decode(q, kv, table, turn)
    ends = [0, 1, -2, -1]
    scale = q.shape[-1] ** -0.5
    exact = decode_plain(q[ends].double(), kv[ends].double(), table.double(), turn, scale)
    error = float((ours[ends].double() - exact).norm() / exact.norm())
    return {"seconds": seconds_of(lambda: decode(q, kv, table, turn), device), "error": error}
