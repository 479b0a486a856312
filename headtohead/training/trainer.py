"""The trainer: steps, logging, checkpoints, exact resume; no state outside the object."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headtohead.common.errors import UnreadableFile
from headtohead.data.windows import Windows
from headtohead.model.decoder import Decoder
from headtohead.training.batches import BatchSource, Part, WindowBatches
from headtohead.training.checkpoint import (
    KEPT,
    Checkpoint,
    checkpoint_path,
    latest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from headtohead.training.circuit_log import CircuitLog
from headtohead.training.cuda_graph import CudaGraphStep
from headtohead.training.optimizer import (
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_rates,
)
from headtohead.training.schedule import learning_rate
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
    compiling: Callable[[], None] = lambda: None
    """Called before the first step of a compiled model, which may take a minute."""


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
        self.seconds = self.own_seconds = 0.0
        self.train_nats = float("nan")
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._began, self._shown = 0.0, (0, 0.0)
        self.compiled = compile
        if compile:
            model.compile_hidden()

    def run(self) -> Outcome:
        """Train until the end, a stop request or divergence; resume from a checkpoint if there is one."""
        self.resume(self.checkpoint())
        self.begin()
        saved = time.monotonic()
        while self.step < self.steps:
            self.evaluate()
            if ended := self.after_step(*self._one_step()):
                return ended
            if self.step < self.steps and self.hooks.stop():
                self.save()
                return self.outcome("stopped")
            if self.folder and self.step < self.steps and time.monotonic() - saved >= self.save_every:
                self.save()
                saved = time.monotonic()
        return self.outcome("done")

    def begin(self) -> None:
        """Start the clock."""
        self.model.train()
        self._began = time.monotonic() - self.seconds
        self._shown = self.step, time.monotonic()
        if self.compiled:
            self.hooks.compiling()

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
                return self.outcome("diverged", diverged)
        if self.step in self.branching.marks:
            self._keep()
        return None

    def evaluate(self) -> None:
        """Score the valid split if due, before the next step; a checkpoint of this step does not contain the score."""
        if self._evaluation_due() and self.hooks.evaluate:
            self.hooks.log({"step": self.step} | self.hooks.evaluate())

    def outcome(self, status: str, diverged_at: int | None = None) -> Outcome:
        """Return the outcome with this status."""
        return Outcome(status, self.step, self.train_nats, diverged_at)

    def timed_step(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Do one step and return the seconds it took, including the device's work."""
        self.model.train()
        self._wait()
        began = clock()
        self._one_step()
        self._wait()
        self.step += 1
        return clock() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def save(self) -> None:
        """Write a checkpoint of everything the rest of the run depends on."""
        if self.folder is not None:
            self._save(self.folder, KEPT)

    def _keep(self) -> None:
        """Write the checkpoint of a branch unless it already exists, because the branch may be reading it."""
        folder = self.branching.folder
        if folder is not None and not checkpoint_path(folder, self.step).is_dir():
            self._save(folder, None)

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
            "train_nats": None if math.isnan(self.train_nats) else self.train_nats,
        }
        save_checkpoint(folder, Checkpoint(self.step, tensors, facts | {"micro": self.micro}), kept)

    def checkpoint(self, before: int | None = None) -> Checkpoint | None:
        """Return the checkpoint to resume from (of a step below `before`, if given): this run's newest, or its trunk's."""
        found = latest_checkpoint(self.folder, self._misfit, before) if self.folder else (None, [])
        checkpoint, warnings = found
        if checkpoint is None and self.branching.start is not None:
            checkpoint, trouble = self._inherited(self.branching.start)
            warnings += [f"{trouble}; the trunk's steps are repeated in this run"] if trouble else []
        for message in warnings:
            self.hooks.warn(message)
        return checkpoint

    def resume(self, checkpoint: Checkpoint | None) -> None:
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
        pending = [groups.get("pending", {}).get(str(index)) for index in range(2)]
        if pending[0] is not None and pending[1] is not None:
            self._pending = list(zip(pending[0].to(self.device), pending[1].to(self.device), strict=True))
        self.step = checkpoint.step
        self.seconds = float(checkpoint.state["seconds"])
        self.own_seconds = float(checkpoint.state.get("own_seconds", self.seconds / self.sharing))
        self.micro = int(checkpoint.state["micro"])
        nats = checkpoint.state["train_nats"]
        self.train_nats = float("nan") if nats is None else float(nats)

    def _inherited(self, path: Path) -> tuple[Checkpoint | None, str]:
        """Return the trunk's checkpoint, or None and what is wrong with it."""
        if not path.is_dir():
            return None, f"the trunk's checkpoint {path} is missing"
        try:
            checkpoint = read_checkpoint(path)
        except UnreadableFile as error:
            return None, str(error)
        reason = self._misfit(checkpoint, self.branching.trunk)
        if reason:
            return None, f"checkpoint {path} does not belong to the trunk: {reason}"
        return checkpoint, ""

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
        set_rates(self.optimizer, self.settings, self.step, self.steps)
        if self._graphed is None:
            return self._whole_step(lambda: self.batches.parts(self.step, self.micro))
        (whole,) = self.batches.parts(self.step, self.sequences)
        return self._graphed(moved(whole.tokens, self.device), moved(whole.targets, self.device))

    def _step_on(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Do one step on a batch that is already on the device; a CUDA graph captures this function."""
        # A failed capture leaves uncomputed gradients behind.
        self.optimizer.zero_grad(set_to_none=True)

        def parts() -> Iterator[Part]:
            for part, wanted in zip(tokens.split(self.micro), targets.split(self.micro), strict=True):
                yield Part(part, wanted, None, len(part) / len(tokens))

        return self._whole_step(parts)

    def _whole_step(self, parts: Callable[[], Iterator[Part]]) -> tuple[Tensor, Tensor]:
        """Do one step in micro-batches; on a GPU the host does not wait."""
        while True:
            try:
                nats = self._backward(parts())
                break
            except torch.OutOfMemoryError:
                self.halve()
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

    def halve(self) -> None:
        """Halve the micro-batch after running out of memory."""
        if self.micro == 1:
            raise
        self.micro = (self.micro + 1) // 2
        self.hooks.warn(
            f"out of memory: micro-batch reduced to {self.micro} sequences, tokens per step unchanged"
        )
        torch.cuda.empty_cache()

    def _clip(self) -> Tensor:
        """Clip the gradients in place; return the gradient norm before clipping."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(
            [parameter.grad for parameter in parameters if parameter.grad is not None]
        )
        # A factor of 1 changes nothing; on CPU, checking for it needs no synchronization.
        if self.settings.clip and not (self.device.type == "cpu" and norm.item() <= self.settings.clip):
            nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norm)
        return norm

    def _backward(self, parts: Iterable[Part]) -> Tensor:
        total = None
        for part in parts:
            given = (
                moved(part.tokens, self.device),
                moved(part.targets, self.device),
                self.settings.smoothing,
            )
            padding = () if part.padding is None else (moved(part.padding, self.device),)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
                objective, nats, _ = self.model(*given, *padding)
            share = part.share
            (objective * share if share != 1 else objective).backward()
            found = nats.detach() * share
            total = found if total is None else total + found
        assert total is not None
        return total

    def _evaluation_due(self) -> bool:
        count = self.settings.evaluations
        if not count or not self.step:
            return False
        return (self.step * count) // self.steps > ((self.step - 1) * count) // self.steps

    def _log(self) -> int | None:
        """Log one row for the interval; return the step at which training diverged, if it did."""
        nats = torch.stack([row[0] for row in self._pending]).double().cpu()
        norms = torch.stack([row[1] for row in self._pending]).double().cpu()
        self._pending = []
        self.train_nats = float(nats.mean())
        self.hooks.log(
            {
                "step": self.step,
                "tokens": self.batches.tokens(self.step),
                "nats": self.train_nats,
                "lr": learning_rate(self.settings, self.step - 1, self.steps),
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


def moved(tokens: Tensor, device: torch.device) -> Tensor:
    """Return tokens on the device; the copy from pinned memory does not wait for kernels in flight."""
    if device.type == "cuda" and not tokens.is_cuda:
        tokens = tokens.contiguous().pin_memory()
    return tokens.to(device, non_blocking=True)
