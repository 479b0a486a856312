"""Synthetic runs and results of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headtohead.model.sizes import SIZES
from headtohead.study.store.result import Best, RunResult, score_of
from headtohead.study.store.run_spec import DataSource, RunSpec
from headtohead.study.store.run_store import Store
from headtohead.training.settings import TrainSettings


def stored(folder: Path, *names: str) -> dict[str, bytes]:
    """Return these files of every run of a study, by default results and weights, bit for bit."""
    return {
        f"{run.id}/{name}": (run.path / name).read_bytes()
        for run in Store(folder).runs()
        for name in names or ("result.json", "checkpoint/final.safetensors")
    }


def run_spec(arm: str = "standard", **changes: Any) -> RunSpec:
    """Return a run with these fields changed."""
    facts: dict[str, Any] = {
        "layers": (arm, arm),
        "corpus": DataSource("c", "c@1", "bytes", "0"),
        "size": SIZES["nano"],
        "training": TrainSettings(tokens=1000, batch=10),
        "seed": 1,
        "shape": "as_is",
        "length": "tokens",
        "parameters": 100,
        "flops_per_token": 2000.0,
        "cache_bytes_per_token": None,
    }
    return RunSpec(arm, arm, **facts | changes)


def run_result(status: str = "done", **facts: Any) -> RunResult:
    """Return a result; `valid` and `test` are given as tables of numbers, with or without blocks."""
    for split in {"valid", "test"} & facts.keys():
        facts[split] = score_of({"blocks": [], **facts[split]})
    if "best" in facts:
        facts["best"] = Best(**facts["best"])
    return RunResult(status=status, **facts)  # type: ignore[arg-type]
