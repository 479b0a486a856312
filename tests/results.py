"""Synthetic results of runs."""

from __future__ import annotations

from typing import Any

from headtohead.study.store.result import Best, RunResult, score_of


def run_result(status: str = "done", **facts: Any) -> RunResult:
    """Return a result; `valid` and `test` are given as tables of numbers, with or without blocks."""
    for split in {"valid", "test"} & facts.keys():
        facts[split] = score_of({"blocks": [], **facts[split]})
    if "best" in facts:
        facts["best"] = Best(**facts["best"])
    return RunResult(status=status, **facts)  # type: ignore[arg-type]
