"""AdamW with one parameter group per circuit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headtohead.model.decoder import Decoder
from headtohead.training.batches import moved
from headtohead.training.circuit_rates import Rule, assign
from headtohead.training.settings import TrainSettings


def make_optimizer(model: Decoder, settings: TrainSettings, graph_safe: bool = False) -> torch.optim.AdamW:
    """Return AdamW over every parameter, grouped by circuit and rule; circuits with `decay=False` are not decayed.

    With `graph_safe`, a CUDA graph can capture the step.
    """
    parameters = dict(model.named_parameters())
    circuits = model.circuits()
    rules = assign(settings.circuit_lr, circuits, model.size.layers)
    groups: dict[tuple[str, str | None, bool, Rule | None], list[Tensor]] = {}
    for circuit in circuits:
        for name in circuit.parameters:
            key = (circuit.tag, circuit.follows, circuit.decay, rules.get(name))
            groups.setdefault(key, []).append(parameters[name])
    rows = [
        {
            "params": members,
            "tag": tag,
            "follows": follows,
            "rule": rule,
            "decays": decay,
            "settings": settings,
        }
        for (tag, follows, decay, rule), members in groups.items()
    ]
    return adamw(rows, graph_safe)


class GraphSafeAdamW(torch.optim.AdamW):
    """AdamW that a CUDA graph can capture: the numbers that change from step to step are in one tensor on the device."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        device = groups[0]["params"][0].device
        self.rates = torch.ones(2, len(groups), device=device)
        """The learning rate of each group, and the factor by which its weights shrink before the step."""
        for index, group in enumerate(groups):
            group["lr"] = self.rates[0, index]
            rule: Rule | None = group["rule"]
            moves = rule is not None and rule.kind != "constant"
            if group["decays"] and moves and group["settings"].circuit_decay == "equal":
                # A graph would contain AdamW's own weight decay as a constant.
                group["shrink"] = self.rates[1, index]
                group["weight_decay"] = 0.0
        super().__init__(groups, fused=True, capturable=True)
        # The warm-up steps run outside the graph; suppress PyTorch's warning about that.
        self._warned_capturable_if_run_uncaptured = True

    def step(self, closure: Any = None) -> Any:
        """Multiply the weights of groups that have `shrink` by it, then run AdamW's step."""
        with torch.no_grad():
            for group in self.param_groups:
                if "shrink" in group:
                    torch._foreach_mul_(group["params"], group["shrink"])
        return super().step(closure)

    def set(self, rates: list[float], shrinks: list[float]) -> None:
        """Copy the numbers of the next step to the device."""
        self.rates.copy_(moved(torch.tensor([rates, shrinks], dtype=torch.float32), self.rates.device))


def adamw(groups: list[dict[str, Any]], graph_safe: bool) -> torch.optim.AdamW:
    """Return PyTorch's fused AdamW over parameter groups with `settings`, `rule` and `decays`."""
    for group in groups:
        settings: TrainSettings = group["settings"]
        group |= {
            "lr": settings.lr,
            "betas": (settings.beta1, settings.beta2),
            "weight_decay": settings.weight_decay if group["decays"] else 0.0,
        }
    return GraphSafeAdamW(groups) if graph_safe else torch.optim.AdamW(groups, fused=True)


def set_rates(optimizer: torch.optim.AdamW, step: int, steps: int) -> None:
    """Set every group's learning rate for `step` in 0..steps-1, and its decay if a rule changes the rate."""
    rates, shrinks = [], []
    for group in optimizer.param_groups:
        rule: Rule | None = group["rule"]
        settings: TrainSettings = group["settings"]
        rate = settings.learning_rate(step, steps)
        ratio = 1.0 if rule is None else rule.ratio(step, steps)
        rates.append(rate * ratio)
        shrinks.append(1 - rate * settings.weight_decay if ratio else 1.0)
        # A step shrinks weights by lr x decay. At ratio 0 the weights are frozen and there is nothing to equalize.
        equal = rule is not None and group["decays"] and settings.circuit_decay == "equal"
        if equal and ratio and "shrink" not in group:
            group["weight_decay"] = settings.weight_decay / ratio
    if isinstance(optimizer, GraphSafeAdamW):
        optimizer.set(rates, shrinks)
    else:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def optimizer_tensors(model: Decoder, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return the optimizer's state by parameter name, for a checkpoint."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(model: Decoder, optimizer: torch.optim.AdamW, tensors: dict[str, Tensor]) -> None:
    """Restore the state returned by `optimizer_tensors`."""
    for name, parameter in model.named_parameters():
        state = {
            key: tensors[f"{name}/{key}"].to(parameter.device)
            for key in ("step", "exp_avg", "exp_avg_sq")
            if f"{name}/{key}" in tensors
        }
        if state:
            optimizer.state[parameter] = state
