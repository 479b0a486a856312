"""Every mechanism against its independent float64 reference: outputs and every gradient."""

from __future__ import annotations

import copy
import importlib
import importlib.util

import pytest
import torch
from torch import Tensor

from headtohead.mechanisms.contract.base import Frame, Rotary, Shape, seeded_draw
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.mechanisms.contract.terms import named_term
from headtohead.model.layout import parse_layout
from tests.references import attention as reference

HEADS, WIDTH, TIME = 4, 16, 7
# These have references that accept any options; the others are compared in separate files.
HERE = ("standard", "sharing", "diagonal", "factorised", "latent", "gated_linear")
HERE += ("gated", "sink", "exclusive", "forgetting", "value_residual", "canon", "flex")
HERE += ("gated_delta", "selective_state")


def build(arm: str, positions: str, bias: str):  # type: ignore[no-untyped-def]
    mechanism = (
        parse_layout(arm).pattern[0].build(Shape(WIDTH, HEADS, 1, 2, 32, positions=positions, bias=bias))
    )
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    with torch.no_grad():
        for name, parameter in mechanism.named_parameters():
            parameter.add_(seeded_draw(2, "test", 0.2)(name, parameter.shape))
    return mechanism.double()


def expected(arm: str, mechanism, x: Tensor, p: dict[str, Tensor], positions: str) -> Tensor:  # type: ignore[no-untyped-def]
    name, options = mechanism.name, mechanism.options
    if importlib.util.find_spec(f"tests.references.{name}"):
        own = importlib.import_module(f"tests.references.{name}")
        return torch.stack([own.expected(row, p, options, heads=HEADS, positions=positions) for row in x])
    score = "score" if positions == "rope" else "none"
    if name == "standard":
        facts = {
            "heads": HEADS,
            "kv_heads": options.kv_heads or HEADS,
            "rope": score,
            "window": options.window,
            "eps": 1e-6,
        }
        return torch.stack([reference.standard(row, p, **facts) for row in x])
    return torch.stack([reference.diagonal(row, p, heads=HEADS, rope=score) for row in x])


# These share one reference; the others have their own file in tests/references.
ARMS = [
    named_term(name, {}).kind.name + (":" + text.split(":", 1)[1] if ":" in text else "")
    for name, kind in builtin_mechanisms().items()
    if name in HERE
    for text in dict.fromkeys(
        parse_layout(name).pattern[0].terms[0].__class__(kind, options).text
        for options in kind.Options.examples()
    )
]


def takes(arm: str, positions: str) -> bool:
    """Whether the arm supports these positions; an arm with an option about rotary positions needs them."""
    base = parse_layout(arm).pattern[0].base
    return positions in base.kind.supports.positions and (positions == "rope" or "rope_dim" not in arm)


CASES = [
    (arm, positions, bias)
    for arm in ARMS
    for positions, bias in (("rope", "none"), ("none", "all"))
    if takes(arm, positions)
]


def drawn(seed: int) -> Tensor:
    return torch.randn(2, TIME, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("arm", "positions", "bias"), CASES)
def test_output_and_every_gradient_equal_the_reference(arm: str, positions: str, bias: str) -> None:
    mechanism = build(arm, positions, bias)
    x, weights = drawn(3).requires_grad_(), drawn(4)
    rotary = Rotary(10_000.0, 32) if positions == "rope" else None
    parameters = dict(mechanism.named_parameters())
    ours = mechanism(x, Frame(time=TIME, rotary=rotary))
    theirs = expected(arm, mechanism, x, parameters, positions)
    assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()
    inputs = (x, *parameters.values())
    ours_grads = torch.autograd.grad((ours * weights).sum(), inputs)
    theirs_grads = torch.autograd.grad((theirs * weights).sum(), inputs)
    largest = max(float(grad.abs().max()) for grad in theirs_grads)
    for name, a, b in zip(("x", *parameters), ours_grads, theirs_grads, strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(float(b.abs().max()), 1e-3 * largest), name


@pytest.mark.slow
@pytest.mark.parametrize(("arm", "positions", "bias"), CASES)
def test_low_precision_stays_close_to_the_reference(arm: str, positions: str, bias: str) -> None:
    mechanism, x = build(arm, positions, bias), drawn(3)
    rotary = Rotary(10_000.0, 32) if positions == "rope" else None
    with torch.no_grad():
        wanted = expected(arm, mechanism, x, dict(mechanism.named_parameters()), positions)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            found = copy.deepcopy(mechanism).to(dtype)(x.to(dtype), Frame(time=TIME, rotary=rotary))
            assert (found.double() - wanted).norm() < tolerance * wanted.norm(), dtype
