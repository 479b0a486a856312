"""Time and peak memory of the quick race after installation, all its processes counted, and where the time goes.

    python benchmarks/quick_race.py

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

from headtohead.study.environment import provenance
from headtohead.study.store import Store

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


def main() -> None:
    """Measure and print."""
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
        began, peak = time.perf_counter(), 0
        with subprocess.Popen(command, env=os.environ | {"H2H_CACHE": f"{folder}/cache"}) as process:
            while process.poll() is None:
                peak = max(peak, proportional_bytes(tree(process.pid)))
                time.sleep(0.5)
        seconds = time.perf_counter() - began
        costs = [json.loads((run.path / "cost.json").read_text()) for run in Store(out).runs()]
        verdicts = [row["verdict"] for row in json.loads((out / "verdicts.json").read_text())]
    workers = os.cpu_count() or 1
    trained, scored = (sum(cost[key] for cost in costs) for key in ("train_seconds", "score_seconds"))
    facts = {
        "benchmark": "quick_race",
        **provenance(),
        "cores": workers,
        "seconds": round(seconds, 1),
        "peak_bytes": peak,
        "share_training": round(trained / workers / seconds, 3),
        "share_scoring": round(scored / workers / seconds, 3),
        "runs": len(costs),
        "verdicts": verdicts,
    }
    print(f"quick race: {seconds:.0f} s on {workers} cores, peak {peak / 2**20:.0f} MiB; ", end="")
    print(f"training {facts['share_training']:.0%}, scoring {facts['share_scoring']:.0%} of the time")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
