"""A log of what each circuit does in each layer: the learning rate it has had, its gradient, the norm of its product."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.projected import Projected
from headtohead.model.decoder import Decoder
from headtohead.training.circuit_rates import Rule
from headtohead.training.schedule import learning_rate
from headtohead.training.settings import TrainSettings

_BLOCK = re.compile(r"blocks\.([0-9]+)\.")
_DIGITS = 6


class CircuitLog:
    """Looks at a model in training and changes nothing of it; between two logged steps it costs nothing."""

    def __init__(
        self, model: Decoder, optimizer: torch.optim.Optimizer, settings: TrainSettings, steps: int
    ) -> None:
        self.model, self.settings, self.steps = model, settings, steps
        parameters = dict(model.named_parameters())
        rules: dict[int, Rule | None] = {
            id(member): group["rule"] for group in optimizer.param_groups for member in group["params"]
        }
        self._members: dict[tuple[str, int], list[Tensor]] = {}
        for circuit in model.circuits():
            for name in circuit.parameters:
                block = _BLOCK.match(name)
                place = (circuit.tag, int(block[1]) if block else 0)
                self._members.setdefault(place, []).append(parameters[name])
        self._rules = {
            place: [(rules[id(member)], member.numel()) for member in members]
            for place, members in self._members.items()
        }
        self._sums: dict[Rule | None, float] = dict.fromkeys(rules.values(), 0.0)
        self._summed = 0
        self._gradients: Tensor | None = None

    def record_gradients(self) -> None:
        """Take the gradient norms of this step, before any clipping; they stay on the device."""
        nothing = torch.zeros((), device=self.model.readout.device)
        rows = []
        for members in self._members.values():
            held = [member.grad for member in members if member.grad is not None]
            rows.append(torch.stack(torch._foreach_norm(held)).norm() if held else nothing)
        self._gradients = torch.stack([row.float() for row in rows])

    def row(self, step: int) -> dict[str, Any]:
        """Return what is logged once `step` steps are done: by circuit, a list over layers of each number.

        lr_sum is the sum of the learning rates so far, grad_norm the norm at this step before clipping, and product the
        Frobenius norm of W_QK or W_OV, all heads together, where the mechanism has both factors or the product itself.
        """
        self._add_rates(step)
        norms = [None] * len(self._members) if self._gradients is None else self._gradients.tolist()
        found: dict[str, Any] = {}
        for (place, weights), norm in zip(self._rules.items(), norms, strict=True):
            circuit = found.setdefault(place[0], {"layers": [], "lr_sum": [], "grad_norm": []})
            total = sum(count for _, count in weights)
            rate = sum(self._sums[rule] * count for rule, count in weights) / max(1, total)
            circuit["layers"].append(place[1] + 1)
            circuit["lr_sum"].append(_short(rate))
            circuit["grad_norm"].append(_short(norm))
        for tag in ("qk", "ov"):
            products = [product_norm(block.mechanism, tag) for block in self.model.layers]
            if tag in found and any(value is not None for value in products):
                at = [products[layer - 1] for layer in found[tag]["layers"]]
                found[tag]["product"] = [_short(None if value is None else float(value)) for value in at]
        return {"circuits": found}

    def _add_rates(self, step: int) -> None:
        """Add the rates up to a step by their formula: a resumed run has the same sums."""
        for past in range(self._summed, step):
            rate = learning_rate(self.settings, past, self.steps)
            for rule in self._sums:
                self._sums[rule] += rate * (1.0 if rule is None else rule.ratio(past, self.steps))
        self._summed = max(step, self._summed)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


@torch.no_grad()
def product_norm(mechanism: Mechanism, circuit: str) -> Tensor | None:
    """Return the root of the summed squares over heads of W_Q' W_K or of W_O W_V, or None where it has no such factors."""
    whole = getattr(mechanism, circuit, None)
    if isinstance(whole, nn.Linear):
        return whole.weight.float().norm()
    # Two value halves of a differential pair make one product; they are not told apart here.
    if not isinstance(mechanism, Projected) or hasattr(mechanism, "pairs"):
        return None
    first, second = (getattr(mechanism, name, None) for name in circuit)
    if not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
        return None
    # (heads x dim, width) both: for ov the output's factor is turned.
    one = first.weight.float() if circuit == "qk" else first.weight.float().T
    two = second.weight.float()
    heads = mechanism.heads
    if one.shape[0] % heads or one.shape[1] != two.shape[1] or two.shape[0] % (one.shape[0] // heads):
        return None
    dim = one.shape[0] // heads
    kept = two.shape[0] // dim
    if heads % kept:
        return None
    # ||A'B||^2 = <AA', BB'>: squares of dim x dim in place of products of width x width.
    left, right = (_squares(part.unflatten(0, (-1, dim))) for part in (one, two))
    return (left * right.repeat_interleave(heads // kept, 0)).sum().clamp_min(0).sqrt()


def _squares(rows: Tensor) -> Tensor:
    return rows @ rows.transpose(-2, -1)
