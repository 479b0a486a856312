"""Mechanisms that add one thing to standard attention: what the addition does, and where it reduces to standard."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.interpret.maps import layer_maps
from headtohead.kernels import plain
from headtohead.mechanisms.contract.base import Frame, Mechanism, Rotary, Shape, seeded_draw
from headtohead.mechanisms.exclusive import without_direction
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from tests.references import value_residual

WIDTH, HEADS, TIME = 16, 4, 9
NAMES = ("gated", "sink", "exclusive", "forgetting", "value_residual", "canon")
SIZE = dataclasses.replace(SIZES["nano"], layers=4, width=32, ffn=24, context=24, vocabulary=20)
TOKENS = torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(0))


def build(arm: str, **changes: Any) -> Any:
    mechanism = (
        parse_layout(arm).pattern[0].build(Shape(WIDTH, HEADS, **{"layer": 1, "layers": 2, **changes}))
    )
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    return mechanism.double()


def inputs(time: int = TIME, seed: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(2, time, WIDTH, dtype=torch.float64, generator=draw)


def run(mechanism: Mechanism, x: Tensor, rope: bool = True) -> Tensor:
    return mechanism(x, Frame(time=x.shape[1], rotary=Rotary(10_000.0, 64) if rope else None))


def decoder(arm: str) -> Decoder:
    size = SIZE.with_settings(init_std=0.3)
    return Decoder(size, parse_layout(arm).layers(size.layers), seed=1).double().eval()


def put(mechanism: Mechanism, **values: float | Tensor) -> None:
    """Set parameters, named with _ for dots, to these values."""
    parameters = {name.replace(".", "_"): value for name, value in mechanism.named_parameters()}
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(torch.as_tensor(value))


# Where each of them is standard attention.


def test_an_open_gate_is_standard_attention() -> None:
    gated, x = build("gated", bias="all"), inputs()
    put(gated, gate_weight=0.0, gate_bias=50.0)
    assert torch.allclose(run(gated, x), run(build("standard", bias="all"), x), rtol=1e-12)


def test_a_gate_starts_near_one_half() -> None:
    gated, x = build("gated:gate=head"), inputs()
    put(gated, gate_weight=0.0)
    assert torch.allclose(run(gated, x), run(build("standard"), x) / 2, rtol=1e-12)


def test_a_sink_of_score_minus_infinity_is_standard_attention() -> None:
    sink, x = build("sink:window=3"), inputs()
    put(sink, sink=-1e4)
    assert torch.allclose(run(sink, x), run(build("standard:window=3"), x), rtol=1e-12)


def test_gates_that_forget_nothing_are_attention_without_positions() -> None:
    forgetting, x = build("forgetting"), inputs()
    put(forgetting, forget_gate_weight=0.0, forget_gate_bias=50.0)
    assert torch.allclose(run(forgetting, x), run(build("standard"), x, rope=False), rtol=1e-12)
    turned = build("forgetting:rope=true")
    put(turned, forget_gate_weight=0.0, forget_gate_bias=50.0)
    assert torch.allclose(run(turned, x), run(build("standard"), x), rtol=1e-12)


def test_convolutions_without_weight_are_standard_attention() -> None:
    canon, x = build("canon"), inputs()
    put(canon, canon_x=0.0, canon_q=0.0, canon_k=0.0, canon_v=0.0)
    assert torch.allclose(run(canon, x), run(build("standard"), x), rtol=1e-12)


@pytest.mark.parametrize("shares", [(0.0, 1.0), (0.5, 0.5)])
def test_a_model_of_value_residuals_is_standard_only_without_the_first_values(
    shares: tuple[float, float],
) -> None:
    model = decoder("value_residual")
    for block in model.layers[1:]:
        put(block.mechanism, shares=torch.tensor(shares))
    same = torch.allclose(model.logits(TOKENS), decoder("standard").logits(TOKENS), rtol=1e-10)
    assert same == (shares == (0.0, 1.0))


# What each addition does.


@pytest.mark.parametrize("bias", ["learned", "zero"])
def test_a_sink_is_one_more_term_of_the_normalizer(bias: str) -> None:
    sink, x = build(f"sink:bias={bias}"), inputs()
    score = torch.tensor([0.5, -1.0, 2.0, 0.0]) if bias == "learned" else torch.zeros(HEADS)
    if bias == "learned":
        put(sink, sink=score)
    frame = Frame(time=TIME)
    q, k, v = sink.positioned(x, frame)
    scores = (q @ k.mT * sink.dim**-0.5).masked_fill(~frame.mask(x.device), float("-inf"))
    weights = scores.exp() / (score.double().exp()[:, None, None] + scores.exp().sum(-1, keepdim=True))
    assert torch.allclose(sink.mix(q, k, v, frame, None), weights @ v, rtol=1e-10)
    assert torch.allclose(sink.attention_map(x, frame), weights, rtol=1e-10)
    assert weights.sum(-1).max() < 1


@pytest.mark.parametrize(
    "arm", ["sink", "sink:kv_heads=2", "sink:bias=zero,window=3", "forgetting:kv_heads=1"]
)
def test_fused_attention_has_the_gradients_of_the_whole_map(arm: str) -> None:
    mechanism, found = build(arm), []
    put(mechanism, **({"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])} if hasattr(mechanism, "sink") else {}))
    for whole in (False, True):
        x = inputs().requires_grad_()
        if whole:
            with plain():
                output = run(mechanism, x)
        else:
            output = run(mechanism, x)
        found.append((output, *torch.autograd.grad(output.square().sum(), (x, *mechanism.parameters()))))
    for fused, exact in zip(*found, strict=True):
        assert (fused - exact).abs().max() <= 1e-10 * exact.abs().max()


def test_the_exclusive_result_is_orthogonal_to_the_own_value_and_zero_at_the_first_token() -> None:
    exclusive, x = build("exclusive:kv_heads=2"), inputs()
    frame = Frame(time=TIME)
    q, k, v = exclusive.positioned(x, frame)
    mixed, own = exclusive.mix(q, k, v, frame, None), v.repeat_interleave(2, 1)
    assert torch.allclose((mixed * own).sum(-1), torch.zeros(2, HEADS, TIME, dtype=torch.float64), atol=1e-12)
    assert not mixed[:, :, 0].any()
    assert mixed[:, :, 1:].abs().max() > 0.1


def test_the_diagonal_of_the_map_has_no_effect_on_the_exclusive_result() -> None:
    exclusive, x = build("exclusive"), inputs()
    frame = Frame(time=TIME)
    q, k, v = exclusive.positioned(x, frame)
    others = exclusive.attention_map(x, frame).tril(-1) @ v
    assert torch.allclose(exclusive.mix(q, k, v, frame, None), without_direction(others, v), atol=1e-12)


def test_gates_that_forget_everything_leave_the_own_value() -> None:
    forgetting, x = build("forgetting"), inputs()
    put(forgetting, forget_gate_weight=0.0, forget_gate_bias=-60.0)
    own = forgetting.o(forgetting.v(x))
    assert torch.allclose(run(forgetting, x), own, rtol=1e-12)


def test_the_decays_are_the_running_products_of_the_gates() -> None:
    forgetting, x = build("forgetting"), inputs()
    put(forgetting, q_weight=torch.zeros(WIDTH, WIDTH))
    gates = torch.sigmoid(forgetting.forget_gate(x)).transpose(1, 2)
    weights = torch.zeros(2, HEADS, TIME, TIME, dtype=torch.float64)
    for i in range(TIME):
        for j in range(i + 1):
            weights[..., i, j] = gates[..., j + 1 : i + 1].prod(-1)
    found = forgetting.attention_map(x, Frame(time=TIME))
    assert torch.allclose(found, weights / weights.sum(-1, keepdim=True), rtol=1e-10)


def test_sums_of_a_long_sequence_stay_accurate_in_bf16() -> None:
    """At 600 tokens the sums reach -400, where bf16 has steps of 2; differences between neighbors must survive."""
    forgetting, x = build("forgetting", context=600), inputs(600)
    wanted = run(forgetting, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(forgetting.float(), x.float())
    assert (found.double() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("options", ["", ":kv_heads=2,window=3"])
@pytest.mark.parametrize("mix", ["learned", "fixed"])
def test_a_later_layer_mixes_the_values_of_the_first(options: str, mix: str) -> None:
    arm = f"value_residual{options or ':'}{options and ','}mix={mix}"
    first, second = build(arm, layer=0), build(arm)
    if mix == "learned":
        put(second, shares=torch.tensor([0.3, 0.9]))
    x, y = inputs(), inputs(seed=4)
    frame = Frame(time=TIME, rotary=Rotary(10_000.0, 64))
    assert torch.equal(first(x, frame), run(build(f"standard{options}"), x))
    found = second(y, frame)
    for row in range(2):
        wanted = value_residual.expected(
            y[row],
            dict(second.named_parameters()),
            second.options,
            heads=HEADS,
            positions="rope",
            first=first.v(x[row]),
        )
        assert torch.allclose(found[row], wanted, rtol=1e-10)


def test_the_first_layers_values_do_not_outlive_a_forward_pass() -> None:
    model = decoder("value_residual")
    fresh = model.logits(TOKENS)
    frame = Frame()
    model.logits(TOKENS.flip(1), frame=frame)
    assert torch.equal(model.logits(TOKENS, frame=frame), fresh)


def test_gradients_of_the_first_values_come_from_later_layers() -> None:
    model = decoder("value_residual:mix=fixed")
    first = model.layers[0].mechanism
    put(first, o_weight=0.0)
    (gradient,) = torch.autograd.grad(model.logits(TOKENS).square().sum(), [first.get_parameter("v.weight")])
    assert gradient.abs().max() > 0


def test_the_initial_convolutions_are_uniform() -> None:
    weight = build("canon:kernel=100").canon_x.detach() * 100**0.5
    assert weight.abs().max() <= 1
    assert abs(weight.mean()) < 0.05
    assert abs(weight.std() - 3**-0.5) < 0.05


@pytest.mark.parametrize("at", ["A", "B", "AB"])
def test_a_convolution_reaches_as_far_as_its_kernel(at: str) -> None:
    canon = build(f"canon:at={at},kernel=3,window=1")
    x = inputs().requires_grad_()
    (reach,) = torch.autograd.grad(run(canon, x)[0, 6].sum(), x)
    depth = 2 * len(at)  # each convolution looks back two tokens, and a window of one adds nothing
    assert [t for t in range(TIME) if reach[0, t].any()] == list(range(6 - depth, 7))


# Costs, cache and composition.


@pytest.mark.parametrize(
    ("arm", "more"),
    [
        ("gated", 64 * 64),
        ("gated:gate=head", 64 * 4),
        ("sink", 4),
        ("sink:bias=zero", 0),
        ("exclusive", 0),
        ("forgetting", 64 * 4 + 4),
        ("value_residual", 2),
        ("value_residual:mix=fixed", 0),
        ("canon:at=A", 4 * 64),
        ("canon:at=B", 4 * 3 * 64),
    ],
)
def test_parameters_beyond_standards(arm: str, more: int) -> None:
    mechanism = parse_layout(arm).pattern[0].build(Shape(64, 4, layer=1, layers=2))
    assert sum(parameter.numel() for parameter in mechanism.parameters()) == 4 * 64 * 64 + more


def test_a_first_layer_has_no_shares() -> None:
    mechanism = parse_layout("value_residual").pattern[0].build(Shape(64, 4, layer=0, layers=2))
    assert sum(parameter.numel() for parameter in mechanism.parameters()) == 4 * 64 * 64


@pytest.mark.parametrize(
    ("arm", "more"),
    [
        *[(name, 0) for name in ("gated", "sink", "exclusive", "value_residual")],
        ("forgetting", 4 * 10 * 4 + 4 * 4),  # one float32 per token and head, and one per head
        ("canon", 4 * (16 + 48) * 2),  # the last four inputs of both convolutions, bf16
    ],
)
def test_cache_bytes_beyond_standards(arm: str, more: int) -> None:
    entries = build(arm).cache_spec()
    usual = 2 * 10 * 16 * 2
    assert sum(entry.bytes(1, 10, torch.bfloat16) for entry in entries) == usual + more


@pytest.mark.parametrize("name", NAMES)
def test_maps_have_a_largest_score(name: str) -> None:
    found = layer_maps(decoder(name), TOKENS)
    assert all(layer.weights is not None and layer.largest_score for layer in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_window_limits_the_cache(name: str) -> None:
    small, large = (
        sum(entry.bytes(1, capacity, torch.bfloat16) for entry in build(f"{name}:window=4").cache_spec())
        for capacity in (4, 400)
    )
    assert small == large


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_hybrids_decode(name: str) -> None:
    model = decoder(f"({name}:window=5 standard)*2")
    caches = model.new_caches(2, 12)
    parts = [model.logits(TOKENS[:, :7], caches=caches)]
    parts += [model.logits(TOKENS[:, i : i + 1], caches=caches) for i in range(7, 12)]
    assert torch.allclose(torch.cat(parts, 1), model.logits(TOKENS), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_stages_are_added(name: str) -> None:
    x = inputs()
    with_stage, without = build(f"{name}+coupled"), build(name)
    assert not torch.allclose(run(with_stage, x), run(without, x))
    with pytest.raises(UserError, match=f"{name} is a whole layer"):
        parse_layout(f"coupled+{name}")


@pytest.mark.parametrize("name", NAMES)
def test_an_uneven_number_of_key_heads_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: 4 heads cannot share kv_heads=3 evenly"):
        build(f"{name}:kv_heads=3")


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("gated:gate=token", "gate 'token'.*allowed: element, head"),
        ("sink:bias=one", "bias 'one'.*allowed: learned, zero"),
        ("canon:at=C", "at 'C'.*allowed: A, AB, B"),
        ("canon:kernel=1", "kernel=1 is too small; at least 2"),
        ("value_residual:mix=0.5", "mix '0.5'.*allowed: fixed, learned"),
    ],
)
def test_options_that_do_not_exist_name_the_allowed_ones(arm: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parse_layout(arm)
    assert "\n" not in str(caught.value)


def test_forgetting_is_causal_only() -> None:
    with pytest.raises(UserError, match="does not support bidirectional"):
        decoder("forgetting").hidden(TOKENS, causal=False)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("gated", {"gate.weight": "ov"}),
        ("forgetting", {"forget_gate.weight": "qk", "forget_gate.bias": "qk"}),
        ("value_residual", {"shares": "ov"}),
    ],
)
def test_own_circuits_follow_the_right_group(name: str, own: dict[str, str]) -> None:
    groups = [circuit for circuit in build(name).circuits() if circuit.tag == "own"]
    assert {parameter: group.follows for group in groups for parameter in group.parameters} == own


def test_the_other_parameters_are_in_the_circuit_they_serve() -> None:
    tags = {
        parameter: circuit.tag
        for name in ("sink", "canon")
        for circuit in build(name).circuits()
        for parameter in circuit.parameters
    }
    found = {name: tag for name, tag in tags.items() if name.startswith(("sink", "canon"))}
    assert found == {"sink": "qk", "canon_x": "both", "canon_q": "qk", "canon_k": "qk", "canon_v": "ov"}
