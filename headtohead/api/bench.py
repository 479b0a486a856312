"""Benchmarks as documents: what was measured, with provenance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headtohead.bench.decode import measure_decode
from headtohead.bench.generate import bench_generate
from headtohead.bench.growth import bench_growth
from headtohead.bench.kernels import measure_kernels
from headtohead.bench.population import bench_stack
from headtohead.bench.train import bench_train
from headtohead.common.progress import progress_bar
from headtohead.study.environment import choose_device

__all__ = [
    "bench_decode",
    "bench_generate",
    "bench_growth",
    "bench_kernels",
    "bench_stack",
    "bench_train",
    "check_growth_picture",
    "draw_growth",
]


def bench_kernels(
    *, device: str = "auto", out: str | Path | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Return every fused kernel beside its plain twin, the byte floor and float64; small sizes on CPU.

    `out` keeps every row as soon as it is measured; rows of this commit and device that stand there are kept.
    """
    place = choose_device(device)
    with progress_bar("measuring kernels", quiet) as progress:
        return measure_kernels(place, out, progress)


def bench_decode(
    *, device: str = "auto", out: str | Path | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Return decoding from a K=V cache beside the library's attention, from one process; small sizes on CPU.

    `out` keeps every row as soon as it is measured; rows of this commit and device that stand there are kept.
    """
    place = choose_device(device)
    with progress_bar("measuring decode", quiet) as progress:
        return measure_decode(place, out, progress)


def check_growth_picture(path: str | Path) -> None:
    """Refuse a file that `draw_growth` could not draw into, before anything is measured for it."""
    from headtohead.report.growth import check_picture

    check_picture(Path(path))


def draw_growth(rows: Sequence[dict[str, Any]], path: str | Path) -> Path:
    """Draw time per token against context, from the rows of `bench_growth`, into a PNG or SVG file; return it."""
    from headtohead.report.growth import write_growth  # charts are no part of measuring

    return write_growth(rows, Path(path))
