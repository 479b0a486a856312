"""Time and peak memory of the quick race after installation, all its processes counted, and where the time goes.

    python benchmarks/quick_race.py

Its parts add up to the whole: start-up is what passes before the first run has its model (imports, the corpus, the
plan, the workers), judging what passes after the last result (statistics, claims, the page). Between the two, each worker trains
(the rows it logs included), scores, and does the rest: it builds models, saves weights, waits for the others at the end.

The last line is one JSON document. Memory is proportional set size, sampled twice a second: pages that processes
share are counted once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headtohead.study.environment import provenance
from headtohead.study.store.run_store import Store

ROOT = Path(__file__).resolve().parent.parent


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def proportional_bytes(pids: list[int]) -> int:
    """Return the memory of processes, shared pages divided among those that share them."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def split(
    folder: Path, costs: list[dict[str, Any]], workers: int, began: float, ended: float
) -> dict[str, float]:
    """Return the parts of the race's time, each as a share of it; `began` and `ended` are times of day."""
    first = min(path.stat().st_mtime for path in folder.glob("runs/*/environment.json"))
    last = max(path.stat().st_mtime for path in folder.glob("runs/*/result.json"))
    trained, scored = (
        sum(cost[key] for cost in costs) / workers for key in ("train_seconds", "score_seconds")
    )
    parts = {
        "start_up": first - began,
        "training": trained,
        "scoring": scored,
        "rest_of_runs": last - first - trained - scored,
        "judging_and_page": ended - last,
    }
    return {name: round(spent / (ended - began), 3) for name, spent in parts.items()}


def main() -> None:
    """Measure and print."""
    load = round(
        os.getloadavg()[0], 2
    )  # other work on the machine makes it slow, and hardly moves the shares
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [
            sys.executable,
            "-m",
            "headtohead",
            "race",
            str(ROOT / "studies" / "quick.toml"),
            "--out",
            str(out),
        ]
        began, peak = time.time(), 0
        with subprocess.Popen(command, env=os.environ | {"H2H_CACHE": f"{folder}/cache"}) as process:
            while process.poll() is None:
                peak = max(peak, proportional_bytes(tree(process.pid)))
                time.sleep(0.5)
        ended = time.time()
        costs = [json.loads((run.path / "cost.json").read_text()) for run in Store(out).runs()]
        verdicts = [row["verdict"] for row in json.loads((out / "verdicts.json").read_text())]
        workers, seconds = min(os.cpu_count() or 1, len(costs)), ended - began
        shares = split(out, costs, workers, began, ended)
    facts = {
        "benchmark": "quick_race",
        **provenance(),
        "cores": workers,
        "seconds": round(seconds, 1),
        "peak_bytes": peak,
        "load_before": load,
        "shares": shares,
        "runs": len(costs),
        "verdicts": verdicts,
    }
    print(f"quick race: {seconds:.0f} s on {workers} cores, peak {peak / 2**20:.0f} MiB; ", end="")
    print(", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares.items()))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
