"""Benchmark of populations: aggregate tokens/s, compared with a single run and with as many processes on one device.

A step includes data, forward, backward, clipping and optimizer; on a GPU it runs as one CUDA graph for all contenders.
Each kind is measured compiled and not compiled, and the best of each kind are compared. To check correctness, each row
also holds the difference between twenty float32 steps of a population and of separate runs.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headtohead.bench.profile import kernel_times
from headtohead.bench.rows import Rows
from headtohead.bench.train import find_shape, random_windows
from headtohead.common.errors import UserError, first_line
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.study.environment import choose_device, device_name
from headtohead.training.acceleration import compiler_serves
from headtohead.training.population import PopulationTrainer
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Hooks, Trainer

Progress = Callable[[str, float], None]
Warn = Callable[[str], None]
WARM, BURST = 6, 20
_COMPARED = 20
_START_SECONDS = 300.0
_MAX_SEEDS = 1024


@dataclass(frozen=True)
class Case:
    """One arm at one size with its training settings."""

    size: str
    arm: str
    batch: int
    """Tokens per step of each seed."""
    precision: str
    device: str

    def trainer(
        self, seed: int, *, record: bool = False, compile: bool = False, warn: Warn = lambda message: None
    ) -> Trainer:
        """Return the trainer of one seed."""
        size = find_shape(self.size)
        windows = random_windows(size, 8 * (self.batch // size.context), seed)
        model = Decoder(size, parse_layout(self.arm).layers(size.layers), seed, companion=windows.tokens)
        # Full learning rate from the first step: with hardly any update, wrong steps would agree too.
        settings = TrainSettings(
            tokens=10**12,
            batch=self.batch,
            schedule="constant",
            warmup=0.0,
            precision=self.precision,  # type: ignore[arg-type]
        )
        model = model.to(self.device)
        trainer = Trainer(model, windows, settings, record=record, compile=compile, hooks=Hooks(warn=warn))
        model.train()
        return trainer

    def single(
        self, seed: int, compile: bool = False, warn: Warn = lambda message: None
    ) -> Callable[[], object]:
        """Return a function that does one step of a single run."""
        trainer = self.trainer(seed, record=True, compile=compile, warn=warn)

        def step() -> None:
            trainer._one_step()
            trainer.step += 1

        return step

    def stack(
        self, seeds: int, compile: bool = False, warn: Warn = lambda message: None
    ) -> PopulationTrainer:
        """Return the trainer of a population of `seeds` rows."""
        members = [self.trainer(seed, warn=warn) for seed in range(seeds)]
        return PopulationTrainer(members, record=True, compile=compile)

    def stacked(
        self, seeds: int, compile: bool = False, warn: Warn = lambda message: None
    ) -> Callable[[], object]:
        """Return a function that does one step of a population of `seeds` rows."""
        stack = self.stack(seeds, compile, warn)

        def step() -> None:
            stack.one_step()
            stack.first.step += 1

        return step

    def wait(self) -> None:
        """Synchronize the device."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()


