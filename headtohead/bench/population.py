"""Benchmark of populations: aggregate tokens/s, compared with a single run and with as many processes on one device.

A step includes data, forward, backward, clipping and optimizer; on a GPU it runs as one CUDA graph for all contenders.
Each kind is measured compiled and not compiled, and the best of each kind are compared. To check correctness, each row
also holds the difference between twenty float32 steps of a population and of separate runs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from headtohead.bench.clock import wait
from headtohead.bench.harness import Case, Contender, Progress, Row, Rows, Step, in_a_line, silent, take_turns
from headtohead.bench.profile import kernel_times
from headtohead.bench.train import check_arms, find_shape, random_trainer, step_of
from headtohead.bench.worker_pool import TimeLimitReached, WorkerPool
from headtohead.common.errors import UserError
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.study.environment import choose_device, device_name
from headtohead.training.acceleration import compiler_serves
from headtohead.training.population import PopulationTrainer
from headtohead.training.trainer import Trainer

Warn = Callable[[str], None]
WARM, BURST = 6, 20
_COMPARED = 20
_START_SECONDS = 300.0
_MAX_SEEDS = 1024


def _ignore(message: str) -> None:
    """Ignore a warning."""


@dataclass(frozen=True)
class Setup:
    """One arm at one size with its training settings."""

    size: str
    arm: str
    batch: int
    """Tokens per step of each seed."""
    precision: str
    device: str

    def trainer(
        self, seed: int, *, record: bool = False, compile: bool = False, warn: Warn = _ignore
    ) -> Trainer:
        """Return the trainer of one seed."""
        # Full learning rate from the first step: with hardly any update, wrong steps would agree too.
        return random_trainer(
            *(find_shape(self.size), self.arm, self.batch, self.precision, self.device),
            seed=seed,
            record=record,
            compile=compile,
            warn=warn,
            schedule="constant",
            warmup=0.0,
        )

    def single(self, seed: int, compile: bool = False, warn: Warn = _ignore) -> Step:
        """Return a function that does one step of a single run."""
        return step_of(self.trainer(seed, record=True, compile=compile, warn=warn))

    def stack(self, seeds: int, compile: bool = False, warn: Warn = _ignore) -> PopulationTrainer:
        """Return the trainer of a population of `seeds` rows."""
        members = [self.trainer(seed, warn=warn) for seed in range(seeds)]
        return PopulationTrainer(members, record=True, compile=compile)

    def stacked(self, seeds: int, compile: bool = False, warn: Warn = _ignore) -> Step:
        """Return a function that does one step of a population of `seeds` rows."""
        stack = self.stack(seeds, compile, warn)

        def step() -> None:
            stack.one_step()
            stack.first.step += 1

        return step


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
    progress: Progress = silent,
) -> Row:
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
    check_arms(arms, shape)
    forms = ([False, True] if compiler_serves(where) else [False]) if compile is None else [compile]

    @cache
    def compared(setup: Setup) -> dict[str, float | str]:
        return {_form(form): _disagreement_or_error(setup, form) for form in forms}

    def measure(setup: Setup, count: int, show: Progress) -> Row:
        show("comparing with separate runs", 0.0)
        apart = {"disagreement": compared(setup)}
        return apart | measure_population(setup, count, forms, rounds, processes, profile, show)

    cases = [
        Case(
            {
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
            },
            f"{arm}, {count} seeds",
            partial(measure, Setup(size, arm, batch, precision, str(where)), count),
        )
        for arm in arms
        for count in seeds
    ]
    return Rows("stack", out, {}).run(cases, progress)


def _form(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def measure_population(
    setup: Setup,
    seeds: int,
    forms: Sequence[bool],
    rounds: int,
    processes: bool,
    profile: bool,
    progress: Progress,
) -> Row:
    """Return every contender's median, the best of each kind and their ratios, and profiles if requested."""
    device = torch.device(setup.device)
    warnings: dict[str, list[str]] = {}
    contenders = []
    for form in forms:
        for kind, make, given in (("single", setup.single, 0), ("stacked", setup.stacked, seeds)):
            name = f"{kind}, {_form(form)}"
            warnings[name] = []
            contenders.append(Contender(name, partial(make, given, form, warnings[name].append)))
    timed = take_turns(contenders, device, progress, warm=WARM, burst=BURST, rounds=rounds)
    results: dict[str, Row] = {one.name: {"error": one.error} for one in contenders}
    for one in timed:
        count = seeds if one.name.startswith("stacked") else 1
        rates = [count * setup.batch / seconds for seconds in one.times]
        remarks = {"warnings": sorted(set(found))} if (found := warnings[one.name]) else {}
        results[one.name] = {
            "start_seconds": one.start_seconds,
            **remarks,
            "tokens_per_second": statistics.median(rates),
            "all": [round(rate) for rate in rates],
        }
    facts: Row = {}
    if profile:
        progress("profiling", 1.0)
        stacked = (one for one in timed if one.name.startswith("stacked"))
        facts["profile"] = {one.name: kernel_times(one.step, device) for one in stacked}
    for one in contenders:
        one.end()
    return compare_kinds(setup, seeds, results, rounds if processes else 0, progress) | facts


