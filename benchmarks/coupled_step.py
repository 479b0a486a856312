"""Whole training steps of the coupling beside `standard`, interleaved in one process; the last line is one JSON document.

python benchmarks/coupled_step.py --size 60m --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from headtohead.kernels import path_name
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.study.environment import choose_device, device_name, provenance

ARMS = ("standard", "coupled", "coupled:dynamics=leapfrog,steps=7")


class Arm:
    """One model with its optimiser."""

    def __init__(self, arm: str, size: str, device: torch.device, tokens: int) -> None:
        shape = SIZES[size]
        self.device = device
        self.model = Decoder(shape, parse_layout(arm).layers(shape.layers)).to(device)
        if device.type == "cuda":
            self.model.compile_hidden()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        rows = max(1, tokens // shape.context)
        text = torch.randint(0, shape.vocabulary, (rows, shape.context + 1), device=device)
        self.tokens, self.targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step(self) -> None:
        """Do one step: forward, backward, clip, update."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            objective, _, _ = self.model(self.tokens, self.targets)
        objective.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def seconds(self, steps: int) -> float:
        """Return the mean seconds of a step."""
        self._wait()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._wait()
        return (time.perf_counter() - begun) / steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main() -> None:
    """Measure, and print one line for each arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="60m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    given = parser.parse_args()
    device = choose_device(given.device)
    arms = {arm: Arm(arm, given.size, device, given.tokens) for arm in given.arms}
    for arm in arms.values():
        arm.seconds(3)
    rounds = [{name: arm.seconds(given.steps) for name, arm in arms.items()} for _ in range(5)]
    medians = {name: statistics.median(row[name] for row in rounds) for name in arms}
    first = medians[given.arms[0]]
    for name, seconds in medians.items():
        print(f"{name:<40}{seconds * 1000:9.2f} ms{seconds / first:8.3f}x")
    rows = [
        {"arm": name, "seconds": seconds, "over_first": seconds / first} for name, seconds in medians.items()
    ]
    facts = {"device": device_name(device), "kernels": path_name(device), "size": given.size}
    print(
        json.dumps(
            {"benchmark": "coupled_step", **provenance(), **facts, "tokens": given.tokens, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
