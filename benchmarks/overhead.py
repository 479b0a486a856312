"""Measure the share of training time spent on logging and checkpoints at `1m` on CPU, inside one run.

    python benchmarks/overhead.py [--size 1m] [--seconds 130]

The run is configured as by `h2h race` (200 rows per run, a checkpoint a minute), on random tokens. The time inside both
functions is measured directly. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.study.environment import provenance
from headtohead.study.store.run_store import RunDirectory
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Hooks, Trainer


class Stopwatch:
    """Accumulates the time spent in a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds, self.calls = function, 0.0, 0

    def __call__(self, *arguments: Any) -> Any:
        """Call the function and add its time."""
        began = time.perf_counter()
        result = self.function(*arguments)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        return result


def main() -> None:
    """Train for `--seconds` and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="1m")
    parser.add_argument("--seconds", type=float, default=130.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    size = SIZES[given.size]
    tokens = np.random.default_rng(0).integers(0, size.vocabulary, 2000 * size.context, dtype=np.uint8)
    windows = Windows(Split(tokens, np.zeros(1, dtype=np.uint64), len(tokens)), size.context, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / ("0" * 16))
        run.path.mkdir()
        log = Stopwatch(run.log)
        end = time.monotonic() + given.seconds
        trainer = Trainer(
            Decoder(size, parse_layout("standard").layers(size.layers), seed=0),
            windows,
            TrainSettings(tokens=2_000_000, batch=16 * size.context),
            folder=run.checkpoints,
            hooks=Hooks(log=log, stop=lambda: time.monotonic() >= end),
        )
        save = Stopwatch(trainer.save)
        trainer.save = save  # type: ignore[method-assign]
        began = time.perf_counter()
        trainer.run()
        total = time.perf_counter() - began
    share = (log.seconds + save.seconds) / total
    facts = {
        "benchmark": "overhead",
        **provenance(),
        "size": given.size,
        "seconds": round(total, 1),
        "steps": trainer.step,
        "rows": log.calls,
        "checkpoints": save.calls,
        "share_logging": round(log.seconds / total, 6),
        "share_checkpoints": round(save.seconds / total, 6),
    }
    print(f"{given.size}: logging and checkpoints take {share:.3%} of {total:.0f} s", end=" ")
    print(f"({log.calls} rows, {save.calls} checkpoints)")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