def bench_population(
    seeds: Sequence[int] = (5, 16),
    *,
    size: str = "1m",
    arms: Sequence[str] = ("standard",),
    batch: int = 8192,
    rounds: int = 6,
    precision: str = "bf16",
    device: str = "auto",
    compile: bool | None = None,
    processes: bool = True,
    profile: bool = False,
    out: str | Path | None = None,
    progress: Progress = lambda message, share: None,
) -> dict[str, Any]:
    """Return the benchmark document: one row per arm and number of seeds.

    `batch` is tokens per step of each seed. With `compile=None` contenders run compiled and not compiled if there is a GPU
    and Triton. `profile` adds kernel times of a population step. `out` stores each row as soon as it is measured; rows
    stored for this commit, device and settings are reused.
    """
    shape, where = find_shape(size), choose_device(device)
    if rounds < 1 or any(count < 1 for count in seeds):
        raise UserError(f"rounds={rounds} and seeds={','.join(map(str, seeds))} must be at least 1")
    if max(seeds, default=0) > _MAX_SEEDS:
        raise UserError(f"seeds={max(seeds)} is too large; at most {_MAX_SEEDS} are allowed")
    if batch < 1 or batch % shape.context:
        raise UserError(f"batch={batch} tokens per step is not a multiple of the context {shape.context}")
    if not arms:
        raise UserError("arms must name at least one arm, such as standard")
    for arm in arms:
        parse_layout(arm).layers(shape.layers)
    forms = ([False, True] if compiler_serves(where) else [False]) if compile is None else [compile]
    rows = Rows("stack", out, {})
    apart: dict[str, dict[str, float | str]] = {}
    cases = [(arm, count) for arm in arms for count in seeds]
    for index, (arm, count) in enumerate(cases):
        facts: dict[str, Any] = {
            "size": shape.name,
            "dims": shape.dims,
            "arm": arm,
            "seeds": count,
            "device": device_name(where),
            "precision": precision,
            "tokens_per_step": batch,
            "recorded": where.type == "cuda",
            "compiled": forms,
            "rounds": rounds,
            "processes": processes,
            "profiled": profile,
        }
        if rows.known(facts):
            continue
        case = Case(size, arm, batch, precision, str(where))

        def show(message: str, share: float, arm: str = arm, count: int = count, index: int = index) -> None:
            progress(f"{arm}, {count} seeds: {message}", (index + share) / len(cases))

        contest = _Contest(case, count, forms, rounds)
        if arm not in apart:
            apart[arm] = {_form(form): contest.disagreement(form, show) for form in forms}
        rows.add(facts, {"disagreement": apart[arm], **contest.measure(processes, profile, show)})
    return rows.document()


def _form(compiled: bool) -> str:
    return "compiled" if compiled else "as it stands"


class _Contest:
    """A population and a single run, compiled or not, measured alternately."""

    def __init__(self, case: Case, seeds: int, forms: list[bool], rounds: int) -> None:
        self.case, self.seeds, self.forms, self.rounds = case, seeds, forms, rounds
        self.results: dict[str, dict[str, Any]] = {}

    def measure(self, processes: bool, profile: bool, progress: Progress) -> dict[str, Any]:
        """Return every contender's median, the best of each kind and their ratios, and profiles if requested."""
        case, seeds = self.case, self.seeds
        steps: dict[str, tuple[Callable[[], object], int]] = {}
        for form in self.forms:
            build = {"single": (case.single, 0, 1), "stacked": (case.stacked, seeds, seeds)}
            for kind, (make, given, count) in build.items():
                name = f"{kind}, {_form(form)}"
                progress(f"{name}: first steps", 0.1)
                if (step := self._ready(name, make, given, form)) is not None:
                    steps[name] = step, count
        rates: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(self.rounds):
            for name, (step, count) in steps.items():
                progress(f"{name}: round {turn + 1} of {self.rounds}", 0.4 + 0.2 * turn / self.rounds)
                rates[name].append(count * case.batch / _seconds(case, step))
        for name, found in rates.items():
            self.results[name] |= {
                "tokens_per_second": statistics.median(found),
                "all": [round(rate) for rate in found],
            }
        facts: dict[str, Any] = {}
        if profile:
            progress("profiling", 0.6)
            facts["profile"] = {
                name: kernel_times(step, torch.device(case.device))
                for name, (step, _) in steps.items()
                if name.startswith("stacked")
            }
        steps.clear()
        gc.collect()
        return self._facts(processes, progress) | facts

    def disagreement(self, compiled: bool, progress: Progress) -> float | str:
        """Return the difference between a population and separate runs, or an error message."""
        progress(f"{_form(compiled)}: comparing with separate runs", 0.0)
        try:
            return disagreement(self.case, compile=compiled)
        except Exception as error:
            return first_line(error)

    def _ready(
        self, name: str, make: Callable[..., Callable[[], object]], given: int, compiled: bool
    ) -> Callable[[], object] | None:
        """Return a contender's step function after warm-up; a failure is stored in its result."""
        warnings: list[str] = []
        began = time.perf_counter()
        try:
            step = make(given, compiled, warnings.append)
            for _ in range(WARM):
                step()
            self.case.wait()
        except Exception as error:
            self.results[name] = {"error": first_line(error)}
            return None
        self.results[name] = {"start_seconds": round(time.perf_counter() - began, 1)}
        if warnings:
            self.results[name]["warnings"] = sorted(set(warnings))
        return step

    def _best(self, kind: str) -> tuple[float | None, bool]:
        """Return the highest rate of a kind, and whether it was compiled."""
        rates = [
            (float(self.results[name]["tokens_per_second"]), form)
            for form in self.forms
            if "tokens_per_second" in self.results[name := f"{kind}, {_form(form)}"]
        ]
        return max(rates, default=(None, False))

    def _facts(self, processes: bool, progress: Progress) -> dict[str, Any]:
        case, size = self.case, find_shape(self.case.size)
        (stacked, _), (single, compiled) = self._best("stacked"), self._best("single")
        separate = None
        if processes and single is not None:
            progress(f"{self.seeds} processes at once", 0.7)
            duration = max(0.2, self.rounds * BURST * case.batch / single)
            separate = separate_rate(case, self.seeds, duration, compiled)
        return {
            "results": self.results,
            "stacked_tokens_per_second": stacked,
            "single_tokens_per_second": single,
            "over_single": stacked / single if stacked and single else None,
            "separate_tokens_per_second": separate,
            "over_separate": stacked / separate if stacked and separate else None,
            "parameters": Decoder.on_meta(size, parse_layout(case.arm).layers(size.layers)).parameter_count(),
        }


