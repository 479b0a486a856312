"""Benchmark of the training step against peers of the same shape: tokens/s, MFU, memory and kernel times.

Contenders share one process and alternate, a few steps each. A step includes data, forward, backward, clipping and
optimizer. A failed contender is recorded with the reason, and the others continue.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headtohead.bench.compile_cache import warm as warm_up
from headtohead.bench.peers import PEERS, Step, missing, peer_step, version
from headtohead.bench.profile import kernel_times
from headtohead.bench.rows import Rows, in_a_line
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
from headtohead.training.trainer import Trainer

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
    progress: Callable[[str, float], None] = lambda message, share: None,
) -> dict[str, Any]:
    """Return the benchmark document: one row per size and context with the medians of each contender.

    Without `contexts` each size uses its own. `shape` is `as_is`, or `params`: the feed-forward width of every other arm is
    solved so that its parameters equal the first arm's, at the roundest width within 0.5 %. `batch` is tokens per step.
    `warm` first compiles all contenders in parallel processes to fill the compile cache. `out` stores each row as soon as
    it is measured; rows stored for this commit, device and settings are reused.
    """
    if rounds < 1 or batch < 1:
        raise UserError(f"rounds={rounds} and batch={batch} must be at least 1")
    if not arms:
        raise UserError("arms must name at least one arm, such as standard")
    if shape not in SHAPE_RULES:
        raise unknown("shape rule", shape, SHAPE_RULES)
    named = [find_shape(name) for name in sizes]
    shapes = [
        dataclasses.replace(size, context=context)
        for size in named
        for context in (contexts or (size.context,))
    ]
    where = choose_device(device)
    compiled = where.type == "cuda" if compile is None else compile
    lacking = {name: reason for name in peers if (reason := missing(name))}
    present = [name for name in peers if name not in lacking]
    rows = Rows("train", out, {"peers": {name: version(name) for name in present}, "missing": lacking})
    todo: list[tuple[dict[str, Any], _Row]] = []
    for size in shapes:
        if batch % size.context:
            raise UserError(f"batch={batch} tokens per step is not a multiple of the context {size.context}")
        for arm in arms:
            parse_layout(arm).layers(size.layers)
        facts: dict[str, Any] = {
            "size": size.name,
            "dims": size.dims,
            "shape": shape,
            "device": device_name(where),
            "precision": precision,
            "compiled": compiled,
            "tokens_per_step": batch,
            "contenders": [*arms, *present],
            "rounds": rounds,
        }
        if not rows.known(facts):
            todo.append((facts, _Row(size, arms, shape, where, precision, compiled, batch, rounds)))
    if warm and compiled:
        orders = [row.order(name) for _, row in todo for name in (*arms, *present)]
        warm_up("headtohead.bench.train", orders, progress)
    for index, (facts, row) in enumerate(todo):

        def show(message: str, share: float, row: _Row = row, index: int = index) -> None:
            progress(f"{row.size.name}, context {row.size.context}: {message}", (index + share) / len(todo))

        rows.add(facts, row.measure(present, profile, show))
    return rows.document()


def find_shape(name: str) -> Size:
    """Return a size by name, from the benchmark's shapes or the model sizes."""
    known = SHAPES | SIZES
    if name not in known:
        raise unknown("size", name, known)
    return known[name]


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


def _nothing() -> None:
    """Placeholder step of a contender that is not built, failed or finished."""


@dataclass
class _Contender:
    """Measurements of one contender."""

    name: str
    step: Step = _nothing
    error: str = ""
    """Why it failed; empty if it did not."""
    start_seconds: float = 0.0
    held: int = 0
    memory: int | None = None
    times: list[float] = field(default_factory=list)


def _working(contenders: Sequence[_Contender]) -> list[_Contender]:
    return [one for one in contenders if not one.error]


