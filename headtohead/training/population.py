"""Train the rows of a population in one pass: same results as separate runs, with fewer and larger kernels.

Weights are stacked in a leading dimension, `torch.vmap` maps the model over it, and attention sees the rows as a larger
batch. Every row keeps its own `Trainer` with its own windows, log, checkpoints and outcome. The arithmetic of the rows
is independent, so a row that diverges does not affect the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from headtohead.common.errors import UserError, first_line
from headtohead.kernels import stacking
from headtohead.model.classifier import Pointer, Reader
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Size
from headtohead.training.batches import Part, WindowBatches, micro_batches, moved, population_parts
from headtohead.training.circuit_rates import Rule
from headtohead.training.compiled_step import CompiledStep
from headtohead.training.cuda_graph import CudaGraphStep
from headtohead.training.optimizer import adamw, set_rates
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Outcome, Trainer, resume, train

ROW_SETTINGS = frozenset(
    {
        *("lr", "schedule", "warmup", "floor", "decay_share", "weight_decay", "beta1", "beta2", "clip"),
        *("circuit_lr", "circuit_decay"),
    }
)
"""Training settings in which the rows of a population may differ."""
# Align each parameter in its group's tensor to 32 numbers (a cache line), as kernels expect.
_LINE = 32
_STATE = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Slot:
    """The slice of a parameter in the flat tensor of its group."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    @property
    def next(self) -> int:
        return -(-self.stop // _LINE) * _LINE

    def of(self, flat: Tensor) -> Tensor:
        """Return the parameter (..., *shape) as a view of flat (..., numbers)."""
        return flat[..., self.start : self.stop].view(*flat.shape[:-1], *self.shape)


class PopulationTrainer:
    """Trains the models of several trainers in one pass; they may differ in seed and in `ROW_SETTINGS`."""

    def __init__(
        self,
        members: Sequence[Trainer],
        *,
        record: bool = False,
        compile: bool = False,
        save_every: float = 60.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        first = members[0]
        if reason := blocking_layers(first.model.size):
            raise UserError(reason)
        for member in members[1:]:
            for name, value in vars(first.settings).items():
                if name not in ROW_SETTINGS and getattr(member.settings, name) != value:
                    raise UserError(f"the rows of a population cannot differ in {name}")
        self.members, self.first, self.save_every, self.stop = list(members), first, save_every, stop
        self.settings, self.device = first.settings, first.device
        self.spans = _spans([member.settings for member in members])
        self.slots, self.flats, groups = self._layout()
        self.parts = [group["params"][0] for group in groups]
        """Each flat tensor's rows of equal settings, which the optimizer updates together."""
        # A task's batches vary in length, and each length would be compiled or captured again.
        fixed = isinstance(first.batches, WindowBatches)
        record = record and fixed and self.device.type == "cuda"
        self.optimizer = adamw(groups, record)
        self.clip = self._clips()
        self.buffers: dict[str, Tensor] = {}
        self._gradients_kept: list[Tensor] = []
        trained = {slot.name for slots in self.slots for slot in slots}
        names = [name for name, _ in first.model.named_parameters()]
        self._idle = {name: self._stacked(name) for name in names if name not in trained}
        self._compiled = CompiledStep(self._on_windows, first.hooks.warn) if compile and fixed else None
        self.compiled = self._compiled is not None
        self._graphed = CudaGraphStep(self._whole_step, self.device, first.hooks.warn) if record else None

    def run(self, ended: Callable[[int, Outcome], None] = lambda index, outcome: None) -> list[Outcome]:
        """Train all rows to the end, or until stopped; `ended` is called as soon as a row diverges."""
        return train(self, self.stop, self.save_every, ended)

    def resume(self) -> None:
        """Resume from the newest step of which every row has a checkpoint, or start from step 0."""
        resume(self.members)
        self._gather()

    def one_step(self) -> tuple[Tensor, Tensor]:
        """Do one step; return the mean nats and gradient norm of each row (rows,), still on the device."""
        if not self.buffers:
            self._stack_buffers()
        step = self.first.step
        set_rates(self.optimizer, step, self.first.steps)
        if isinstance(self.first.batches, WindowBatches):
            count = self.first.sequences
            batches = [part for member in self.members for part in member.batches.parts(step, count)]
            tokens = moved(torch.stack([batch.tokens for batch in batches]), self.device)
            targets = moved(torch.stack([batch.targets for batch in batches]), self.device)
            nats, norms = (self._graphed or self._whole_step)(tokens, targets)
        else:
            nats, norms = self._update(lambda given: self._descent(self._parts(step), given))
        if self.first.logs_next and any(member.circuits for member in self.members):
            self._record_gradients(norms)
        if any(step + 1 in member.branching.marks for member in self.members):
            self._spread()  # a checkpoint for branches is written after this step
        return nats, norms

    def _parts(self, step: int) -> Iterator[Part]:
        """Yield the parts of one task step on the device; each row has its own batches, of varying length."""
        rows = [list(member.batches.parts(step, self.first.micro)) for member in self.members]
        return (part.on(self.device) for part in population_parts(rows))

    def _whole_step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Do one step on tokens and targets (rows, sequences, context) that are already on the device."""
        descent = self._compiled or self._on_windows
        return self._update(lambda given: descent(tokens, targets, *given))

    def _update(self, descent: Callable[[list[Tensor]], tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        """Apply the gradients that `descent` returns; halve the micro-batch when memory runs out."""
        flats = [flat.detach() for flat in self.flats]
        given = [*flats, *self._idle.values(), *self.buffers.values()]
        while True:
            try:
                nats, norms, *grads = descent(given)
                break
            except torch.OutOfMemoryError as error:
                self.first.halve_micro(error)
                if self._compiled is not None:
                    self._compiled.reset()
        pairs = ((grad, span) for grad in grads for span in self.spans)
        for part, (grad, (start, stop)) in zip(self.parts, pairs, strict=True):
            part.grad = grad[start:stop]
        if any(member.circuits for member in self.members):
            self._gradients_kept = grads
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return nats, norms

    def _on_windows(self, tokens: Tensor, targets: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Return `_descent` on windows (rows, sequences, context), in micro-batches."""
        return self._descent(micro_batches(tokens, targets, self.first.micro), list(given))

    def _descent(self, parts: Iterable[Part], given: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the mean nats and gradient norms (rows,), and each group's clipped gradients (rows, numbers).

        `given` lists the groups' tensors, then the parameters without a gradient, then the buffers.
        """
        flats, rest = given[: len(self.slots)], given[len(self.slots) :]
        leaves = {
            slot.name: slot.of(flat.detach()).requires_grad_()
            for slots, flat in zip(self.slots, flats, strict=True)
            for slot in slots
        }
        weights = leaves | dict(zip(self._idle, rest, strict=False))
        buffers = dict(zip(self.buffers, rest[len(self._idle) :], strict=True))
        total: list[Tensor] = []
        nats: Any = 0.0
        with torch.enable_grad():
            for part in parts:
                objective, found = self._forward(weights, buffers, part.tokens, part.targets, part.padding)
                scaled = objective * part.share
                grads = torch.autograd.grad(scaled.sum(), list(leaves.values()))
                total = list(torch._foreach_add(total, grads)) if total else list(grads)
                nats = nats + found.detach() * part.share
        by_name = dict(zip(leaves, total, strict=True))
        joined = [self._joined([by_name[slot.name] for slot in slots], slots) for slots in self.slots]
        return nats, self._clip(joined), *joined

    def _forward(
        self,
        weights: dict[str, Tensor],
        buffers: dict[str, Tensor],
        tokens: Tensor,
        targets: Tensor,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the objective and the mean nats of each row (rows,)."""

        def one(weights: Any, buffers: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
            tokens, targets, *padded = given
            inputs = (tokens, targets, self.settings.smoothing, *padded)
            objective, nats, _ = functional_call(self.first.model, (weights, buffers), inputs)
            return objective, nats

        narrow = self.settings.precision == "bf16"
        padded = () if padding is None else (padding,)
        # The autocast cache does not recognize tensors that vmap wraps.
        own = torch.autocast(self.device.type, torch.bfloat16, enabled=narrow, cache_enabled=False)
        with stacking(), own:
            found: tuple[Tensor, Tensor] = vmap(one)(weights, buffers, tokens, targets, *padded)
        return found

    def _clip(self, grads: list[Tensor]) -> Tensor:
        """Clip each row's gradients in place; return the gradient norms before clipping (rows,)."""
        parts = [torch.linalg.vector_norm(grad, dim=1) for grad in grads]
        norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        if self.clip is not None:
            shares = self._shares(norms).unsqueeze(1)
            for grad in grads:
                grad.mul_(shares)
        return norms

    def _clips(self) -> Tensor | float | None:
        """Return the norm to which gradients are clipped: one for all rows, or each row's (rows,); None if none is."""
        given = [member.settings.clip for member in self.members]
        if not any(given):
            return None
        if len(set(given)) == 1:
            return given[0]
        return torch.tensor([clip or 1e30 for clip in given], device=self.device)

    def _shares(self, norms: Tensor) -> Tensor:
        """Return the factor by which clipping scales each row's gradients (rows,)."""
        if self.clip is None:
            return torch.ones_like(norms)
        return (self.clip / (norms + 1e-6)).clamp_max(1.0)

    def _record_gradients(self, norms: Tensor) -> None:
        """Pass each row's gradients of the last step, before clipping, to its circuit log."""
        shares = self._shares(norms)
        for row, member in enumerate(self.members):
            if member.circuits is None:
                continue
            for slots, grads in zip(self.slots, self._gradients_kept, strict=True):
                for slot in slots:
                    member.model.get_parameter(slot.name).grad = slot.of(grads[row]) / shares[row]
            member.circuits.record_gradients()
            member.model.zero_grad(set_to_none=True)

    def _layout(self) -> tuple[list[list[_Slot]], list[Tensor], list[dict[str, Any]]]:
        """Return flat tensors (rows, numbers), the slots of their parameters, and the optimizer's groups.

        A flat tensor has the parameters with the same rules in every row; it has one group for each span of rows with
        equal settings. The models' parameters become views of these tensors, so each model can be scored and saved on
        its own.
        """
        unused = self._unused()
        by_rules: dict[tuple[Any, ...], list[str]] = {}
        rules = [_rules(member) for member in self.members]
        for name in rules[0]:
            if name not in unused:
                by_rules.setdefault(tuple(row[name] for row in rules), []).append(name)
        all_slots, flats, groups = [], [], []
        for facts, names in by_rules.items():
            slots: list[_Slot] = []
            for name in names:
                shape = self.first.model.get_parameter(name).shape
                slots.append(_Slot(name, slots[-1].next if slots else 0, shape))
            flat = self._joined([self._stacked(slot.name) for slot in slots], slots)
            for row, member in zip(flat, self.members, strict=True):
                for slot in slots:
                    member.model.get_parameter(slot.name).data = slot.of(row)
            all_slots.append(slots)
            flats.append(flat)
            for start, stop in self.spans:
                rule, decays = facts[start]
                part = flat[start:stop].requires_grad_()
                settings = self.members[start].settings
                groups.append({"params": [part], "rule": rule, "decays": decays, "settings": settings})
        return all_slots, flats, groups

    def _unused(self) -> set[str]:
        """Return the names of the parameters that receive no gradient; the optimizer would not update them."""
        self._stack_buffers()
        for member in self.members:
            member.model.train()
        model = self.first.model
        weights = {name: self._stacked(name).requires_grad_() for name, _ in model.named_parameters()}
        shortest = min(8, model.size.context)
        rows = torch.zeros(len(self.members), 1, shortest, dtype=torch.long, device=self.device)
        objective, _ = self._forward(weights, self.buffers, rows, rows)
        grads = torch.autograd.grad(objective.sum(), list(weights.values()), allow_unused=True)
        return {name for name, grad in zip(weights, grads, strict=True) if grad is None}

    def _stacked(self, name: str) -> Tensor:
        """Return the parameter of that name of every row (rows, *shape), without a gradient."""
        return torch.stack([member.model.get_parameter(name).detach() for member in self.members])

    def _stack_buffers(self) -> None:
        models = [member.model for member in self.members]
        self.buffers = {
            name: torch.stack([model.get_buffer(name) for model in models])
            for name, _ in models[0].named_buffers()
        }

    def _joined(self, parts: list[Tensor], slots: list[_Slot]) -> Tensor:
        """Return (rows, numbers) from parts (rows, *shape), padded with zeros to whole cache lines."""
        row: list[Tensor] = []
        for part, slot in zip(parts, slots, strict=True):
            row.append(part.flatten(1))
            if slot.next > slot.stop:
                row.append(part.new_zeros(len(part), slot.next - slot.stop))
        return torch.cat(row, 1)

    def save(self, ended: Collection[int] = ()) -> None:
        """Write a checkpoint of every row that has not ended, as a separate run would."""
        self._spread()
        for index, member in enumerate(self.members):
            if index not in ended:
                member.save()

    def _spread(self) -> None:
        """Give each member the state of its row, as a separate run would have it."""
        for member in self.members:
            member.micro = self.first.micro
        for part, slots, (start, stop) in self._placed():
            state = self.optimizer.state.get(part, {})
            for row, member in enumerate(self.members[start:stop]):
                for slot in slots if state else ():
                    parameter = member.model.get_parameter(slot.name)
                    own = {key: slot.of(state[key][row]) for key in _STATE}
                    member.optimizer.state[parameter] = {"step": state["step"].clone(), **own}

    def _placed(self) -> Iterator[tuple[Tensor, list[_Slot], tuple[int, int]]]:
        """Yield each tensor that the optimizer updates, the slots of its parameters and its span of rows."""
        pairs = ((slots, span) for slots in self.slots for span in self.spans)
        for part, (slots, span) in zip(self.parts, pairs, strict=True):
            yield part, slots, span

    def _gather(self) -> None:
        """Join the optimizer states of the members' checkpoints; weights are views and need no copy."""
        self._stack_buffers()
        for part, slots, (start, stop) in self._placed():
            states = [
                [member.optimizer.state.get(member.model.get_parameter(slot.name), {}) for slot in slots]
                for member in self.members[start:stop]
            ]
            if not all(state for row in states for state in row):
                continue  # no step has been done
            self.optimizer.state[part] = {"step": states[0][0]["step"].clone()} | {
                key: self._joined(
                    [torch.stack([row[index][key] for row in states]) for index in range(len(slots))], slots
                )
                for key in _STATE
            }


def _spans(settings: Sequence[TrainSettings]) -> list[tuple[int, int]]:
    """Return the first and last (exclusive) of each span of adjacent rows with equal settings."""
    ends = [row for row in range(1, len(settings)) if settings[row] != settings[row - 1]]
    return list(pairwise((0, *ends, len(settings))))


def _rules(member: Trainer) -> dict[str, tuple[Rule | None, bool]]:
    """Return the rule of each parameter's learning rate and whether its weights decay, by name."""
    names = {parameter: name for name, parameter in member.model.named_parameters()}
    return {
        names[parameter]: (group["rule"], group["decays"])
        for group in member.optimizer.param_groups
        for parameter in group["params"]
    }


def blocking_layers(size: Size) -> str:
    """Return why models of this size cannot form a population, or an empty string."""
    if size.settings.dropout:
        return "dropout is not supported in a population: its masks would differ from those of separate runs"
    return ""


def population_blocker(model: Decoder) -> str:
    """Return why a model cannot be trained under `torch.vmap`, or an empty string; tries it on a few tokens."""
    if reason := blocking_layers(model.size):
        return reason
    if isinstance(model, Pointer):
        return "models that point at an answer are not supported in a population"
    shortest = min(8, model.size.context)
    tokens = torch.zeros(2, 1, shortest, dtype=torch.long, device=model.readout.device)
    weights = {name: torch.stack((part, part)).detach() for name, part in model.state_dict().items()}
    terms: dict[str, Tensor] = {}

    def one(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        padded = (0.0, tokens == 0) if isinstance(model, Reader) else ()
        objective, _, own = functional_call(model, weights, (tokens, tokens, *padded))
        terms.update(own)
        return objective

    leaves = {name: part.requires_grad_(part.is_floating_point()) for name, part in weights.items()}
    try:
        with stacking():
            vmap(one)(leaves, tokens).sum().backward()
    except Exception as error:
        return f"torch.vmap fails on this model: {first_line(error)}"
    if terms and isinstance(model, Reader):
        return (
            f"the mechanism's loss term '{next(iter(terms))}' would include the padding of a task's batches"
        )
    return ""
