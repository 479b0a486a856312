"""The gated delta rule and the selective state space layer: chunks equal steps, states of fixed size, what their options do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from headtohead import kernels
from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Frame, Rotary, Shape, seeded_draw
from headtohead.mechanisms.families.recurrent import Recurrent
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

WIDTH, HEADS = 16, 4
NAMES = ["gated_delta", "selective_state"]
ARMS = [*NAMES, "gated_delta:decay=channel", "selective_state:groups=2"]


def build(arm: str, dtype: torch.dtype = torch.float64, heads: int = HEADS) -> Recurrent:
    mechanism = parse_layout(arm).pattern[0].build(Shape(WIDTH, heads, 0, 1, 256))
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    assert isinstance(mechanism, Recurrent)
    return mechanism.to(dtype)


def inputs(time: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(time)
    return (scale * torch.randn(2, time, WIDTH, generator=generator)).to(dtype)


def run(mechanism: Recurrent, x: Tensor, padding: Tensor | None = None) -> Tensor:
    return mechanism(x, Frame(time=x.shape[1], rotary=Rotary(10_000.0, 256), padding=padding))


@pytest.mark.parametrize("time", [1, 3, 63, 66])
@pytest.mark.parametrize("arm", ARMS)
def test_the_chunked_form_equals_step_by_step(arm: str, time: int) -> None:
    mechanism = build(arm)
    x = inputs(time).requires_grad_()
    wanted = (x, *mechanism.parameters())
    output = run(mechanism, x)
    with kernels.plain():
        steps = run(mechanism, x)
    assert torch.allclose(output, steps, rtol=1e-10, atol=1e-12)
    fast = torch.autograd.grad(output.square().sum(), wanted)
    slow = torch.autograd.grad(steps.square().sum(), wanted)
    largest = max(float(grad.abs().max()) for grad in slow)
    assert all((a - b).abs().max() <= 1e-10 * largest for a, b in zip(fast, slow, strict=True))


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arm", ARMS)
def test_extreme_inputs_leave_outputs_and_gradients_finite(
    arm: str, dtype: torch.dtype, scale: float
) -> None:
    mechanism = build(arm, dtype)
    x = inputs(40, scale, dtype).requires_grad_()
    output = run(mechanism, x)
    gradients = torch.autograd.grad(output.float().mean(), (x, *mechanism.parameters()))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (output, *gradients))


@pytest.mark.parametrize("arm", ARMS)
def test_padding_before_and_after_is_invisible(arm: str) -> None:
    mechanism, x = build(arm), inputs(20)
    real = torch.zeros(2, 27, dtype=torch.bool)
    real[:, 4:24] = True
    spread = inputs(27, 5.0)
    spread[:, 4:24] = x
    assert torch.allclose(run(mechanism, spread, real)[:, 4:24], run(mechanism, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("cut", [1, 32, 63, 65])
def test_the_past_stays_bit_for_bit_across_chunks(arm: str, cut: int) -> None:
    mechanism, x = build(arm), inputs(70)
    changed = torch.cat((x[:, :cut], 3 * x[:, cut:].flip(1)), 1)
    assert torch.equal(run(mechanism, changed)[:, :cut], run(mechanism, x)[:, :cut])


@pytest.mark.parametrize(("name", "keys"), [("gated_delta", 8), ("selective_state", 32)])
def test_the_cache_does_not_grow_with_the_context(name: str, keys: int) -> None:
    size = dataclasses.replace(SIZES["nano"], layers=1)
    model = Decoder.on_meta(size, parse_layout(name).layers(1))
    held = {model.cache_bytes(3, capacity, torch.bfloat16) for capacity in (1, 128, 8192)}
    groups = size.heads if name == "gated_delta" else 1
    state, recent = 4 * size.heads * keys * 16, 2 * 4 * (2 * groups * keys + size.width)
    assert held == {3 * (state + recent)}, (
        "the state stays float32 in a narrow cache, inputs of convolutions do not"
    )
    assert model.flops(128).full == model.flops(8192).full


@pytest.mark.parametrize("arm", ARMS)
def test_the_map_gives_the_output_of_the_scan(arm: str) -> None:
    bare = ",output_norm=false,output_gate=" + ("none" if "delta" in arm else "false,skip=false")
    mechanism, x = build(arm + (bare if ":" in arm else ":" + bare[1:])), inputs(20)
    frame = Frame(time=20)
    v = torch.nn.functional.silu(mechanism.v_conv(mechanism.v(x), None, ""))
    mixed = mechanism.attention_map(x, frame) @ mechanism.split_heads(v, HEADS)
    wanted = mechanism.o(mixed.transpose(1, 2).flatten(2))
    assert torch.allclose(wanted, mechanism(x, frame), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_hybrid_decodes(name: str) -> None:
    size = dataclasses.replace(SIZES["nano"], layers=4, vocabulary=50)
    model = Decoder(size, parse_layout(f"({name} standard)*2").layers(4), seed=1).double()
    tokens = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(0))
    caches = model.new_caches(2, 20)
    parts = [model.logits(tokens[:, :2], caches=caches), model.logits(tokens[:, 2:7], caches=caches)]
    parts += [model.logits(tokens[:, i : i + 1], caches=caches) for i in range(7, 20)]
    assert torch.allclose(torch.cat(parts, 1), model.logits(tokens), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("arm", [*ARMS, "gated_linear"])
def test_compiled_outputs_and_gradients_are_the_same(arm: str) -> None:
    mechanism, x = build(arm), inputs(70).requires_grad_()
    frame = Frame(time=70)
    torch._dynamo.reset()
    compiled = torch.compile(mechanism, fullgraph=True, backend="aot_eager")
    wanted = (x, *mechanism.parameters())
    grads = [torch.autograd.grad(form(x, frame).square().sum(), wanted) for form in (compiled, mechanism)]
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-10) for a, b in zip(*grads, strict=True))


def test_a_written_value_is_read_back_and_replaced() -> None:
    """With b = 1, no decay and keys of norm 1, the state returns the last value written under a key."""
    key = torch.nn.functional.normalize(torch.randn(1, 1, 1, 4, dtype=torch.float64), dim=-1).expand(
        1, 1, 3, 4
    )
    v = torch.randn(1, 1, 3, 5, dtype=torch.float64)
    none, one = torch.zeros(1, 1, 3, 1, dtype=torch.float64), torch.ones(1, 1, 3, 1, dtype=torch.float64)
    read, _ = kernels.gated_scan(key, key, v, none, None, one)
    assert torch.allclose(read, v)
    added, _ = kernels.gated_scan(key, key, v, none)
    assert torch.allclose(added, v.cumsum(2))


@pytest.mark.parametrize("arm", ["gated_delta", "gated_delta:decay=channel", "selective_state"])
def test_decays_start_in_the_range_of_the_papers(arm: str) -> None:
    """Rates of 1 to 16 times steps of 0.001 to 0.1."""
    mechanism = build(arm, heads=8)
    log_decay = mechanism.inputs(torch.zeros(1, 1, WIDTH, dtype=torch.float64), Frame(time=1)).log_decay
    assert (log_decay >= -16 * 0.1).all()
    assert (log_decay <= -0.001).all()
    assert len(set(log_decay.flatten().tolist())) == log_decay.numel()


@pytest.mark.parametrize(("arm", "own"), [("gated_delta", 9), ("selective_state", 12)])
def test_circuits_follow_the_right_group(arm: str, own: int) -> None:
    follows = {name: c.follows for c in build(arm).circuits() if c.tag == "own" for name in c.parameters}
    assert len(follows) == own
    assert {follows[name] for name in ("q_conv.weight", "k_conv.weight", "rate")} == {"qk"}
    assert {follows[name] for name in ("v_conv.weight", "gate.weight", "gain")} == {"ov"}


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("gated_delta:beta_max=0", "beta_max=0 must be above 0"),
        ("gated_delta:beta_max=3", "at most 2.0 is allowed"),
        ("gated_delta:conv=1", "conv=1 is no convolution"),
        ("gated_delta:decay_rank=2", "decay_rank has no effect with decay=head"),
        ("selective_state:conv=1", "conv=1 is no convolution"),
        ("selective_state:groups=3", "4 heads cannot form groups=3 evenly"),
        ("gated_delta+coupled", "gated_delta is a recurrence without scores"),
    ],
)
def test_options_that_contradict_are_rejected(arm: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(arm)
