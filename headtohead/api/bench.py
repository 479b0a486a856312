"""Benchmarks as documents: what was measured, with provenance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headtohead.bench.growth import bench_growth
from headtohead.bench.kernels import measure_decode, measure_kernels
from headtohead.bench.stack import bench_stack
from headtohead.bench.train import bench_train
from headtohead.common.progress import piece_of_work
from headtohead.study.environment import choose_device, device_name, provenance

__all__ = ["bench_decode", "bench_growth", "bench_kernels", "bench_stack", "bench_train", "draw_growth"]


def bench_kernels(*, device: str = "auto", quiet: bool = False) -> dict[str, Any]:
    """Return the fused coupling beside its plain twin and the byte floor, from one process; small sizes on CPU."""
    return _document("kernels", measure_kernels, device, quiet)


def bench_decode(*, device: str = "auto", quiet: bool = False) -> dict[str, Any]:
    """Return decoding from a K=V cache beside the library's attention, from one process; small sizes on CPU."""
    return _document("decode", measure_decode, device, quiet)


def draw_growth(rows: Sequence[dict[str, Any]], path: str | Path) -> Path:
    """Draw time per token against context, from the rows of `bench_growth`, into a PNG or SVG file; return it."""
    from headtohead.report.growth import write_growth  # charts are no part of measuring

    return write_growth(rows, Path(path))


def _document(name: str, measure: Callable[..., dict[str, Any]], device: str, quiet: bool) -> dict[str, Any]:
    place = choose_device(device)
    with piece_of_work(f"measuring {name}", quiet) as progress:
        found = measure(place, progress)
    return {"benchmark": name, **provenance(), "device": device_name(place), **found}
