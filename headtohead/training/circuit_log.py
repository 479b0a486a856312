"""Log each circuit in each layer: summed learning rate, gradient norm, norm of the product W_QK or W_OV."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.projected import Projected
from headtohead.model.decoder import Decoder
from headtohead.training.circuit_rates import Rule, block_of
from headtohead.training.settings import TrainSettings

_DIGITS = 6


class CircuitLog:
    """Observes a model in training without changing it; costs nothing between logged steps."""

    def __init__(
        self, model: Decoder, optimizer: torch.optim.Optimizer, settings: TrainSettings, steps: int
    ) -> None:
        self.model, self.settings, self.steps = model, settings, steps
        parameters = dict(model.named_parameters())
        groups = optimizer.param_groups
        rules: dict[int, Rule | None] = {
            id(one): group["rule"] for group in groups for one in group["params"]
        }
        self._members: dict[tuple[str, int], list[Tensor]] = {}
        for circuit in model.circuits():
            for name in circuit.parameters:
                key = (circuit.tag, block_of(name) or 0)
                self._members.setdefault(key, []).append(parameters[name])
        self._rules = {
            key: [(rules[id(member)], member.numel()) for member in members]
            for key, members in self._members.items()
        }
        self._sums: dict[Rule | None, float] = dict.fromkeys(rules.values(), 0.0)
        self._summed = 0
        self._gradients: Tensor | None = None

    def record_gradients(self) -> None:
        """Store the gradient norms of this step, before clipping; they stay on the device."""
        nothing = torch.zeros((), device=self.model.readout.device)
        rows = []
        for members in self._members.values():
            held = [member.grad for member in members if member.grad is not None]
            rows.append(torch.stack(torch._foreach_norm(held)).norm() if held else nothing)
        self._gradients = torch.stack([row.float() for row in rows])

    def row(self, step: int) -> dict[str, Any]:
        """Return the log row after `step` steps: for each circuit, one list over layers per quantity.

        lr_sum is the sum of the learning rates so far, grad_norm the norm at this step before clipping, and product the
        Frobenius norm of W_QK or W_OV over all heads, if the mechanism has both factors or the product itself.
        """
        self._add_rates(step)
        norms = [None] * len(self._members) if self._gradients is None else self._gradients.tolist()
        found: dict[str, Any] = {}
        for ((tag, layer), weights), norm in zip(self._rules.items(), norms, strict=True):
            circuit = found.setdefault(tag, {"layers": [], "lr_sum": [], "grad_norm": []})
            total = sum(count for _, count in weights)
            rate = sum(self._sums[rule] * count for rule, count in weights) / max(1, total)
            circuit["layers"].append(layer + 1)
            circuit["lr_sum"].append(_short(rate))
            circuit["grad_norm"].append(_short(norm))
        for tag in ("qk", "ov"):
            products = [product_norm(block.mechanism, tag) for block in self.model.layers]
            if tag in found and any(value is not None for value in products):
                at = [products[layer - 1] for layer in found[tag]["layers"]]
                found[tag]["product"] = [_short(None if value is None else float(value)) for value in at]
        return {"circuits": found}

    def _add_rates(self, step: int) -> None:
        """Sum the rates up to a step from their formula, so that a resumed run has the same sums."""
        for past in range(self._summed, step):
            rate = self.settings.learning_rate(past, self.steps)
            for rule in self._sums:
                self._sums[rule] += rate * (1.0 if rule is None else rule.ratio(past, self.steps))
        self._summed = max(step, self._summed)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


@torch.no_grad()
def product_norm(mechanism: Mechanism, circuit: str) -> Tensor | None:
    """Return sqrt(sum over heads of ||W_Q' W_K||^2), or of W_O W_V; None if the mechanism has no such factors."""
    whole = getattr(mechanism, circuit, None)
    if isinstance(whole, nn.Linear):
        return whole.weight.float().norm()
    # The two value halves of a differential pair form one product, which this function does not separate.
    if not isinstance(mechanism, Projected) or hasattr(mechanism, "pairs"):
        return None
    first, second = (getattr(mechanism, name, None) for name in circuit)
    if not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
        return None
    # Both are (heads x dim, width); for ov the output factor is transposed.
    one = first.weight.float() if circuit == "qk" else first.weight.float().T
    two = second.weight.float()
    heads = mechanism.heads
    if one.shape[0] % heads or one.shape[1] != two.shape[1] or two.shape[0] % (one.shape[0] // heads):
        return None
    dim = one.shape[0] // heads
    kept = two.shape[0] // dim
    if heads % kept:
        return None
    # ||A'B||^2 = <AA', BB'>: dim x dim Gram matrices instead of width x width products.
    left, right = (_squares(part.unflatten(0, (-1, dim))) for part in (one, two))
    return (left * right.repeat_interleave(heads // kept, 0)).sum().clamp_min(0).sqrt()


def _squares(rows: Tensor) -> Tensor:
    return rows @ rows.transpose(-2, -1)