class _Row:
    """The contenders at one size."""

    def __init__(
        self,
        size: Size,
        arms: Sequence[str],
        shape: str,
        device: torch.device,
        precision: str,
        compiled: bool,
        batch: int,
        rounds: int,
    ) -> None:
        self.size, self.arms, self.shape = size, tuple(arms), shape
        self.device, self.precision, self.compiled = device, precision, compiled
        self.batch, self.rounds = batch, rounds

    def order(self, name: str) -> dict[str, Any]:
        """Return the arguments another process needs to build this contender."""
        return {
            "size": self.size.name,
            "context": self.size.context,
            "arms": self.arms,
            "shape": self.shape,
            "device": str(self.device),
            "precision": self.precision,
            "batch": self.batch,
            "name": name,
        }

    def measure(
        self, peers: Sequence[str], profile: bool, progress: Callable[[str, float], None]
    ) -> dict[str, Any]:
        """Return medians and memory of every contender, ratios to the first arm, and its profile if requested."""
        contenders = [_Contender(name) for name in (*self.arms, *peers)]
        for index, one in enumerate(contenders):
            stage = "building and compiling" if self.compiled else "building"
            progress(f"{one.name}: {stage}", 0.5 * index / len(contenders))
            with self._attempt(one):
                self._start(one)
        for one in _working(contenders):
            with self._attempt(one):
                one.memory = self._peak(one.step, one.held)
        for done in range(self.rounds):
            for one in _working(contenders):
                progress(f"{one.name}: round {done + 1} of {self.rounds}", 0.5 + 0.5 * done / self.rounds)
                with self._attempt(one):
                    one.times.append(self._seconds(one.step))
        first, error, found = contenders[0], None, None
        if not first.error:
            progress(f"{first.name}: comparing the fast path with the plain reference", 1.0)
            error = self._disagreement(first.name)
            found = kernel_times(first.step, self.device) if profile else None
        for one in contenders:
            one.step = _nothing
        self._release()
        facts = self._facts(contenders) | {"gradient_error": error}
        return facts | ({"profile": found} if found else {})

    @contextmanager
    def _attempt(self, one: _Contender) -> Iterator[None]:
        """On failure record the reason and release the contender's memory."""
        try:
            yield
        except Exception as error:
            one.error = in_a_line(error)
            one.step = _nothing
            self._release()

    def _start(self, one: _Contender) -> None:
        before, began = self._allocated(), time.perf_counter()
        one.step = self._step(one.name)
        for _ in range(WARM):
            one.step()
        self._wait()
        one.start_seconds = time.perf_counter() - began
        one.held = self._allocated() - before

    def _facts(self, contenders: Sequence[_Contender]) -> dict[str, Any]:
        first = contenders[0]
        result = {
            one.name: {"error": one.error} if one.error else self._result(one, first) for one in contenders
        }
        peers = [one for one in _working(contenders) if one.name not in self.arms]
        better = min(peers, key=lambda one: statistics.median(one.times), default=None)
        theirs = next((one.memory for one in peers if one.name == "transformers"), None)
        return {
            "results": result,
            "parameters": self._on_meta(first.name).parameter_count(),
            "better_peer": None if better is None else better.name,
            "over_better_peer": None if better is None else result[better.name]["first_over_this"],
            "memory_over_transformers": first.memory / theirs if first.memory and theirs else None,
        }

    def _result(self, one: _Contender, first: _Contender) -> dict[str, Any]:
        rate = self.batch / statistics.median(one.times)
        ratio = None
        if not first.error:
            # Median of per-round ratios: noise on the machine affects both sides of a round.
            pairs = zip(first.times, one.times, strict=True)
            ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        arm = one.name if one.name in self.arms else first.name
        peak = PEAK.get(device_name(self.device)) if self.precision == "bf16" else None
        return {
            "tokens_per_second": rate,
            "milliseconds": 1e3 * statistics.median(one.times),
            "milliseconds_all": [round(1e3 * value, 3) for value in one.times],
            "first_over_this": ratio,
            "mfu": None if peak is None else self._flops(arm) * rate / peak,
            "peak_bytes": one.memory,
            "start_seconds": round(one.start_seconds, 1),
            "parameters": self._on_meta(arm).parameter_count(),
            "ffn": self._solved(arm).ffn,
        }

    def _disagreement(self, arm: str) -> float:
        """Return the relative norm of the gradient error of the fast path against the plain float32 path.

        Uses two layers and two sequences of this shape in this precision.
        """
        size = dataclasses.replace(self.size, layers=2)
        tokens = torch.randint(0, size.vocabulary, (2, size.context + 1), device=self.device)
        model = Decoder(size, self._layers(arm)[:2], seed=1, companion=tokens.flatten().tolist())
        model = model.to(self.device)
        found = []
        for path, bf16 in ((nullcontext(), self.precision == "bf16"), (plain(), False)):
            model.zero_grad()
            with path, torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
                model(tokens[:, :-1], tokens[:, 1:])[0].backward()
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            found.append(torch.cat([grad.flatten() for grad in grads]).double())
        return float((found[0] - found[1]).norm() / found[1].norm())

    def _flops(self, arm: str) -> float:
        """Return training FLOPs per token, with causal attention counted by visible keys."""
        return 3.0 * self._on_meta(arm).flops(self.size.context, self.batch // self.size.context).causal

    def _layers(self, arm: str) -> Any:
        return parse_layout(arm).layers(self.size.layers)

    def _on_meta(self, arm: str) -> Decoder:
        return Decoder.on_meta(self._solved(arm), self._layers(arm))

    def _solved(self, arm: str) -> Size:
        """Return the size of an arm under the shape rule; the first arm and peers use the row's size."""
        first = self.arms[0]
        if self.shape == "as_is" or arm == first:
            return self.size
        target = Decoder.on_meta(self.size, self._layers(first)).parameter_count()
        return rounder(match_params(self.size, self._layers(arm), target), self._layers(arm), target)

    def _step(self, name: str) -> Step:
        sequences = self.batch // self.size.context
        if name not in self.arms:
            return peer_step(name, self.size, sequences, self.device, self.precision == "bf16", self.compiled)
        size = self._solved(name)
        windows = random_windows(size, 8 * sequences, seed=0)
        model = Decoder(size, self._layers(name), seed=0, companion=windows.tokens).to(self.device)
        settings = TrainSettings(tokens=10**12, batch=self.batch, precision=self.precision)  # type: ignore[arg-type]
        trainer = Trainer(model, windows, settings, compile=self.compiled)
        model.train()

        def step() -> None:
            trainer._one_step()
            trainer.step += 1

        return step

    def _seconds(self, step: Step) -> float:
        """Return the mean seconds of `BURST` consecutive steps."""
        self._wait()
        if self.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(BURST):
                step()
            return (time.perf_counter() - began) / BURST
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(BURST):
            step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / BURST

    def _peak(self, step: Step, held: int) -> int | None:
        """Return the peak bytes of a contender during its step, without what the others hold."""
        if self.device.type != "cuda":
            return None
        others = self._allocated() - held
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        self._wait()
        return torch.cuda.max_memory_allocated(self.device) - others

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    """Run one of the parallel compile processes: do the first step of one contender."""
    order = json.load(sys.stdin)
    size = dataclasses.replace(find_shape(order["size"]), context=order["context"])
    device, precision, batch = torch.device(order["device"]), order["precision"], order["batch"]
    row = _Row(size, order["arms"], order["shape"], device, precision, True, batch, rounds=1)
    row._step(order["name"])()
    row._wait()


if __name__ == "__main__":
    main()
