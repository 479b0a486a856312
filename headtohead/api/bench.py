"""Benchmarks; each returns its measurements and their provenance as one JSON-ready dict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headtohead.api.bench_study import bench_study
from headtohead.bench.decode import bench_decode
from headtohead.bench.generate import bench_generate
from headtohead.bench.growth import bench_growth
from headtohead.bench.kernels import bench_kernels
from headtohead.bench.population import bench_population
from headtohead.bench.train import bench_train

__all__ = [
    "bench_decode",
    "bench_generate",
    "bench_growth",
    "bench_kernels",
    "bench_population",
    "bench_study",
    "bench_train",
    "check_growth_picture",
    "draw_growth",
]


def check_growth_picture(path: str | Path) -> None:
    """Raise before any measurement if `draw_growth` cannot write to this path."""
    from headtohead.report.growth import check_picture

    check_picture(Path(path))


def draw_growth(rows: Sequence[dict[str, Any]], path: str | Path) -> Path:
    """Plot time per token against context from the rows of `bench_growth` as PNG or SVG; return the path."""
    from headtohead.report.growth import write_growth  # benchmarks run without the chart library

    return write_growth(rows, Path(path))