def compare_kinds(setup: Setup, seeds: int, results: Row, rounds: int, progress: Progress) -> Row:
    """Return the best rate of each kind and their ratios; separate processes run as long as `rounds` did, or not for 0."""

    def best(kind: str) -> tuple[float | None, str]:
        rates = [
            (found["tokens_per_second"], name)
            for name, found in results.items()
            if name.startswith(kind) and "tokens_per_second" in found
        ]
        return max(rates, default=(None, ""))

    (stacked, _), (single, name) = best("stacked"), best("single")
    separate = None
    if rounds and single is not None:
        progress(f"{seeds} processes at once", 1.0)
        duration = max(0.2, rounds * BURST * setup.batch / single)
        separate = separate_rate(setup, seeds, duration, name.endswith(_form(True)))
    size = find_shape(setup.size)
    return {
        "results": results,
        "stacked_tokens_per_second": stacked,
        "single_tokens_per_second": single,
        "over_single": stacked / single if stacked and single else None,
        "separate_tokens_per_second": separate,
        "over_separate": stacked / separate if stacked and separate else None,
        "parameters": Decoder.on_meta(size, parse_layout(setup.arm).layers(size.layers)).parameter_count(),
    }


def _disagreement_or_error(setup: Setup, compiled: bool) -> float | str:
    try:
        return disagreement(setup, compile=compiled)
    except Exception as error:
        return in_a_line(error)


def disagreement(setup: Setup, seeds: int = 3, compile: bool = False) -> float:
    """Return the largest relative difference in loss (nats) and gradient norm between a population and separate runs.

    Twenty float32 steps of four sequences each; on a GPU all but the first run as CUDA graphs. Separate runs are not
    compiled. A difference that is not finite raises.
    """
    setup = dataclasses.replace(setup, precision="float32", batch=4 * find_shape(setup.size).context)
    stack = setup.stack(seeds, compile, _reject)
    separate = [setup.trainer(seed, record=True) for seed in range(seeds)]
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


def separate_rate(setup: Setup, count: int, duration: float, compile: bool = False) -> float:
    """Return the total tokens per second of `count` processes, each training one seed for `duration` seconds."""
    given = {"setup": dataclasses.asdict(setup), "compile": compile}
    orders = {seed: given | {"seed": seed} for seed in range(count)}
    with closing(WorkerPool(count, time.monotonic() + _START_SECONDS)) as pool:
        try:
            answers = pool.ask(first_steps, orders)
        except TimeLimitReached:
            answers = [{"error": f"not within {_START_SECONDS:.0f} s"}]
        if reason := next((answer["error"] for answer in answers if "error" in answer), ""):
            raise UserError(
                f"a separate process did not reach its first step ({reason}); leave them out with --no-processes"
            )
        pool.deadline = math.inf
        answers = pool.ask(
            train_alone, {seed: order | {"seconds": duration} for seed, order in orders.items()}
        )
    return sum(float(answer.get("tokens_per_second", math.nan)) for answer in answers)


def first_steps(setup: Row, seed: int, compile: bool) -> Row:
    """Build a single run and do its first steps; called in a worker process."""
    step = _own_step(Setup(**setup), seed, compile)
    for _ in range(WARM):
        step()
    wait(torch.device(setup["device"]))
    return {}


def train_alone(setup: Row, seed: int, compile: bool, seconds: float) -> Row:
    """Return the tokens per second of the run that `first_steps` built in this worker process."""
    step, device = _own_step(Setup(**setup), seed, compile), torch.device(setup["device"])
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(5):
            step()
        wait(device)
        steps += 5
    return {"tokens_per_second": steps * setup["batch"] / (time.perf_counter() - began)}


@cache
def _own_step(setup: Setup, seed: int, compile: bool) -> Step:
    if setup.device == "cpu":
        torch.set_num_threads(1)
    return setup.single(seed, compile)
