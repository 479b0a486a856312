"""What is measured by the clock."""

from __future__ import annotations

from headtohead.bench.train import bench_train

__all__ = ["bench_train"]
