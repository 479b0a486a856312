"""The gated linear recurrence as a layer: chunked = step by step, a state of fixed size, no positions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from headtohead import kernels
from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Frame, Rotary, Shape, seeded_draw
from headtohead.mechanisms.gated_linear import GatedLinear, GatedLinearOptions
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

WIDTH, HEADS = 16, 4


def build(dtype: torch.dtype = torch.float64, **options: object) -> GatedLinear:
    mechanism = GatedLinear(Shape(WIDTH, HEADS, 0, 1, 256), GatedLinearOptions(**options))
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    return mechanism.to(dtype)


def inputs(time: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(time)
    return (scale * torch.randn(2, time, WIDTH, generator=generator)).to(dtype)


def run(mechanism: GatedLinear, x: Tensor, padding: Tensor | None = None) -> Tensor:
    return mechanism(x, Frame(time=x.shape[1], rotary=Rotary(10_000.0, 256), padding=padding))


@pytest.mark.parametrize("time", [1, 3, 16, 63, 65])
@pytest.mark.parametrize("temperature", [16.0, 0.05])
def test_the_chunked_form_equals_step_by_step(time: int, temperature: float) -> None:
    mechanism = build(temperature=temperature)
    results = []
    for plain in (False, True):
        x = inputs(time).requires_grad_()
        if plain:
            with kernels.plain():
                output = run(mechanism, x)
        else:
            output = run(mechanism, x)
        results.append((output, *torch.autograd.grad(output.square().sum(), (x, *mechanism.parameters()))))
    largest = max(float(theirs.abs().max()) for theirs in results[1][1:])
    for place, (ours, theirs) in enumerate(zip(*results, strict=True)):
        assert (ours - theirs).abs().max() <= 1e-10 * (largest if place else theirs.abs().max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_long_sequences_stay_close_in_low_precision(dtype: torch.dtype, tolerance: float) -> None:
    mechanism, x = build(dtype), inputs(200)
    wanted = run(build(), x)
    assert (run(mechanism, x.to(dtype)).double() - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_inputs_leave_outputs_and_gradients_finite(dtype: torch.dtype, scale: float) -> None:
    mechanism = build(dtype, temperature=0.1)
    x = inputs(40, scale, dtype).requires_grad_()
    output = run(mechanism, x)
    gradients = torch.autograd.grad(output.float().mean(), (x, *mechanism.parameters()))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (output, *gradients))


def test_padding_anywhere_is_invisible() -> None:
    mechanism, x = build(), inputs(20)
    wanted = run(mechanism, x)
    real = torch.ones(2, 27, dtype=torch.bool)
    real[:, [0, 1, 5, 11, 12, 25, 26]] = False
    spread = inputs(27, 5.0)
    spread[real] = x.flatten(0, 1)
    assert torch.allclose(run(mechanism, spread, real)[real], wanted.flatten(0, 1), rtol=1e-9, atol=1e-11)


def test_the_state_does_not_grow_with_the_context() -> None:
    size = dataclasses.replace(SIZES["nano"], layers=1)
    model = Decoder.on_meta(size, parse_layout("gated_linear").layers(1))
    held = {model.cache_bytes(3, capacity, torch.bfloat16) for capacity in (1, 128, 8192)}
    heads, head = size.heads, size.width // size.heads
    assert held == {3 * heads * (head // 2) * head * 4}, "stays float32 in a narrow cache"
    assert model.flops(128).full == model.flops(8192).full


def test_parameters_by_the_formula() -> None:
    d, rank = 64, 16
    mechanism = parse_layout("gated_linear").pattern[0].build(Shape(d, 4))
    count = 2 * d * (d // 2) + 3 * d * d + d * rank + rank * (d // 2) + d // 2 + d // 4
    assert sum(parameter.numel() for parameter in mechanism.parameters()) == count


def test_positions_have_no_effect() -> None:
    mechanism, x = build(), inputs(20)
    assert torch.equal(run(mechanism, x), mechanism(x, Frame(time=20)))


def test_the_map_gives_the_output_before_the_norm() -> None:
    mechanism, x = build(output_gate=False), inputs(20)
    frame = Frame(time=20)
    weights = mechanism.attention_map(x, frame)
    v = mechanism.split_heads(mechanism.v(x), HEADS)
    mixed = (weights @ v).transpose(1, 2)
    normed = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mechanism.gain
    assert torch.allclose(mechanism.o(normed.flatten(2)), mechanism(x, frame), rtol=1e-10, atol=1e-12)


def test_forgetting_starts_slow() -> None:
    """sigmoid(0)^(1/16): a state decays by half in 16 tokens."""
    mechanism = build()
    log_decay = mechanism.inputs(torch.zeros(1, 16, WIDTH, dtype=torch.float64), Frame(time=16)).log_decay
    assert torch.allclose(log_decay.sum(2).exp(), torch.tensor(0.5, dtype=torch.float64))


def test_a_hybrid_decodes() -> None:
    size = dataclasses.replace(SIZES["nano"], layers=4, vocabulary=50)
    model = Decoder(size, parse_layout("(gated_linear standard)*2").layers(4), seed=1).double()
    tokens = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(0))
    caches = model.new_caches(2, 20)
    parts = [model.logits(tokens[:, :7], caches=caches)]
    parts += [model.logits(tokens[:, i : i + 1], caches=caches) for i in range(7, 20)]
    assert torch.allclose(torch.cat(parts, 1), model.logits(tokens), rtol=1e-9, atol=1e-12)


def test_it_is_causal_only() -> None:
    model = Decoder(SIZES["nano"], parse_layout("gated_linear").layers(2), seed=1)
    with pytest.raises(UserError, match="does not support bidirectional"):
        model.hidden(torch.zeros(1, 4, dtype=torch.long), causal=False)


def test_circuits_follow_the_right_group() -> None:
    follows = {name: c.follows for c in build().circuits() if c.tag == "own" for name in c.parameters}
    assert follows == {
        "decay_down.weight": "qk",
        "decay_up.weight": "qk",
        "decay_up.bias": "qk",
        "gain": "ov",
        "gate.weight": "ov",
    }


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_decays_that_would_not_decay_are_rejected(temperature: float) -> None:
    with pytest.raises(UserError, match="must be above 0"):
        GatedLinearOptions(temperature=temperature)


@pytest.mark.parametrize("cut", [1, 31, 32, 63, 64, 65, 70])
def test_the_past_stays_bit_for_bit_across_chunks(cut: int) -> None:
    mechanism, x = build(), inputs(75)
    changed = torch.cat((x[:, :cut], 3 * inputs(75)[:, cut:].flip(1)), 1)
    assert torch.equal(run(mechanism, changed)[:, :cut], run(mechanism, x)[:, :cut])
