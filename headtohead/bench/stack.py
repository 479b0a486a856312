"""Seeds trained in one pass, beside one run by itself and beside as many processes on one device: aggregate tokens/s.

A step is everything a run does between two batches: data, forward, backward, clipping, optimiser; on a GPU it is recorded
as one graph, for all contenders. What is fast and wrong is worth nothing: each row also says how far twenty steps of
stacked seeds are from those of separate runs, in float32.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headtohead.bench.rows import Rows
from headtohead.bench.train import find_shape, random_windows
from headtohead.common.errors import UserError
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.study.environment import choose_device, device_name
from headtohead.training.settings import TrainSettings
from headtohead.training.stacked import StackedTrainer
from headtohead.training.trainer import Trainer

Progress = Callable[[str, float], None]
WARM, BURST = 6, 20
_COMPARED = 20
_START_SECONDS = 300.0


@dataclass(frozen=True)
class Case:
    """One arm at one size, as it is trained here."""

    size: str
    arm: str
    batch: int
    """Tokens per step of each seed."""
    precision: str
    device: str

    def trainer(self, seed: int, record: bool = False) -> Trainer:
        """Return the trainer of one seed."""
        size = find_shape(self.size)
        windows = random_windows(size, 8 * (self.batch // size.context), seed)
        model = Decoder(size, parse_layout(self.arm).layers(size.layers), seed, companion=windows.tokens)
        # At the full rate from the first step: weights that hardly move would agree whatever was done to them.
        settings = TrainSettings(
            tokens=10**12,
            batch=self.batch,
            schedule="constant",
            warmup=0.0,
            precision=self.precision,  # type: ignore[arg-type]
        )
        trainer = Trainer(model.to(self.device), windows, settings, record=record)
        model.train()
        return trainer

    def single(self, seed: int) -> Callable[[], object]:
        """Return one step of one seed by itself."""
        trainer = self.trainer(seed, record=True)

        def step() -> None:
            trainer._one_step()
            trainer.step += 1

        return step

    def stacked(self, seeds: int) -> Callable[[], object]:
        """Return one step of that many seeds in one pass."""
        stack = StackedTrainer([self.trainer(seed) for seed in range(seeds)], record=True)

        def step() -> None:
            stack.one_step()
            stack.first.step += 1

        return step

    def wait(self) -> None:
        """Wait until the device has nothing left to do."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()


def bench_stack(
    seeds: Sequence[int] = (5, 16),
    *,
    size: str = "1m",
    arms: Sequence[str] = ("standard",),
    batch: int = 8192,
    rounds: int = 6,
    precision: str = "bf16",
    device: str = "auto",
    processes: bool = True,
    out: str | Path | None = None,
    progress: Progress = lambda words, share: None,
) -> dict[str, Any]:
    """Return the document of the benchmark: one row per arm and number of seeds.

    `batch` is tokens per step of each seed. `out` keeps every row as soon as it is measured; rows that stand there,
    measured at this commit on this device with these settings, are not measured again.
    """
    shape, where = find_shape(size), choose_device(device)
    if rounds < 1 or any(count < 1 for count in seeds):
        raise UserError(f"rounds={rounds} and seeds={','.join(map(str, seeds))} must be at least 1")
    if batch < 1 or batch % shape.context:
        raise UserError(f"batch={batch} tokens per step is not a multiple of the context {shape.context}")
    for arm in arms:
        parse_layout(arm).layers(shape.layers)
    rows = Rows("stack", out, {})
    cases = [(arm, count) for arm in arms for count in seeds]
    for place, (arm, count) in enumerate(cases):
        facts: dict[str, Any] = {
            "size": shape.name,
            "dims": shape.dims,
            "arm": arm,
            "seeds": count,
            "device": device_name(where),
            "precision": precision,
            "tokens_per_step": batch,
            "recorded": where.type == "cuda",
            "rounds": rounds,
            "processes": processes,
        }
        if rows.known(facts):
            continue
        case = Case(size, arm, batch, precision, str(where))

        def show(words: str, share: float, arm: str = arm, count: int = count, place: int = place) -> None:
            progress(f"{arm}, {count} seeds: {words}", (place + share) / len(cases))

        rows.add(facts, _measure(case, count, rounds, processes, show))
    return rows.document()


