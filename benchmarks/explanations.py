"""Time the explanation metrics: 10,000 examples of length 128 on a one-layer reader.

    python benchmarks/explanations.py [--examples 10000] [--layers 1] [--threads 2]

Prints wall and CPU seconds of all explanations and of one plain scoring pass, and their ratio. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from headtohead.data.tasks.batches import by_length, collated
from headtohead.data.tasks.registry import prepare_task
from headtohead.interpret.faithfulness import explain_model
from headtohead.model.classifier import Reader
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size
from headtohead.study.environment import provenance

LENGTH = 128


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return wall seconds, CPU seconds and the result of the work."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return time.perf_counter() - wall, time.process_time() - cpu, found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    task = prepare_task(f"toy:train={given.examples},length={LENGTH + 1}", context=LENGTH)
    assert {len(example.tokens) for example in task.splits["train"]} == {LENGTH}
    # Width, heads, feed-forward width and positions of the paper's one-layer model.
    size = Size("one", 64, given.layers, 4, 256, task.vocabulary, LENGTH)
    size = size.with_settings(ffn="gelu", positions="learned")
    layers = parse_layout("standard").layers(given.layers)
    reader = Reader(size, layers, seed=0).eval()

    def plain() -> None:
        with torch.no_grad():
            examples = task.splits["train"]
            for indices in by_length([LENGTH] * len(examples), 64 * LENGTH, padded=True):
                batch = collated(examples, indices)
                reader.hidden(batch.tokens, padding=batch.padding)

    once, once_cpu, _ = timed(plain)
    wall, cpu, found = timed(lambda: explain_model(reader, task, "train"))
    count = found.summary()["examples"]
    print(f"{count:,} examples of {LENGTH} tokens, {size.dims}, {given.threads} threads")
    print(f"one scoring pass   {once:7.1f} s wall {once_cpu:7.1f} s CPU")
    print(f"all explanations   {wall:7.1f} s wall {cpu:7.1f} s CPU = {cpu / once_cpu:.1f} scoring passes")
    rows = {
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "scoring_wall_seconds": once,
        "scoring_cpu_seconds": once_cpu,
    }
    facts = {"examples": count, "length": LENGTH, "dims": size.dims, "threads": given.threads}
    print(json.dumps({"benchmark": "explanations", **provenance(), **facts, **rows}))


if __name__ == "__main__":
    main()
