"""AdamW with one parameter group per circuit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headtohead.model.decoder import Decoder
from headtohead.training.circuit_rates import Rule, assign
from headtohead.training.settings import TrainSettings


def make_optimizer(model: Decoder, settings: TrainSettings, graph_safe: bool = False) -> torch.optim.AdamW:
    """Return AdamW over every parameter, grouped by circuit and rule; circuits with `decay=False` are not decayed.

    With `graph_safe`, learning rates are device tensors, so that a CUDA graph can capture the step.
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
            "weight_decay": settings.weight_decay if decay else 0.0,
            "decays": decay,
        }
        for (tag, follows, decay, rule), members in groups.items()
    ]
    return adamw(rows, settings, graph_safe)


class GraphSafeAdamW(torch.optim.AdamW):
    """AdamW whose weight decay may change during training; a CUDA graph would bake in AdamW's own as a constant."""

    def step(self, closure: Any = None) -> Any:
        """Multiply the weights of groups that have `shrink` (a device scalar) by it, then run AdamW's step."""
        with torch.no_grad():
            for group in self.param_groups:
                if "shrink" in group:
                    torch._foreach_mul_(group["params"], group["shrink"])
        return super().step(closure)


def adamw(rows: list[dict[str, Any]], settings: TrainSettings, graph_safe: bool) -> torch.optim.AdamW:
    """Return PyTorch's fused AdamW over parameter groups."""
    if graph_safe:
        for row in rows:
            row["lr"] = torch.full((), settings.lr, device=row["params"][0].device)
            moves = row["rule"] is not None and row["rule"].kind != "constant"
            if row["decays"] and moves and settings.circuit_decay == "equal":
                row["shrink"] = torch.ones((), device=row["params"][0].device)
                row["weight_decay"] = 0.0
    optimizer = (GraphSafeAdamW if graph_safe else torch.optim.AdamW)(
        rows, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=True, capturable=graph_safe
    )
    # The warm-up steps run outside the graph; suppress PyTorch's warning about that.
    optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer


def set_rates(optimizer: torch.optim.AdamW, settings: TrainSettings, step: int, steps: int) -> None:
    """Set every group's learning rate for `step` in 0..steps-1, and its decay if a rule changes the rate."""
    rate = settings.learning_rate(step, steps)
    for group in optimizer.param_groups:
        rule: Rule | None = group["rule"]
        ratio = 1.0 if rule is None else rule.ratio(step, steps)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * ratio)
        else:
            group["lr"] = rate * ratio
        # A step shrinks weights by lr x decay. At ratio 0 the weights are frozen and there is nothing to equalize.
        if "shrink" in group:
            group["shrink"].fill_(1 - rate * settings.weight_decay if ratio else 1.0)
        elif rule is not None and group["decays"] and settings.circuit_decay == "equal" and ratio:
            group["weight_decay"] = settings.weight_decay / ratio


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
