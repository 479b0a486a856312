"""Measure how often real studies of two equal arms declare a winner.

    python benchmarks/calibration.py [--studies 40] [--seeds 5] [--tokens 300k] [--workers 0] [--out FILE]

Trains `standard` and a copy with different initial values (benchmarks/renamed.py) on the same windows, `studies` times `seeds`
seeds of each, and judges every group of seeds as a separate study. Every verdict of better or worse is a false winner. The
same differences are also regrouped at random many times, which narrows the confidence interval of the false-winner rate on
real noise. Runs are kept in --runs and reused. The last line is one JSON document; --out writes it to a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from headtohead import Study
from headtohead.common.files import write_json
from headtohead.study.environment import provenance
from headtohead.study.judge.statistics import ALPHA, compare_paired
from headtohead.study.judge.verdict import study_verdicts

HERE = Path(__file__).parent
REGROUPED = 20_000


def interval(count: int, total: int, share: float = 0.95) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) interval of a rate."""
    tail = (1 - share) / 2
    low = 0.0 if count == 0 else float(special.betaincinv(count, total - count + 1, tail))
    high = 1.0 if count == total else float(special.betaincinv(count + 1, total - count, 1 - tail))
    return low, high


def judged(result: Any, seeds: int) -> list[dict[str, Any]]:
    """Return the verdict of every group of seeds, each judged as a separate study."""
    rows = []
    every = result.manifest.seeds
    for first in range(0, len(every), seeds):
        own = every[first : first + seeds]
        entries = tuple(entry for entry in result.manifest.entries if entry.seed in own)
        (verdict,) = study_verdicts(
            dataclasses.replace(result.manifest, seeds=own, entries=entries), result.results
        )
        rows.append(
            {
                "seeds": list(own),
                "verdict": verdict.verdict,
                "difference": verdict.difference,
                "p": verdict.p,
                "untrained": verdict.unlearnt + verdict.baseline_unlearnt,
                "values": verdict.values,
                "baseline_values": verdict.baseline_values,
            }
        )
    return rows


def regrouped(differences: np.ndarray[Any, Any], seeds: int) -> float:
    """Return how often random groups of the differences, each with a random sign, are judged better or worse.

    Under equal arms the sign of a difference is random, so drawing it again leaves the distribution unchanged.
    """
    draw = np.random.default_rng(0)
    count = 0
    for _ in range(REGROUPED):
        chosen = draw.choice(differences, seeds, replace=False) * draw.choice((-1.0, 1.0), seeds)
        p = compare_paired(chosen, np.zeros(seeds)).p
        count += p is not None and p < ALPHA
    return count / REGROUPED


def main() -> None:
    """Train, judge, print."""
    parser = argparse.ArgumentParser(description="false winners among equal arms")
    parser.add_argument("--studies", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", default="300k")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=Path, default=Path("races/calibration"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    study = Study(
        ["standard", f"{HERE / 'renamed.py'}:Renamed"],
        name="calibration",
        tokens=given.tokens,
        seeds=list(range(1, given.studies * given.seeds + 1)),
    )
    result = study.run(given.runs, device=given.device, workers=given.workers, keep_weights=False)
    rows = judged(result, given.seeds)
    winners = sum(row["verdict"] in ("better", "worse") for row in rows)
    pairs = [(a, b) for row in rows for a, b in zip(row["values"], row["baseline_values"], strict=True)]
    differences = np.array([a - b for a, b in pairs])
    document = {
        "benchmark": "calibration",
        **provenance(),
        "device": given.device,
        "tokens": given.tokens,
        "studies": len(rows),
        "seeds": given.seeds,
        "false_winners": winners,
        "rate": winners / len(rows),
        "interval": interval(winners, len(rows)),
        "regrouped_rate": regrouped(differences, given.seeds),
        "spread_of_differences": float(differences.std(ddof=1)),
        "correlation": float(np.corrcoef(np.array(pairs).T)[0, 1]),
        "references": result.manifest.references,
        "rows": rows,
    }
    if given.out:
        write_json(given.out, document)
    print(json.dumps({key: value for key, value in document.items() if key != "rows"}))


if __name__ == "__main__":
    main()