def _measure(case: Case, seeds: int, rounds: int, processes: bool, progress: Progress) -> dict[str, Any]:
    progress("comparing with separate runs", 0.0)
    found = disagreement(case)
    steps = {"single": (case.single(0), 1), "stacked": (case.stacked(seeds), seeds)}
    for name, (step, _) in steps.items():
        progress(f"{name}: first steps", 0.1)
        for _ in range(WARM):
            step()
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name, (step, count) in steps.items():
            progress(f"{name}: round {turn + 1} of {rounds}", 0.2 + 0.3 * turn / rounds)
            rates[name].append(count * case.batch / _seconds(case, step))
    stacked, single = (statistics.median(rates[name]) for name in ("stacked", "single"))
    steps.clear()
    separate = None
    if processes:
        progress(f"{seeds} processes at once", 0.5)
        separate = separate_rate(case, seeds, duration=max(0.2, rounds * BURST * case.batch / single))
    return {
        "stacked_tokens_per_second": stacked,
        "stacked_all": [round(rate) for rate in rates["stacked"]],
        "single_tokens_per_second": single,
        "single_all": [round(rate) for rate in rates["single"]],
        "over_single": stacked / single,
        "separate_tokens_per_second": separate,
        "over_separate": None if separate is None else stacked / separate,
        "parameters": Decoder.outline(
            find_shape(case.size), parse_layout(case.arm).layers(find_shape(case.size).layers)
        ).parameter_count(),
        "disagreement": found,
    }


def _seconds(case: Case, step: Callable[[], object]) -> float:
    """Return the time of one step among a few done one behind the other."""
    case.wait()
    began = time.perf_counter()
    for _ in range(BURST):
        step()
    case.wait()
    return (time.perf_counter() - began) / BURST


def disagreement(case: Case, seeds: int = 3) -> float:
    """Return the largest relative difference in nats and gradient norm between stacked seeds and separate runs.

    Twenty steps in float32, four sequences each; on a GPU all but the first of both are recorded ones.
    """
    case = dataclasses.replace(case, precision="float32", batch=4 * find_shape(case.size).context)
    stack = StackedTrainer([case.trainer(seed) for seed in range(seeds)], record=True)
    separate = [case.trainer(seed, record=True) for seed in range(seeds)]
    worst = 0.0
    for _ in range(_COMPARED):
        together = torch.stack(stack.one_step(), 1)
        stack.first.step += 1
        for one, found in zip(separate, together, strict=True):
            alone = torch.stack(one._one_step())
            one.step += 1
            worst = max(worst, float(((found - alone) / alone).abs().max()))
    return worst


def separate_rate(case: Case, count: int, duration: float) -> float:
    """Return the tokens per second of that many processes together, each training one seed for as long."""
    command = [sys.executable, "-m", "headtohead.bench.stack"]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        for seed, worker in enumerate(workers):
            order = {"case": dataclasses.asdict(case), "seed": seed, "seconds": duration}
            _tell(worker, json.dumps(order))
        end = time.monotonic() + _START_SECONDS
        for worker in workers:
            if time.monotonic() > end or _heard(worker) != "ready":
                raise UserError(
                    "a separate process did not come to its first step; --no-processes leaves them out"
                )
        for worker in workers:
            _tell(worker, "go")
        return sum(float(_heard(worker) or "nan") for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _tell(worker: subprocess.Popen[str], words: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(words + "\n")
    worker.stdin.flush()


def _heard(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def main() -> None:
    """Be one of the separate processes: told of a case, ready after the first steps, then on the word as long as asked."""
    order = json.loads(sys.stdin.readline())
    case = Case(**order["case"])
    if case.device == "cpu":
        torch.set_num_threads(1)
    step = case.single(int(order["seed"]))
    for _ in range(WARM):
        step()
    case.wait()
    print("ready", flush=True)
    sys.stdin.readline()
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < order["seconds"]:
        for _ in range(5):
            step()
        case.wait()
        steps += 5
    print(steps * case.batch / (time.perf_counter() - began), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
