"""The one trainer: steps, logging, checkpoints, exact resume; no state outside the object."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headtohead.common.errors import UserError
from headtohead.data.windows import Windows
from headtohead.model.decoder import Decoder
from headtohead.training.checkpoint import (
    KEPT,
    Checkpoint,
    checkpoint_path,
    latest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from headtohead.training.circuits import CircuitLog
from headtohead.training.optimiser import make_optimiser, optimiser_tensors, restore_optimiser, set_rates
from headtohead.training.schedule import learning_rate
from headtohead.training.settings import TrainSettings

# A loss this many times that of a uniform guess is not coming back.
_LOST = 2.0
LOGGED_POINTS = 200


@dataclass
class Outcome:
    """How a stretch of training ended."""

    status: str
    """done, stopped or diverged."""
    step: int
    train_nats: float
    """Mean nats of the last logged interval."""
    diverged_at: int | None = None


@dataclass(frozen=True)
class Hooks:
    """What the trainer tells the outside, and asks of it."""

    log: Callable[[dict[str, Any]], None] = lambda row: None
    progress: Callable[[int, float, float], None] = lambda step, nats, rate: None
    """Called with steps done, mean nats and tokens per second."""
    stop: Callable[[], bool] = lambda: False
    """Asked after every step; true saves a checkpoint and ends the stretch."""
    evaluate: Callable[[], dict[str, Any]] | None = None
    """Scores the valid split, when evaluations on the way are wanted."""
    rewind: Callable[[int], None] = lambda step: None
    """Called before resuming: rows logged after this step are of work that will be repeated."""
    warn: Callable[[str], None] = lambda words: None
    compiling: Callable[[], None] = lambda: None
    """Called before the first step of a compiled model, which may take a minute."""


@dataclass(frozen=True)
class Branching:
    """What joins a trunk and its branches."""

    start: Path | None = None
    """The checkpoint that a branch starts from."""
    trunk: str = ""
    """The name of the run that wrote it."""
    marks: frozenset[int] = frozenset()
    """The steps at which a trunk keeps a checkpoint for a branch."""
    folder: Path | None = None
    """Where it keeps them."""


class Trainer:
    """Trains one model on one order of windows."""

    def __init__(
        self,
        model: Decoder,
        windows: Windows,
        settings: TrainSettings,
        *,
        micro: int = 0,
        folder: Path | None = None,
        save_every: float = 60.0,
        hooks: Hooks = Hooks(),  # noqa: B008  a frozen value
        compile: bool = False,
        name: str = "",
        branching: Branching = Branching(),  # noqa: B008  a frozen value
        log_circuits: bool = False,
    ) -> None:
        self.model, self.windows, self.settings, self.hooks = model, windows, settings, hooks
        self.context = model.size.context
        self.steps = settings.steps(self.context)
        self.sequences = settings.batch // self.context
        self.micro = min(micro or self.sequences, self.sequences)
        self.device = model.readout.device
        self.folder, self.save_every, self.name = folder, save_every, name
        self.branching = branching
        self.optimiser = make_optimiser(model, settings)
        self.log_every = max(1, self.steps // LOGGED_POINTS)
        asked = log_circuits or bool(settings.circuit_lr)
        self.circuits = CircuitLog(model, self.optimiser, settings, self.steps) if asked else None
        self.step = 0
        self.seconds = 0.0
        self.train_nats = float("nan")
        self._pending: list[tuple[Tensor, Tensor]] = []
        self.compiled = compile
        if compile:
            model.compile_hidden()

    def run(self) -> Outcome:
        """Train to the end, or until asked to stop or diverged; go on from a checkpoint where there is one."""
        self._resume()
        self.model.train()
        began = saved = time.monotonic()
        shown_step, shown_time = self.step, began
        base = self.seconds
        if self.compiled:
            self.hooks.compiling()
        while self.step < self.steps:
            self._pending.append(self._one_step())
            self.step += 1
            now = time.monotonic()
            self.seconds = base + now - began
            if self.step % self.log_every == 0 or self.step == self.steps:
                diverged = self._log()
                rate = (self.step - shown_step) * self.settings.batch / max(1e-9, now - shown_time)
                shown_step, shown_time = self.step, now
                self.hooks.progress(self.step, self.train_nats, rate)
                if diverged is not None:
                    return Outcome("diverged", self.step, self.train_nats, diverged)
            if self.step in self.branching.marks:
                self._keep()
            if self._evaluation_due() and self.hooks.evaluate:
                self.hooks.log({"step": self.step, "valid": self.hooks.evaluate()})
            if self.step < self.steps and self.hooks.stop():
                self.save()
                return Outcome("stopped", self.step, self.train_nats)
            if self.folder and self.step < self.steps and now - saved >= self.save_every:
                self.save()
                saved = time.monotonic()
        return Outcome("done", self.step, self.train_nats)

    def timed_step(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Do one step and return the seconds it took, the device's work included."""
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
        """Write the checkpoint that a branch starts from, unless an earlier stretch did: the branch may be reading it."""
        folder = self.branching.folder
        if folder is not None and not checkpoint_path(folder, self.step).is_dir():
            self._save(folder, None)

    def _save(self, folder: Path, kept: int | None) -> None:
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        state = optimiser_tensors(self.model, self.optimiser)
        tensors |= {f"optimiser/{name}": tensor for name, tensor in state.items()}
        tensors["random/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.device)
        for place, rows in enumerate(zip(*self._pending, strict=True)):
            tensors[f"pending/{place}"] = torch.stack(rows)
        facts = {
            "run": self.name,
            "seconds": self.seconds,
            "train_nats": None if math.isnan(self.train_nats) else self.train_nats,
        }
        save_checkpoint(folder, Checkpoint(self.step, tensors, facts | {"micro": self.micro}), kept)

    def _resume(self) -> None:
        checkpoint, warnings = latest_checkpoint(self.folder, self._misfit) if self.folder else (None, [])
        if checkpoint is None and self.branching.start is not None:
            checkpoint, trouble = self._inherited(self.branching.start)
            warnings += [f"{trouble}; the trunk's steps are done again here"] if trouble else []
        for words in warnings:
            self.hooks.warn(words)
        self.hooks.rewind(checkpoint.step if checkpoint else 0)
        if checkpoint is None:
            return
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in checkpoint.tensors.items():
            group, _, key = name.partition("/")
            groups.setdefault(group, {})[key] = tensor
        self.model.load_state_dict(groups["model"])
        restore_optimiser(self.model, self.optimiser, groups.get("optimiser", {}))
        torch.set_rng_state(groups["random"]["cpu"])
        if self.device.type == "cuda" and "cuda" in groups["random"]:
            torch.cuda.set_rng_state(groups["random"]["cuda"], self.device)
        pending = [groups.get("pending", {}).get(str(place)) for place in range(2)]
        if pending[0] is not None and pending[1] is not None:
            self._pending = list(zip(pending[0].to(self.device), pending[1].to(self.device), strict=True))
        self.step = checkpoint.step
        self.seconds = float(checkpoint.state["seconds"])
        self.micro = int(checkpoint.state["micro"])
        nats = checkpoint.state["train_nats"]
        self.train_nats = float("nan") if nats is None else float(nats)

    def _inherited(self, path: Path) -> tuple[Checkpoint | None, str]:
        """Return the checkpoint that the trunk kept, or what is wrong with it."""
        if not path.is_dir():
            return None, f"the trunk's checkpoint {path} is missing"
        try:
            checkpoint = read_checkpoint(path)
        except UserError as error:
            return None, str(error)
        words = self._misfit(checkpoint, self.branching.trunk)
        return (None, f"checkpoint {path} is not of the trunk: {words}") if words else (checkpoint, "")

    def _misfit(self, checkpoint: Checkpoint, writer: str | None = None) -> str:
        """Say what keeps a checkpoint from being one of this run, or nothing; names and shapes decide."""
        state = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        if checkpoint.step >= self.steps:
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
        set_rates(self.optimiser, self.settings, self.step, self.steps)
        while True:
            try:
                nats = self._backward()
                break
            except torch.OutOfMemoryError:
                if self.micro == 1:
                    raise
                self.micro = (self.micro + 1) // 2
                self.hooks.warn(
                    f"out of memory: micro-batch reduced to {self.micro} sequences, tokens per step unchanged"
                )
                self.optimiser.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
        if self.circuits and ((self.step + 1) % self.log_every == 0 or self.step + 1 == self.steps):
            self.circuits.note_gradients()
        norm = self._clip()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return nats, norm

    def _clip(self) -> Tensor:
        """Return the gradient norm, after scaling the gradients down to the clip where it is above."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(
            [parameter.grad for parameter in parameters if parameter.grad is not None]
        )
        # A factor of 1 changes nothing; on CPU it costs nothing to see that.
        if self.settings.clip and not (self.device.type == "cpu" and norm.item() <= self.settings.clip):
            nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norm)
        return norm

    def _backward(self) -> Tensor:
        first, total = self.step * self.sequences, None
        for start in range(0, self.sequences, self.micro):
            size = min(self.micro, self.sequences - start)
            tokens, targets = self.windows.batch(first + start, size)
            tokens, targets = self._moved(tokens), self._moved(targets)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
                objective, nats, _ = self.model(tokens, targets, self.settings.smoothing)
            share = size / self.sequences
            (objective * share if share != 1 else objective).backward()
            part = nats.detach() * share
            total = part if total is None else total + part
        assert total is not None
        return total

    def _moved(self, tokens: Tensor) -> Tensor:
        """Return tokens on the device; from pinned memory the copy waits for nothing that is under way there."""
        if self.device.type == "cuda":
            tokens = tokens.contiguous().pin_memory()
        return tokens.to(self.device, non_blocking=True)

    def _evaluation_due(self) -> bool:
        count = self.settings.evaluations
        if not count or self.step == self.steps:
            return False
        return (self.step * count) // self.steps > ((self.step - 1) * count) // self.steps

    def _log(self) -> int | None:
        """Write one row for the interval; return the step at which it was lost, if it was."""
        nats = torch.stack([row[0] for row in self._pending]).double().cpu()
        norms = torch.stack([row[1] for row in self._pending]).double().cpu()
        self._pending = []
        self.train_nats = float(nats.mean())
        self.hooks.log(
            {
                "step": self.step,
                "tokens": self.step * self.settings.batch,
                "nats": self.train_nats,
                "lr": learning_rate(self.settings, self.step - 1, self.steps),
                "grad_norm": float(norms.mean()),
                "grad_norm_max": float(norms.max()),
                "seconds": round(self.seconds, 3),
                **(self.circuits.row(self.step) if self.circuits else {}),
            }
        )
        lost = (
            ~torch.isfinite(nats)
            | (nats > _LOST * math.log(self.model.size.vocabulary) + 1)
            | ~torch.isfinite(norms)
        )
        if not lost.any():
            return None
        return self.step - len(nats) + int(lost.int().argmax())
