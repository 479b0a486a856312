"""AdamW with one group per circuit."""

from __future__ import annotations

import torch
from torch import Tensor

from headtohead.model.decoder import Decoder
from headtohead.training.settings import TrainSettings


def make_optimiser(model: Decoder, settings: TrainSettings) -> torch.optim.AdamW:
    """Return AdamW over every parameter, grouped by circuit tag; vectors and what asks for it are not decayed."""
    parameters = dict(model.named_parameters())
    factors = settings.rate_factors()
    groups: dict[tuple[str, str | None, bool], list[Tensor]] = {}
    for circuit in model.circuits():
        members = groups.setdefault((circuit.tag, circuit.follows, circuit.decay), [])
        members += [parameters[name] for name in circuit.parameters]
    rows = [
        {
            "params": members,
            "tag": tag,
            "follows": follows,
            "factor": factors.get(tag, factors.get(follows or "", 1.0) if tag == "own" else 1.0),
            "weight_decay": settings.weight_decay if decay else 0.0,
        }
        for (tag, follows, decay), members in groups.items()
    ]
    return torch.optim.AdamW(rows, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=True)


def optimiser_tensors(model: Decoder, optimiser: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return the optimiser's state by parameter name, for a checkpoint."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors


def restore_optimiser(model: Decoder, optimiser: torch.optim.AdamW, tensors: dict[str, Tensor]) -> None:
    """Put back the state that `optimiser_tensors` gave."""
    for name, parameter in model.named_parameters():
        state = {
            key: tensors[f"{name}/{key}"].to(parameter.device)
            for key in ("step", "exp_avg", "exp_avg_sq")
            if f"{name}/{key}" in tensors
        }
        if state:
            optimiser.state[parameter] = state
