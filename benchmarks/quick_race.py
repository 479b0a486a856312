"""Measure the time and peak memory of the quick race after installation, over all its processes, and where the time goes.

    python benchmarks/quick_race.py

The parts add up to the whole. Start-up is the time until the first run has its model (imports, corpus, plan, workers);
judging is the time after the last result (statistics, claims, page). In between, each worker trains (logging included),
scores, and spends the rest on building models, saving weights and waiting for the others at the end.

The last line is one JSON document. Memory is proportional set size, sampled twice a second: pages shared by processes
count once.
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
    """Return the proportional set size of processes: shared pages are divided among them."""
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
    """Return the parts of the race's time as shares; `began` and `ended` are Unix times."""
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
    # Other work on the machine slows the race down but hardly changes the shares.
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [
            sys.executable,
            "-m",
            "headtohead",
            "race",
            "quick",
            "--out",
            str(out),
        ]
        began, peak = time.time(), 0
        with subprocess.Popen(command, env=os.environ | {"H2H_CACHE": f"{folder}/cache"}) as process:
            while process.poll() is None:
                peak = max(peak, proportional_bytes(tree(process.pid)))
                time.sleep(0.5)
        ended = time.time()
        if process.returncode:  # 3: stopped with runs left, by Ctrl-C
            sys.exit(process.returncode)
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
