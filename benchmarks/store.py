"""Measure the time and memory of `h2h race` with nothing to do, `report`, `runs` and `doctor` on a store of many finished runs.

    python benchmarks/store.py [--arms 300] [--sizes nano] [--seeds 33] [--points 200] [--keep DIR]

The runs are synthetic (arms x sizes x seeds), with files of realistic structure and length; nothing is trained. The last line is
one JSON document. On a shared machine compare CPU seconds (user and system, of the command and the processes it waited for).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headtohead.api import Study
from headtohead.common.files import canonical_json, digest, with_checksum
from headtohead.study.environment import provenance
from headtohead.study.plan.planner import plan_study
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store

ARMS = [
    "standard",
    *(f"standard:window={window}" for window in (8, 16, 24, 32, 48, 64, 96)),
    "standard:qk_norm=true",
    "standard:kv_heads=1",
    "standard:kv_heads=2",
    "diagonal",
    "diagonal:init=signs",
    *(f"sharing:tie=kv,rope={rope}" for rope in ("roundtrip", "score", "rotated", "none")),
    *(f"sharing:tie=kv,kv_heads=1,rope={rope}" for rope in ("roundtrip", "score", "rotated", "none")),
    "sharing:tie=qk",
    "sharing:tie=qkv",
    "sharing:value_mix=(1,-1)",
    "sharing:value_mix=learnt",
]
ARMS += [
    f"standard:kv_heads={heads},window={window},qk_norm={norm}"
    for window in range(2, 126)
    for heads in (1, 4)
    for norm in ("false", "true")
]
BLOCKS = 128
_ENVIRONMENT = provenance() | {"device": "cpu", "threads": 1}


def pretend(store: Store, run: RunSpec, draw: random.Random, points: int) -> None:
    """Write the files of a finished run with `points` logged rows of random numbers."""
    folder = store.run(run.id)
    folder.path.mkdir(parents=True, exist_ok=True)
    level = 2.5 + 0.05 * draw.gauss(0, 1)
    blocks = [[level * 700 * draw.uniform(0.8, 1.2) * math.log(2), 700] for _ in range(BLOCKS)]
    score = {
        "nats": level * math.log(2),
        "perplexity": math.exp(level * math.log(2)),
        "bits_per_byte": level,
        "tokens": 700 * BLOCKS,
        "bytes": 700 * BLOCKS,
        "blocks": blocks,
    }
    steps = run.training.steps(run.size.context)
    result = {
        "status": "done",
        "step": steps,
        "tokens": steps * run.training.batch,
        "parameters": run.parameters,
        "train_nats": level * math.log(2),
        "unique_tokens": run.training.tokens,
        "epochs": 0.5,
        "valid": score | {"blocks": []},
        "test": score,
    }
    rows = [
        {
            "step": step,
            "tokens": step * run.training.batch,
            "nats": 5.5 - 3.7 * (step / steps) ** 0.3 + 0.01 * draw.gauss(0, 1),
            "lr": 0.003,
            "grad_norm": draw.random(),
            "grad_norm_max": 1 + draw.random(),
            "seconds": round(0.1 * step, 3),
        }
        for step in range(steps // points, steps + 1, steps // points)
    ]
    metrics = "".join(json.dumps(row) + "\n" for row in rows)
    cost = {
        "train_seconds": 10.0,
        "tokens_per_second": round(result["tokens"] / 10, 1),
        "peak_bytes": 10**9,
        "metrics_sha256": digest(metrics),
    }
    files = {
        "spec.json": json.dumps(run.as_dict(), indent=1),
        "environment.json": json.dumps({"stretches": [_ENVIRONMENT]}),
        "metrics.jsonl": metrics,
        "cost.json": json.dumps(cost),
        "result.json": with_checksum({"run": run.id} | result),
    }
    for name, content in files.items():
        (folder.path / name).write_text(content, encoding="utf-8")


def measure(arguments: list[str]) -> dict[str, float | int]:
    """Return wall and CPU seconds, peak bytes and exit code of an h2h command."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "headtohead", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        print(output.decode()[-2000:])
    return {
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_bytes": usage.ru_maxrss * 1024,
        "code": code,
    }


def main() -> None:
    """Create the store and time the commands on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", type=int, default=300, help=f"number of arms, at most {len(ARMS)}")
    parser.add_argument("--sizes", nargs="+", default=["nano"])
    parser.add_argument("--seeds", type=int, default=33)
    parser.add_argument("--points", type=int, default=200, help="logged rows per run")
    parser.add_argument("--keep", help="create the store in this directory and keep it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        text, draw = folder / "text.txt", random.Random(1)
        if not text.is_file():
            words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "kings"]
            lines = (" ".join(draw.choices(words, k=9)) for _ in range(20_000))
            text.write_text("\n".join(lines), encoding="utf-8")
        settings = {
            "arms": ARMS[: given.arms],
            "corpus": f"file:{text}",
            "size": given.sizes,
            "tokens": 2048 * given.points,
            "batch": 2048,
            "seeds": given.seeds,
        }
        study = folder / "study.toml"
        study.write_text("".join(f"{key} = {canonical_json(value)}\n" for key, value in settings.items()))
        store = Store(folder / "store")
        runs = list(plan_study(Study(**settings).spec).runs.values())
        if len(store.runs()) != len(runs):
            store.make()
            for run in runs:
                pretend(store, run, draw, given.points)
        print(f"{len(runs):,} finished runs")
        rows = {}
        for name, command in {
            "first race": ["race", str(study), "--out", str(store.path), "--device", "cpu"],
            "report": ["report", str(store.path)],
            "race": ["race", str(study), "--out", str(store.path), "--device", "cpu"],
            "runs": ["runs", str(store.path)],
            "doctor": ["doctor", str(store.path), "--dry-run"],
        }.items():
            rows[name] = measure(command)
            row = rows[name]
            print(
                f"h2h {name}: {row['seconds']} s, {row['cpu_seconds']} s of CPU, {row['peak_bytes'] / 2**20:.0f} MiB"
            )
        shape = {"arms": given.arms, "sizes": given.sizes, "seeds": given.seeds, "runs": len(runs)}
        print(json.dumps({"benchmark": "store", **provenance(), **shape, "rows": rows}))


if __name__ == "__main__":
    main()
