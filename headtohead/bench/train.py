"""Benchmark of the training step against peers of the same shape: tokens/s, MFU, memory and kernel times.

Contenders share one process and take turns, a few steps each. A step includes data, forward, backward, clipping and
optimizer. A failed contender is recorded with the reason, and the others continue.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headtohead.bench.clock import wait
from headtohead.bench.harness import Case, Contender, Progress, Row, Rows, Step, silent, take_turns
from headtohead.bench.peers import PEERS, missing, peer_step
from headtohead.bench.profile import kernel_times
from headtohead.bench.worker_pool import WorkerPool
from headtohead.common.errors import UserError, unknown
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.kernels import plain
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES, Size
from headtohead.study.environment import choose_device, device_name
from headtohead.study.plan.budgets import TOLERANCE, match_params
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Hooks, Trainer

# Common small model shapes with a 50k vocabulary.
SHAPES = {
    size.name: size
    for size in (
        Size("51m", 512, 8, 8, 1408, 50_257, 512),
        Size("124m", 768, 12, 12, 2048, 50_257, 1024),
        Size("360m", 1024, 24, 16, 2816, 50_257, 1024),
    )
}
# Dense bf16 FLOP/s from data sheets; other devices have no MFU.
PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
WARM, BURST = 3, 10
SHAPE_RULES = ("as_is", "params")


def bench_train(
    sizes: Sequence[str] = tuple(SHAPES),
    *,
    arms: Sequence[str] = ("standard",),
    peers: Sequence[str] = PEERS,
    contexts: Sequence[int] = (),
    shape: str = "as_is",
    batch: int = 32_768,
    rounds: int = 6,
    precision: str = "bf16",
    device: str = "auto",
    compile: bool | None = None,
    warm: bool = False,
    profile: bool = False,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> Row:
    """Return the benchmark document: one row per size and context with the medians of each contender.

    Without `contexts` each size uses its own. `shape` is `as_is`, or `params`: the feed-forward width of every other arm is
    solved so that its parameters equal the first arm's, at the roundest width within 0.5 %. `batch` is tokens per step.
    `warm` first compiles all contenders in parallel processes to fill the compile cache. `out` stores each row as soon as
    it is measured; rows stored for this commit, device and settings are reused.
    """
    if rounds < 1 or batch < 1:
        raise UserError(f"rounds={rounds} and batch={batch} must be at least 1")
    if shape not in SHAPE_RULES:
        raise unknown("shape rule", shape, SHAPE_RULES)
    where = choose_device(device)
    compiled = where.type == "cuda" if compile is None else compile
    lacking = {name: reason for name in peers if (reason := missing(name))}
    present = [name for name in peers if name not in lacking]
    cases: dict[Contest, Case] = {}
    for size in map(find_shape, sizes):
        check_arms(arms, size)
        for context in contexts or (size.context,):
            if batch % context:
                raise UserError(f"batch={batch} tokens per step is not a multiple of the context {context}")
            settings = (tuple(arms), shape, str(where), precision, compiled, batch)
            contest = Contest(size.name, context, *settings)
            cases[contest] = Case(
                contest.facts() | {"contenders": [*arms, *present], "rounds": rounds},
                f"{size.name}, context {context}",
                partial(contest.measure, present, rounds, profile),
            )
    peer_versions = {name: metadata.version(name) for name in present}
    rows = Rows("train", out, {"peers": peer_versions, "missing": lacking})
    if warm and compiled:
        todo = rows.missing(cases.values())
        contests = [dataclasses.asdict(contest) for contest, case in cases.items() if case in todo]
        names = (*arms, *present)
        orders = [{"contest": contest, "name": name} for contest in contests for name in names]
        compile_in_parallel(orders, progress)
    return rows.run(cases.values(), progress)


def check_arms(arms: Sequence[str], size: Size) -> None:
    """Raise if there is no arm, or one that cannot fill the layers of this size."""
    if not arms:
        raise UserError("arms must name at least one arm, such as standard")
    for arm in arms:
        parse_layout(arm).layers(size.layers)


def find_shape(name: str) -> Size:
    """Return a size by name, from the benchmark's shapes or the model sizes."""
    known = SHAPES | SIZES
    if name not in known:
        raise unknown("size", name, known)
    return known[name]


