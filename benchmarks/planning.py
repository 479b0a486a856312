"""Measure the share of a study's time spent on planning, under every shape and length rule.

    python benchmarks/planning.py [--size nano] [--tokens 400k] [--seeds 3]

The study has four arms under three shape rules and three length rules, on the standard library's source, with the corpus
prepared in advance. Planning is everything before the first run: building models on `meta`, solving widths and tokens,
timing training steps. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import headtohead as h2h
from headtohead.api import study as studies
from headtohead.study.environment import provenance

ARMS = ["standard", "sharing:tie=kv", "coupled", "standard:kv_heads=2"]


def main() -> None:
    """Run the study and print the share of its time spent on planning."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="nano")
    parser.add_argument("--tokens", default="400k")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    h2h.Study(ARMS[:1], tokens="2k", batch=1024, seeds=1).run(Path(tempfile.mkdtemp()), quiet=True)
    spent: list[float] = []
    plan = studies.plan_study

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return plan(*arguments, **named)
        finally:
            spent.append(time.perf_counter() - began)

    studies.plan_study = timed
    study = h2h.Study(
        ARMS,
        size=given.size,
        tokens=given.tokens,
        seeds=given.seeds,
        shape=["as_is", "params", "cache"],
        length=["tokens", "flops", "time"],
    )
    began = time.perf_counter()
    result = study.run(Path(tempfile.mkdtemp()), quiet=True)
    whole = time.perf_counter() - began
    found = {"runs": len({entry.run for entry in result.manifest.entries}), "contests": 9, "arms": len(ARMS)}
    found |= {"planning_seconds": round(sum(spent), 2), "study_seconds": round(whole, 2)}
    print(f"planning {sum(spent):.1f} s of {whole:.1f} s: {sum(spent) / whole:.1%}")
    share = {"share": round(sum(spent) / whole, 4)}
    print(json.dumps({"benchmark": "planning", **provenance(), **vars(given), **found, **share}))


if __name__ == "__main__":
    main()
