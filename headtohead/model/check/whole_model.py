"""Checks of level `raceable` on a whole decoder: two blocks with norms, feed-forward blocks and residual space.

A mechanism may behave differently inside a model: the decoder runs a companion together with the batch, autocast narrows
some products but not others, and the residual space adds the updates.
"""

from __future__ import annotations

import copy
import statistics

import torch
from torch import Tensor

from headtohead.model.check.fixture import TIME, Fixture, require, require_close
from headtohead.model.decoder import Decoder

# Autocast may change outputs and gradients by this multiple of the change from rounding the parameters to bf16 in float32
# arithmetic, and always by LEAST. Measured over every setting of the built-in mechanisms: at most 1.9 times for
# outputs and 2.4 times for gradients. A fixed tolerance fails where the function itself is steep: the norm of
# gated_linear changes by 10 % when its parameters are rounded.
TIMES = 4.0
LEAST = 0.02


def padded_batch(bench: Fixture) -> None:
    """A sequence in a padded batch has the same states as alone, causal and bidirectional."""
    model = bench.model()
    supports = model.layers[0].mechanism.supports
    if not supports.padding:
        return
    lengths = (TIME, 7, 4)
    tokens = bench.tokens(len(lengths))
    for causal in (True, False) if supports.bidirectional else (True,):
        with torch.no_grad():
            alone = [
                model.hidden(row[None, :length], causal=causal)[0]
                for row, length in zip(tokens, lengths, strict=True)
            ]
        for side in ("right", "left"):
            real = torch.arange(TIME) < torch.tensor(lengths)[:, None]
            real = real if side == "right" else real.flip(1)
            filled = bench.tokens(len(lengths), seed=9)
            for row, length in enumerate(lengths):
                filled[row, real[row]] = tokens[row, :length]
            with torch.no_grad():
                together = model.hidden(filled, padding=real, causal=causal)
            for row, wanted in enumerate(alone):
                words = (
                    f"in a {'causal' if causal else 'bidirectional'} model, a batch with {side} padding changes the "
                    "states of a sequence (by {error}); use frame.padding, or declare "
                    f"supports = Supports({'padding' if causal else 'bidirectional'}=False)"
                )
                require_close(together[row, real[row]], wanted, words)


def autocast(bench: Fixture) -> None:
    """Under autocast to bf16 a whole decoder stays finite and close to float32, outputs and gradients."""
    model = bench.model(torch.float32)
    if not model.layers[0].mechanism.writes:
        return
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    errors: dict[str, list[tuple[float, float]]] = {"output": [], "gradient": []}
    for tokens in bench.tokens(3).split(1):
        exact = _outcome(model, tokens)
        narrow = _outcome(model, tokens, narrow=True)
        nearby = _outcome(rounded, tokens)
        for what in errors:
            require(bool(torch.isfinite(narrow[what]).all()), f"{what} not finite under autocast to bf16")
            size = float(exact[what].norm().clamp_min(1e-30))
            found, allowed = (float((other[what] - exact[what]).norm()) / size for other in (narrow, nearby))
            errors[what].append((found, allowed))
    if model.layers[0].mechanism.singular:
        return
    for what, pairs in errors.items():
        # The median of three sequences: one at a pole of the function is not decisive.
        found, nearby_error = (statistics.median(side) for side in zip(*pairs, strict=True))
        allowed = max(LEAST, TIMES * nearby_error)
        require(
            found < allowed,
            f"under autocast to bf16 the {what} has a relative error of {found:.1%}, at most {allowed:.1%} is allowed; "
            "compute in float32 where bf16 is too narrow (torch.autocast(..., enabled=False))",
        )


def _outcome(model: Decoder, tokens: Tensor, narrow: bool = False) -> dict[str, Tensor]:
    """Return the model's states and its gradient, all parameters concatenated."""
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        states = model.hidden(tokens)
    states = states.float()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(8))
    found = torch.autograd.grad((states * weights).sum(), list(model.parameters()), allow_unused=True)
    gradient = torch.cat([part.flatten() for part in found if part is not None])
    return {"output": states.detach(), "gradient": gradient}
