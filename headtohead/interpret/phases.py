"""Statistics of phases: how far oscillators agree, how strongly they are pulled, and how many coordinates the gates use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headtohead.interpret.maps import watching
from headtohead.mechanisms.contract.base import Frame, Mechanism
from headtohead.mechanisms.kuramoto import Kuramoto, Synchrony
from headtohead.model.decoder import Decoder


@torch.no_grad()
def layer_phases(model: Decoder, tokens: Tensor) -> list[dict[str, float] | None]:
    """Return the statistics of every layer for tokens (batch, time); None for a layer without phases."""
    found: dict[int, dict[str, float]] = {}

    def take(index: int, mechanism: Mechanism, x: Tensor, frame: Frame) -> None:
        if isinstance(mechanism, Kuramoto) and (one := mechanism.synchrony(x, frame)) is not None:
            found[index] = phase_statistics(one)

    frame = Frame()
    with watching(model, frame, take):
        model.hidden(tokens, frame=frame)
    return [found.get(index) for index in range(len(model.layers))]


def phase_statistics(one: Synchrony) -> dict[str, float]:
    """Return order parameter, coupling strength and gate entropy, each as a mean over coordinates and tokens.

    The first token couples to nothing and is left out. `step` is kappa r: above 1 an update overshoots the mean, above 2 it
    moves away from it. `gate_entropy` is relative to equal gates; `gate_coordinates` is (sum g)^2 / sum g^2.
    """
    pull = one.pull[:, 1:].double()
    step = (one.gain * pull).abs()
    found = {
        "order": float(one.order.double().mean()),
        "largest_order": float(one.order.double().mean(0).max()),
        "pull": float(pull.mean()),
        "gain": float(one.gain.double().abs().mean()),
        "step": float(step.mean()),
        "overshoots": float((step > 1).double().mean()),
        "unstable": float((step > 2).double().mean()),
    }
    if one.gates is None:
        return found
    gates = one.gates.double().abs()
    shares = gates / gates.sum(-1, keepdim=True).clamp_min(1e-300)
    entropy = -torch.special.xlogy(shares, shares).sum(-1).mean()
    equal = math.log(gates.shape[-1])
    return found | {
        "gate_sum": float(gates.sum(-1).mean()),
        "gate_entropy": float(entropy) / equal if equal else 1.0,
        "gate_coordinates": float((1 / shares.square().sum(-1)).mean()),
    }