def compile_in_parallel(orders: Sequence[Row], progress: Progress) -> None:
    """Fill the compile cache with one process per core. What fails here fails again, and is recorded, when measured."""
    with closing(WorkerPool(min(len(orders), os.cpu_count() or 1))) as pool:
        pool.map(first_step, orders, progress)


def first_step(contest: Row, name: str) -> Row:
    """Do the first step of one contender, which compiles it; called in a worker process."""
    torch.compiler.reset()
    Contest(**contest).step(name)()
    wait(torch.device(contest["device"]))
    return {}


def rounder(size: Size, layers: Sequence[Composed], target: int) -> Size:
    """Return the size with the roundest feed-forward width within the tolerance.

    An odd width misaligns rows of 16-bit numbers for the tensor cores, which is not a cost of the mechanism.
    """
    for multiple in (64, 32, 16, 8):
        width = multiple * max(1, round(size.ffn / multiple))
        near = dataclasses.replace(size, ffn=width)
        if abs(Decoder.on_meta(near, layers).parameter_count() - target) <= TOLERANCE * target:
            return near
    return size


def random_windows(size: Size, count: int, seed: int) -> Windows:
    """Return windows over random tokens: the same tokens for every seed, in a seed-specific order."""
    tokens = np.random.default_rng(0).integers(0, size.vocabulary, (count + 1) * size.context)
    tokens = tokens.astype(np.uint16 if size.vocabulary <= 2**16 else np.uint32)
    return Windows(Split(tokens, np.zeros(1, dtype=np.uint64), len(tokens)), size.context, seed)