def _seconds(case: Case, step: Callable[[], object]) -> float:
    """Return the mean seconds of `BURST` consecutive steps."""
    case.wait()
    began = time.perf_counter()
    for _ in range(BURST):
        step()
    case.wait()
    return (time.perf_counter() - began) / BURST


def disagreement(case: Case, seeds: int = 3, compile: bool = False) -> float:
    """Return the largest relative difference in loss (nats) and gradient norm between a population and separate runs.

    Twenty float32 steps of four sequences each; on a GPU all but the first run as CUDA graphs. Separate runs are not
    compiled. A difference that is not finite raises.
    """
    case = dataclasses.replace(case, precision="float32", batch=4 * find_shape(case.size).context)
    stack = case.stack(seeds, compile, _reject)
    separate = [case.trainer(seed, record=True) for seed in range(seeds)]
    worst = 0.0
    for index in range(_COMPARED):
        together = torch.stack(stack.one_step(), 1)
        stack.first.step += 1
        for one, found in zip(separate, together, strict=True):
            alone = torch.stack(one._one_step())
            one.step += 1
            off = float(((found - alone) / alone).abs().max())
            if not math.isfinite(off):
                raise RuntimeError(
                    f"step {index + 1} gives {found.tolist()} in a population and {alone.tolist()} alone"
                )
            worst = max(worst, off)
    return worst


def _reject(message: str) -> None:
    raise RuntimeError(message)


def separate_rate(case: Case, count: int, duration: float, compile: bool = False) -> float:
    """Return the total tokens per second of `count` processes, each training one seed for `duration` seconds."""
    command = [sys.executable, "-m", "headtohead.bench.population"]
    workers = [
        # Own process group: Ctrl-C reaches only this process, which then kills them.
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
        for _ in range(count)
    ]
    try:
        for seed, worker in enumerate(workers):
            order = {"case": dataclasses.asdict(case), "seed": seed, "seconds": duration, "compile": compile}
            _emit(worker, json.dumps(order))
        end = time.monotonic() + _START_SECONDS
        for worker in workers:
            if time.monotonic() > end or _received(worker) != "ready":
                raise UserError(
                    "a separate process did not reach its first step; leave them out with --no-processes"
                )
        for worker in workers:
            _emit(worker, "go")
        return sum(float(_received(worker) or "nan") for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _emit(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()


def _received(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def main() -> None:
    """Run one of the separate processes: read a case, report ready after warm-up, then train on `go` for the given time."""
    order = json.loads(sys.stdin.readline())
    case = Case(**order["case"])
    if case.device == "cpu":
        torch.set_num_threads(1)
    step = case.single(int(order["seed"]), bool(order["compile"]))
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
