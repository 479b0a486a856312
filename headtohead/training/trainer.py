"""The training loop, and the trainer of one run: steps, logging, checkpoints, exact resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headtohead.common.errors import UnreadableFile
from headtohead.data.windows import Windows
from headtohead.model.decoder import Decoder
from headtohead.training.batches import BatchSource, Part, WindowBatches, micro_batches
from headtohead.training.checkpoint import (
    KEPT,
    Checkpoint,
    checkpoint_path,
    latest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from headtohead.training.circuit_log import CircuitLog
from headtohead.training.compile_cache import use_compile_cache
from headtohead.training.cuda_graph import CudaGraphStep
from headtohead.training.optimizer import make_optimizer, optimizer_tensors, restore_optimizer, set_rates
from headtohead.training.settings import TrainSettings

# A loss above this many times that of a uniform guess counts as diverged.
_LOST = 2.0
LOGGED_POINTS = 200


@dataclass
class Outcome:
    """How a call to `Trainer.run` ended."""

    status: str
    """done, stopped or diverged."""
    step: int
    train_nats: float
    """Mean nats of the last logged interval."""
    diverged_at: int | None = None


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the trainer."""

    log: Callable[[dict[str, Any]], None] = lambda row: None
    progress: Callable[[int, float, float], None] = lambda step, nats, rate: None
    """Called with steps done, mean nats and tokens per second."""
    stop: Callable[[], bool] = lambda: False
    """Called after every step; True saves a checkpoint and stops training."""
    evaluate: Callable[[], dict[str, Any]] | None = None
    """Returns scores by split for evaluations during training; the trainer can still be saved if it raises."""
    rewind: Callable[[int], None] = lambda step: None
    """Called before resuming: rows logged after this step, and its evaluation, will be repeated."""
    warn: Callable[[str], None] = lambda message: None
    compiling: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered for the first step of a compiled model, which may take a minute."""


@dataclass(frozen=True)
class Branching:
    """The checkpoints that a trunk shares with its branches."""

    start: Path | None = None
    """The checkpoint from which a branch starts."""
    trunk: str = ""
    """The name of the run that wrote it."""
    marks: frozenset[int] = frozenset()
    """The steps at which a trunk keeps a checkpoint for a branch."""
    folder: Path | None = None
    """The directory in which it keeps them."""


class Runs(Protocol):
    """Runs that take every step together: a single `Trainer`, or the rows of a `PopulationTrainer`."""

    compiled: bool

    @property
    def members(self) -> Sequence[Trainer]:
        """The trainer of each run."""

    def resume(self) -> None:
        """Continue from the newest step of which every run has a checkpoint, or start from step 0."""

    def one_step(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        """Do one step; return the mean nats and the gradient norm of each run, still on the device."""

    def save(self, ended: Collection[int] = ()) -> None:
        """Write a checkpoint of every run that has not ended."""


def train(
    runs: Runs,
    stop: Callable[[], bool],
    save_every: float,
    ended: Callable[[int, Outcome], None] = lambda index, outcome: None,
) -> list[Outcome]:
    """Train runs to the end, or until stopped; `ended` is called as soon as one diverges."""
    members, first = runs.members, runs.members[0]
    runs.resume()
    for member in members:
        member.begin()
    outcomes: dict[int, Outcome] = {}
    status, saved, compiling = "done", time.monotonic(), runs.compiled
    while first.step < first.steps:
        for index, member in enumerate(members):
            if index not in outcomes:
                member.evaluate()
        results = _compiled_step(runs) if compiling else runs.one_step()
        compiling = False
        for index, (member, *found) in enumerate(zip(members, *results, strict=True)):
            # A diverged run is still computed with the others; its results are ignored.
            if index in outcomes:
                member.step += 1
            elif (outcome := member.after_step(*found)) is not None:
                outcomes[index] = outcome
                ended(index, outcome)
        if first.step == first.steps or len(outcomes) == len(members):
            break
        stopped = stop()
        if stopped or time.monotonic() - saved >= save_every:
            runs.save(outcomes)
            saved = time.monotonic()
        if stopped:
            status = "stopped"
            break
    ends = (Outcome(status, member.step, member.train_nats) for member in members)
    return [outcomes.get(index, end) for index, end in enumerate(ends)]


def _compiled_step(runs: Runs) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
    """Do the first step of a compiled model; its seconds count as compiling, not as training."""
    began = time.monotonic()
    with runs.members[0].hooks.compiling():
        nats, norms = map(list, runs.one_step())
        nats[0].item()  # waits for the device
    seconds = time.monotonic() - began
    for member in runs.members:
        member.exclude(seconds)
    return nats, norms


def timed_step(runs: Runs, clock: Callable[[], float] = time.perf_counter) -> float:
    """Do one step and return the seconds it took, including the device's work."""
    device = runs.members[0].device
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    for member in runs.members:
        member.model.train()
    wait()
    began = clock()
    runs.one_step()
    wait()
    seconds = clock() - began
    for member in runs.members:
        member.step += 1
    return seconds