def random_trainer(
    size: Size,
    arm: str,
    batch: int,
    precision: str,
    device: str,
    *,
    seed: int = 0,
    compile: bool = False,
    record: bool = False,
    warn: Callable[[str], None] = lambda message: None,
    **settings: Any,
) -> Trainer:
    """Return the trainer of an arm on random tokens; `batch` is tokens per step."""
    windows = random_windows(size, 8 * (batch // size.context), seed)
    model = Decoder(size, parse_layout(arm).layers(size.layers), seed, companion=windows.tokens).to(device)
    chosen = TrainSettings(tokens=10**12, batch=batch, precision=precision, **settings)  # type: ignore[arg-type]
    trainer = Trainer(model, windows, chosen, record=record, compile=compile, hooks=Hooks(warn=warn))
    model.train()
    return trainer


def step_of(trainer: Trainer) -> Step:
    """Return a function that does one step of a trainer."""

    def step() -> None:
        trainer._one_step()
        trainer.step += 1

    return step


@dataclass(frozen=True)
class Contest:
    """The arms at one size and context, and their training settings."""

    size: str
    context: int
    arms: Sequence[str]
    rule: str
    """How the shape of other arms follows from the first: one of SHAPE_RULES."""
    device: str
    precision: str
    compiled: bool
    batch: int
    """Tokens per step."""

    @property
    def shape(self) -> Size:
        """The size of the first arm and of peers."""
        return dataclasses.replace(find_shape(self.size), context=self.context)

    def facts(self) -> Row:
        """Return the fields that identify a row."""
        return {
            "size": self.size,
            "dims": self.shape.dims,
            "shape": self.rule,
            "device": device_name(torch.device(self.device)),
            "precision": self.precision,
            "compiled": self.compiled,
            "tokens_per_step": self.batch,
        }

    def measure(self, peers: Sequence[str], rounds: int, profile: bool, progress: Progress) -> Row:
        """Return medians and memory of every contender, ratios to the first arm, and its profile if requested."""
        contenders = [Contender(name, partial(self.step, name)) for name in (*self.arms, *peers)]
        device, first = torch.device(self.device), contenders[0]
        timed = take_turns(contenders, device, progress, warm=WARM, burst=BURST, rounds=rounds)
        error, found = None, None
        if not first.error:
            progress(f"{first.name}: comparing the fast path with the plain reference", 1.0)
            error = self._disagreement(first.name)
            found = kernel_times(first.step, device) if profile else None
        for one in contenders:
            one.end()
        row = self._row(contenders, timed) | {"gradient_error": error}
        return row | ({"profile": found} if found else {})

    def step(self, name: str) -> Step:
        """Return one training step of an arm or a peer."""
        if name in self.arms:
            size, settings = self._solved(name), (self.batch, self.precision, self.device)
            return step_of(random_trainer(size, name, *settings, compile=self.compiled))
        sequences, bf16 = self.batch // self.context, self.precision == "bf16"
        return peer_step(name, self.shape, sequences, torch.device(self.device), bf16, self.compiled)

    def _row(self, contenders: Sequence[Contender], timed: Sequence[Contender]) -> Row:
        first = contenders[0]
        result = {
            one.name: {"error": one.error} if one.error else self._result(one, first) for one in contenders
        }
        peers = [one for one in timed if one.name not in self.arms]
        better = min(peers, key=lambda one: statistics.median(one.times), default=None)
        theirs = next((one.peak_bytes for one in peers if one.name == "transformers"), None)
        return {
            "results": result,
            "parameters": self._on_meta(first.name).parameter_count(),
            "better_peer": None if better is None else better.name,
            "over_better_peer": None if better is None else result[better.name]["first_over_this"],
            "memory_over_transformers": first.peak_bytes / theirs if first.peak_bytes and theirs else None,
        }

    def _result(self, one: Contender, first: Contender) -> Row:
        rate = self.batch / statistics.median(one.times)
        ratio = None
        if not first.error:
            # Median of per-round ratios: noise on the machine affects both sides of a round.
            pairs = zip(first.times, one.times, strict=True)
            ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        arm = one.name if one.name in self.arms else first.name
        model = self._on_meta(arm)
        # Causal attention is counted by visible keys.
        flops = 3.0 * model.flops(self.context, self.batch // self.context).causal
        peak = PEAK.get(device_name(torch.device(self.device))) if self.precision == "bf16" else None
        return {
            "tokens_per_second": rate,
            "milliseconds": 1e3 * statistics.median(one.times),
            "milliseconds_all": [round(1e3 * value, 3) for value in one.times],
            "first_over_this": ratio,
            "mfu": None if peak is None else flops * rate / peak,
            "peak_bytes": one.peak_bytes,
            "start_seconds": one.start_seconds,
            "parameters": model.parameter_count(),
            "ffn": model.size.ffn,
        }

    def _disagreement(self, arm: str) -> float:
        """Return the relative norm of the gradient error of the fast path against the plain float32 path.

        Uses two layers and two sequences of this shape in this precision.
        """
        size = dataclasses.replace(self.shape, layers=2)
        tokens = torch.randint(0, size.vocabulary, (2, size.context + 1), device=self.device)
        model = Decoder(size, self._layers(arm)[:2], seed=1, companion=tokens.flatten().tolist())
        model = model.to(self.device)
        found = []
        for path, bf16 in ((nullcontext(), self.precision == "bf16"), (plain(), False)):
            model.zero_grad()
            with path, torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
                model(tokens[:, :-1], tokens[:, 1:])[0].backward()
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            found.append(torch.cat([grad.flatten() for grad in grads]).double())
        return float((found[0] - found[1]).norm() / found[1].norm())

    def _layers(self, arm: str) -> Any:
        return parse_layout(arm).layers(self.shape.layers)

    def _on_meta(self, arm: str) -> Decoder:
        return Decoder.on_meta(self._solved(arm), self._layers(arm))

    def _solved(self, arm: str) -> Size:
        """Return the size of an arm under the shape rule; the first arm and peers use the contest's size."""
        first = self.arms[0]
        if self.rule == "as_is" or arm == first:
            return self.shape
        target = Decoder.on_meta(self.shape, self._layers(first)).parameter_count()
        return rounder(match_params(self.shape, self._layers(arm), target), self._layers(arm), target)
