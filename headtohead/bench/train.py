"""The training step beside that of peers of the same shape: tokens/s, MFU, memory, and where our time goes.

Contenders stand in one process and take turns, a few steps each; a step is everything a run does between two batches:
data, forward, backward, clipping, optimiser.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headtohead.bench.peers import PEERS, Step, missing, peer_step, version
from headtohead.bench.profile import kernel_times
from headtohead.bench.rows import Rows
from headtohead.common.errors import UserError, unknown
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.kernels import plain
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES, Size
from headtohead.study.environment import choose_device, device_name
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Trainer

# The shapes people train at first, with a 50k vocabulary.
SHAPES = {
    size.name: size
    for size in (
        Size("51m", 512, 8, 8, 1408, 50_257, 512),
        Size("124m", 768, 12, 12, 2048, 50_257, 1024),
        Size("360m", 1024, 24, 16, 2816, 50_257, 1024),
    )
}
# Dense bf16 FLOP/s by the makers' data sheets; a device that is not here has no MFU.
PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
WARM, BURST = 3, 10


def bench_train(
    sizes: Sequence[str] = tuple(SHAPES),
    *,
    arms: Sequence[str] = ("standard",),
    peers: Sequence[str] = PEERS,
    batch: int = 32_768,
    rounds: int = 6,
    precision: str = "bf16",
    device: str = "auto",
    compile: bool | None = None,
    profile: bool = False,
    out: str | Path | None = None,
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> dict[str, Any]:
    """Return the document of the benchmark: one row per size, each contender's medians inside.

    `batch` is tokens per step. `out` keeps every row as soon as it is measured; rows that stand there, measured at this
    commit on this device with these settings, are not measured again.
    """
    if rounds < 1 or batch < 1:
        raise UserError(f"rounds={rounds} and batch={batch} must be at least 1")
    if not arms:
        raise UserError("arms: at least one is needed, such as standard")
    shapes = [find_shape(name) for name in sizes]
    where = choose_device(device)
    compiled = where.type == "cuda" if compile is None else compile
    lacking = {name: words for name in peers if (words := missing(name))}
    present = [name for name in peers if name not in lacking]
    rows = Rows("train", out, {"peers": {name: version(name) for name in present}, "missing": lacking})
    for place, size in enumerate(shapes):
        if batch % size.context:
            raise UserError(f"batch={batch} tokens per step is not a multiple of the context {size.context}")
        facts: dict[str, Any] = {
            "size": size.name,
            "dims": size.dims,
            "device": device_name(where),
            "precision": precision,
            "compiled": compiled,
            "tokens_per_step": batch,
            "contenders": [*arms, *present],
            "rounds": rounds,
        }
        if rows.known(facts):
            continue
        row = _Row(size, where, precision, compiled, batch, rounds)

        def show(words: str, share: float, size: Size = size, place: int = place) -> None:
            progress(f"{size.name}: {words}", (place + share) / len(shapes))

        rows.add(facts, row.measure(arms, present, profile, show))
    return rows.document()


def find_shape(name: str) -> Size:
    """Return the size of that name, one of the benchmark's own or of the models'."""
    known = SHAPES | SIZES
    if name not in known:
        raise unknown("size", name, known)
    return known[name]


def random_windows(size: Size, count: int, seed: int) -> Windows:
    """Return windows over random tokens, the same ones for every seed in an order of its own."""
    tokens = np.random.default_rng(0).integers(0, size.vocabulary, (count + 1) * size.context)
    tokens = tokens.astype(np.uint16 if size.vocabulary <= 2**16 else np.uint32)
    return Windows(Split(tokens, np.zeros(1, dtype=np.uint64), len(tokens)), size.context, seed)


class _Row:
    """The contenders at one size."""

    def __init__(
        self, size: Size, device: torch.device, precision: str, compiled: bool, batch: int, rounds: int
    ) -> None:
        self.size, self.device, self.precision, self.compiled = size, device, precision, compiled
        self.batch, self.rounds = batch, rounds

    def measure(
        self,
        arms: Sequence[str],
        peers: Sequence[str],
        profile: bool,
        progress: Callable[[str, float], None],
    ) -> dict[str, Any]:
        """Return medians and memory of every contender, ratios to the first arm, and its profile where asked."""
        names, steps, held, starts = [*arms, *peers], {}, {}, {}
        for place, name in enumerate(names):
            progress(f"{name}: building{' and compiling' if self.compiled else ''}", 0.5 * place / len(names))
            before, began = self._allocated(), time.perf_counter()
            steps[name] = self._step(name, name in arms)
            for _ in range(WARM):
                steps[name]()
            self._wait()
            starts[name] = time.perf_counter() - began
            held[name] = self._allocated() - before
        memory = {name: self._peak(steps[name], held[name]) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self.rounds):
            for name in names:
                progress(f"{name}: round {turn + 1} of {self.rounds}", 0.5 + 0.5 * turn / self.rounds)
                times[name].append(self._seconds(steps[name]))
        progress(f"{arms[0]}: comparing the fast path with the plain one", 1.0)
        error = self._disagreement(arms[0])
        found = kernel_times(steps[arms[0]], self.device) if profile else None
        steps.clear()
        gc.collect()
        facts = self._facts(arms, peers, times, memory, starts) | {"gradient_error": error}
        return facts | ({"profile": found} if found else {})

    def _facts(
        self,
        arms: Sequence[str],
        peers: Sequence[str],
        times: dict[str, list[float]],
        memory: dict[str, int | None],
        starts: dict[str, float],
    ) -> dict[str, Any]:
        first = arms[0]
        result: dict[str, Any] = {}
        for name, seconds in times.items():
            rate = self.batch / statistics.median(seconds)
            # The ratio of each round, then its median: what disturbs the machine disturbs both sides of a round.
            ratios = [theirs / ours for ours, theirs in zip(times[first], seconds, strict=True)]
            flops = self._flops(name if name in arms else first)
            peak = PEAK.get(device_name(self.device)) if self.precision == "bf16" else None
            result[name] = {
                "tokens_per_second": rate,
                "milliseconds": 1e3 * statistics.median(seconds),
                "milliseconds_all": [round(1e3 * value, 3) for value in seconds],
                "first_over_this": statistics.median(ratios),
                "mfu": None if peak is None else flops * rate / peak,
                "peak_bytes": memory[name],
                "start_seconds": round(starts[name], 1),
            }
        better = min(peers, key=lambda name: statistics.median(times[name]), default=None)
        ours, theirs = memory[first], memory.get("transformers")
        return {
            "results": result,
            "parameters": Decoder.outline(self.size, self._layers(first)).parameter_count(),
            "better_peer": better,
            "over_better_peer": None if better is None else result[better]["first_over_this"],
            "memory_over_transformers": ours / theirs if ours and theirs else None,
        }

    def _disagreement(self, arm: str) -> float:
        """Return how far the gradients of the fast path are from the plain one's in float32, by relative norm.

        Two layers and two sequences of this shape, in this precision: a fast step that is wrong is worth nothing.
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
        """Return training FLOPs per token, causal attention counted by the keys seen."""
        model = Decoder.outline(self.size, self._layers(arm))
        return 3.0 * model.flops(self.size.context, self.batch // self.size.context).causal

    def _layers(self, arm: str) -> Any:
        return parse_layout(arm).layers(self.size.layers)

    def _step(self, name: str, ours: bool) -> Step:
        size, sequences = self.size, self.batch // self.size.context
        if not ours:
            return peer_step(name, size, sequences, self.device, self.precision == "bf16", self.compiled)
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
        """Return the time of one step among a few done one behind the other."""
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
        """Return the most bytes that a contender holds during its step; what the others hold is taken off."""
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