def resume(members: Sequence[Trainer]) -> None:
    """Load the newest step of which every run has a checkpoint, or start all from step 0."""
    found = [member.checkpoint() for member in members]
    while len(steps := {0 if checkpoint is None else checkpoint.step for checkpoint in found}) > 1:
        newest = min(steps) + 1
        found = [
            member.checkpoint(newest) if checkpoint is not None and checkpoint.step >= newest else checkpoint
            for member, checkpoint in zip(members, found, strict=True)
        ]
    for member, checkpoint in zip(members, found, strict=True):
        member.load(checkpoint)


class Trainer:
    """Trains one model on one order of windows, or on another source of batches."""

    def __init__(
        self,
        model: Decoder,
        windows: Windows | BatchSource,
        settings: TrainSettings,
        *,
        micro: int = 0,
        folder: Path | None = None,
        save_every: float = 60.0,
        hooks: Hooks = Hooks(),  # noqa: B008  a frozen value
        compile: bool = False,
        record: bool = False,
        name: str = "",
        branching: Branching = Branching(),  # noqa: B008  a frozen value
        log_circuits: bool = False,
        sharing: int = 1,
    ) -> None:
        self.model, self.settings, self.hooks = model, settings, hooks
        self.batches: BatchSource = (
            WindowBatches(windows, settings, model.size.vocabulary)
            if isinstance(windows, Windows)
            else windows
        )
        self.steps, self.sequences = self.batches.steps, self.batches.sequences
        self.micro = min(micro or self.sequences, self.sequences)
        self.device = model.readout.device
        self.folder, self.save_every, self.name = folder, save_every, name
        self.branching, self.sharing = branching, sharing
        log_circuits = log_circuits or bool(settings.circuit_lr)
        # The circuit log reads gradients inside the step, which a replayed graph does not allow.
        record = record and self.device.type == "cuda" and not log_circuits
        self.optimizer = make_optimizer(model, settings, record)
        self._graphed = CudaGraphStep(self._step_on, self.device, hooks.warn) if record else None
        self.log_every = max(1, self.steps // LOGGED_POINTS)
        self.circuits = CircuitLog(model, self.optimizer, settings, self.steps) if log_circuits else None
        self.step = 0
        self.seconds = self.own_seconds = self.compile_seconds = 0.0
        self.train_nats = float("nan")
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._began, self._shown = 0.0, (0, 0.0)
        self.compiled = compile
        if compile:
            use_compile_cache(hooks.warn)
            model.compile_hidden()

    @property
    def members(self) -> Sequence[Trainer]:
        """This run alone."""
        return [self]

    def run(self) -> Outcome:
        """Train until the end, a stop request or divergence; resume from a checkpoint if there is one."""
        (outcome,) = train(self, self.hooks.stop, self.save_every)
        return outcome

    def resume(self) -> None:
        """Resume from the newest checkpoint, or start from step 0."""
        resume([self])

    def begin(self) -> None:
        """Start the clock."""
        self.model.train()
        self._began = time.monotonic() - self.seconds
        self._shown = self.step, time.monotonic()

    def exclude(self, seconds: float) -> None:
        """Count seconds since the start as compiling, of which rows of a population have equal shares."""
        self._began += seconds
        self.compile_seconds += seconds / self.sharing

    def one_step(self) -> tuple[list[Tensor], list[Tensor]]:
        """Do one step; return its mean nats and its gradient norm, still on the device."""
        nats, norm = self._one_step()
        return [nats], [norm]

    def after_step(self, nats: Tensor, norm: Tensor) -> Outcome | None:
        """Count a step with these nats and gradient norm; log and keep what is due; return an outcome if it diverged."""
        self._pending.append((nats, norm))
        self.step += 1
        now = time.monotonic()
        seconds = now - self._began
        # Rows of a population share the time of a pass; their number may shrink on resume.
        self.own_seconds += (seconds - self.seconds) / self.sharing
        self.seconds = seconds
        if self.step % self.log_every == 0 or self.step == self.steps:
            diverged = self._log()
            step, since = self._shown
            trained = self.batches.tokens(self.step) - self.batches.tokens(step)
            rate = trained / max(1e-9, now - since)
            self._shown = self.step, now
            self.hooks.progress(self.step, self.train_nats, rate)
            if diverged is not None:
                return Outcome("diverged", self.step, self.train_nats, diverged)
        folder = self.branching.folder if self.step in self.branching.marks else None
        # One that exists is not written again, because the branch may be reading it.
        if folder is not None and not checkpoint_path(folder, self.step).is_dir():
            self._save(folder, None)
        return None

    def evaluate(self) -> None:
        """Score the valid split if due, before the next step; a checkpoint of this step does not contain the score."""
        count = self.settings.evaluations
        due = self.step and (self.step * count) // self.steps > ((self.step - 1) * count) // self.steps
        if due and self.hooks.evaluate:
            self.hooks.log({"step": self.step} | self.hooks.evaluate())

    def timed_step(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Do one step and return the seconds it took, including the device's work."""
        return timed_step(self, clock)

    def save(self, ended: Collection[int] = ()) -> None:
        """Write a checkpoint of everything the rest of the run depends on."""
        if self.folder is not None:
            self._save(self.folder, KEPT)

    def _save(self, folder: Path, kept: int | None) -> None:
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        state = optimizer_tensors(self.model, self.optimizer)
        tensors |= {f"optimiser/{name}": tensor for name, tensor in state.items()}
        tensors["random/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.device)
        for index, rows in enumerate(zip(*self._pending, strict=True)):
            tensors[f"pending/{index}"] = torch.stack(rows)
        facts = {
            "run": self.name,
            "seconds": self.seconds,
            "own_seconds": self.own_seconds,
            "compile_seconds": self.compile_seconds,
            "train_nats": None if math.isnan(self.train_nats) else self.train_nats,
        }
        save_checkpoint(folder, Checkpoint(self.step, tensors, facts | {"micro": self.micro}), kept)

    def checkpoint(self, before: int | None = None) -> Checkpoint | None:
        """Return the checkpoint to resume from (of a step below `before`, if given): this run's newest, or its trunk's."""
        checkpoint: Checkpoint | None = None
        warnings: list[str] = []
        if self.folder:
            checkpoint, warnings = latest_checkpoint(self.folder, self._misfit, before)
        if checkpoint is None and self.branching.start is not None:
            try:
                checkpoint = self._inherited(self.branching.start)
                if before is not None and checkpoint.step >= before:
                    checkpoint = None
            except UnreadableFile as error:
                warnings.append(f"{error}; the trunk's steps are repeated in this run")
        for message in warnings:
            self.hooks.warn(message)
        return checkpoint

    def load(self, checkpoint: Checkpoint | None) -> None:
        """Load a checkpoint, or start from step 0 if None."""
        self.hooks.rewind(checkpoint.step if checkpoint else 0)
        if checkpoint is None:
            return
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in checkpoint.tensors.items():
            group, _, key = name.partition("/")
            groups.setdefault(group, {})[key] = tensor
        self.model.load_state_dict(groups["model"])
        restore_optimizer(self.model, self.optimizer, groups.get("optimiser", {}))
        torch.set_rng_state(groups["random"]["cpu"])
        if self.device.type == "cuda" and "cuda" in groups["random"]:
            torch.cuda.set_rng_state(groups["random"]["cuda"], self.device)
        pending = groups.get("pending", {})
        if {"0", "1"} <= pending.keys():
            columns = (pending[index].to(self.device) for index in ("0", "1"))
            self._pending = list(zip(*columns, strict=True))
        self.step = checkpoint.step
        self.seconds = float(checkpoint.state["seconds"])
        self.own_seconds = float(checkpoint.state.get("own_seconds", self.seconds / self.sharing))
        self.compile_seconds = float(checkpoint.state.get("compile_seconds", 0.0))
        self.micro = int(checkpoint.state["micro"])
        nats = checkpoint.state["train_nats"]
        self.train_nats = float("nan") if nats is None else float(nats)

    def _inherited(self, path: Path) -> Checkpoint:
        """Return the trunk's checkpoint; raise UnreadableFile if it is missing, damaged or of another run."""
        if not path.is_dir():
            raise UnreadableFile(f"the trunk's checkpoint {path} is missing")
        checkpoint = read_checkpoint(path)
        if reason := self._misfit(checkpoint, self.branching.trunk):
            raise UnreadableFile(f"checkpoint {path} does not belong to the trunk: {reason}")
        return checkpoint

    def _misfit(self, checkpoint: Checkpoint, writer: str | None = None) -> str:
        """Return why a checkpoint does not belong to this run, judged by names and shapes, or an empty string."""
        state = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        if checkpoint.step > self.steps:
            return f"it is of step {checkpoint.step}, the run has {self.steps}"
        if missing := sorted({*state, "random/cpu"} - shapes.keys()):
            return f"{missing[0]} is missing"
        if missing := sorted({"run", "seconds", "micro", "train_nats"} - checkpoint.state.keys()):
            return f"{missing[0]} is missing"
        if checkpoint.state["run"] != (self.name if writer is None else writer):
            return f"it is of run {checkpoint.state['run']}"
        parameters = dict(self.model.named_parameters())
        for name, shape in shapes.items():
            group, _, key = name.partition("/")
            if group == "model" and (name not in state or state[name].shape != shape):
                return f"{name} is {tuple(shape)}"
            if group == "optimiser":
                owner = parameters.get(key.rpartition("/")[0])
                if owner is None or (len(shape) and owner.shape != shape):
                    return f"{name} is {tuple(shape)}"
        return ""

    def _one_step(self) -> tuple[Tensor, Tensor]:
        """Do one step; return its mean nats and gradient norm, still on the device."""
        set_rates(self.optimizer, self.step, self.steps)
        if self._graphed is None:
            return self._whole_step(lambda: self.batches.parts(self.step, self.micro))
        (whole,) = self.batches.parts(self.step, self.sequences)
        whole = whole.on(self.device)
        return self._graphed(whole.tokens, whole.targets)

    def _step_on(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Do one step on a batch that is already on the device; a CUDA graph captures this function."""
        # A failed capture leaves uncomputed gradients behind.
        self.optimizer.zero_grad(set_to_none=True)
        return self._whole_step(lambda: micro_batches(tokens, targets, self.micro))

    def _whole_step(self, parts: Callable[[], Iterator[Part]]) -> tuple[Tensor, Tensor]:
        """Do one step in micro-batches; on a GPU the host does not wait."""
        while True:
            try:
                nats = self._backward(parts())
                break
            except torch.OutOfMemoryError as error:
                self.halve_micro(error)
                self.optimizer.zero_grad(set_to_none=True)
        if self.circuits and self.logs_next:
            self.circuits.record_gradients()
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return nats, norm

    @property
    def logs_next(self) -> bool:
        """Whether the current step will be logged."""
        return (self.step + 1) % self.log_every == 0 or self.step + 1 == self.steps

    def halve_micro(self, error: torch.OutOfMemoryError) -> None:
        """Halve the micro-batch after an out-of-memory error; raise the error if nothing is left to halve."""
        if self.micro == 1:
            raise error
        self.micro = (self.micro + 1) // 2
        self.hooks.warn(
            f"out of memory: micro-batch reduced to {self.micro} sequences, tokens per step unchanged"
        )
        torch.cuda.empty_cache()

    def _clip(self) -> Tensor:
        """Clip the gradients in place; return the gradient norm before clipping."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])  # type: ignore[misc]
        # A factor of 1 changes nothing; on CPU, checking for it needs no synchronization.
        if self.settings.clip and not (self.device.type == "cpu" and norm.item() <= self.settings.clip):
            nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norm)
        return norm

    def _backward(self, parts: Iterable[Part]) -> Tensor:
        total = None
        narrow = self.settings.precision == "bf16"
        for part in (part.on(self.device) for part in parts):
            padding = () if part.padding is None else (part.padding,)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=narrow):
                objective, nats, _ = self.model(part.tokens, part.targets, self.settings.smoothing, *padding)
            share = part.share
            (objective * share if share != 1 else objective).backward()
            found = nats.detach() * share
            total = found if total is None else total + found
        assert total is not None
        return total

    def _log(self) -> int | None:
        """Log one row for the interval; return the step at which training diverged, if it did."""
        columns = zip(*self._pending, strict=True)
        nats, norms = (torch.stack(column).double().cpu() for column in columns)
        self._pending = []
        self.train_nats = float(nats.mean())
        self.hooks.log(
            {
                "step": self.step,
                "tokens": self.batches.tokens(self.step),
                "nats": self.train_nats,
                "lr": self.settings.learning_rate(self.step - 1, self.steps),
                "grad_norm": float(norms.mean()),
                "grad_norm_max": float(norms.max()),
                "seconds": round(self.seconds, 3),
                **(self.circuits.row(self.step) if self.circuits else {}),
            }
        )
        lost = ~torch.isfinite(nats) | (nats > _LOST * self.batches.guess + 1) | ~torch.isfinite(norms)
        if not lost.any():
            return None
        return self.step - len(nats) + int(lost.int().argmax())
