"""A model's fast path and its plain reference: the same loss, the same gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from headtohead.kernels import plain
from headtohead.model.decoder import Decoder


def agreed_gradients(decoder: Decoder, text: Tensor, atol: float) -> dict[str, Tensor]:
    """Check that both paths agree on tokens (batch, time); return the gradients by parameter."""
    losses, grads = [], []
    for slow in (False, True):
        decoder.zero_grad()
        if slow:
            with plain():
                objective = decoder(text, text, 0.1)[0]
        else:
            objective = decoder(text, text, 0.1)[0]
        objective.backward()
        losses.append(objective.detach())
        found = {name: parameter.grad for name, parameter in decoder.named_parameters()}
        grads.append({name: grad.clone() for name, grad in found.items() if grad is not None})
    assert torch.allclose(*losses, rtol=1e-12)
    assert grads[0].keys() == grads[1].keys() == dict(decoder.named_parameters()).keys()
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], rtol=1e-8, atol=atol), name
    return grads[0]
