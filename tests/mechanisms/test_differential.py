"""Differential Attention against its reference, and its costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.kernels import attend, plain
from headtohead.mechanisms.contract.base import Frame, Rotary, Shape, seeded_draw
from headtohead.mechanisms.differential import DifferentialOptions, lambda_init
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from tests.references import differential as reference

WIDTH, HEADS, TIME, LAYER = 16, 4, 7, 1
ARMS = [
    "differential",
    "differential:version=2",
    "differential:version=2,kv_heads=2",
    "differential:version=2,kv_heads=1",
]


def build(arm: str, positions: str = "rope", bias: str = "none", shake: float = 0.2) -> Any:
    mechanism = (
        parse_layout(arm)
        .pattern[0]
        .build(
            Shape(WIDTH, HEADS, LAYER, 2, 64, positions=positions, bias=bias)  # type: ignore[arg-type]
        )
    )
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    with torch.no_grad():
        for name, parameter in mechanism.named_parameters():
            parameter.add_(seeded_draw(2, "test", shake)(name, parameter.shape))
    return mechanism.double()


def inputs(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def frame(time: int = TIME, positions: str = "rope") -> Frame:
    return Frame(time=time, rotary=Rotary(10_000.0, 64) if positions == "rope" else None)


def expected(mechanism: Any, x: Tensor, p: dict[str, Tensor], rope: bool) -> Tensor:
    if mechanism.options.version == 1:
        rows = [
            reference.first(*reference.projected(row, p), p, heads=HEADS, layer=LAYER, rope=rope) for row in x
        ]
    else:
        groups = mechanism.options.kv_heads or HEADS
        rows = [reference.second(row, p, heads=HEADS, kv_heads=groups, rope=rope) for row in x]
    return torch.stack(rows)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("positions", "bias"), [("rope", "none"), ("none", "all")])
def test_output_and_every_gradient_equal_the_reference(arm: str, positions: str, bias: str) -> None:
    mechanism = build(arm, positions, bias)
    x = inputs(2, TIME, WIDTH).requires_grad_()
    parameters = dict(mechanism.named_parameters())
    theirs = expected(mechanism, x, parameters, positions == "rope")
    ours = mechanism(x, frame(positions=positions))
    assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()
    weights = inputs(2, TIME, WIDTH, seed=4)
    found = [
        torch.autograd.grad((output * weights).sum(), (x, *parameters.values())) for output in (ours, theirs)
    ]
    largest = max(float(grad.abs().max()) for grad in found[1])
    for name, a, b in zip(("x", *parameters), *found, strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(float(b.abs().max()), 1e-3 * largest), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("arm", ARMS)
def test_coarse_precision_stays_near_the_reference(arm: str, dtype: torch.dtype, tolerance: float) -> None:
    mechanism = build(arm).to(dtype)
    x = inputs(2, TIME, WIDTH).to(dtype)
    wanted = expected(mechanism.double(), x.double(), dict(mechanism.named_parameters()), True)
    found = mechanism.to(dtype)(x, frame())
    assert (found.double() - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize("padded", [False, True])
def test_9_split_halved_and_padded_forms_agree(padded: bool) -> None:
    """The plain reference is the split form; the halves of v, and q and k padded to its width, equal it to 1e-14."""
    q, k, v = inputs(2, 3, TIME, 4), inputs(2, 3, TIME, 4, seed=6), inputs(2, 3, TIME, 8, seed=7)
    padding = None
    if padded:
        padding = torch.ones(2, TIME, dtype=torch.bool)
        padding[0, :2] = False
    with plain():
        split = attend(q, k, v, padding=padding)
    halved = torch.cat([attend(q, k, half, padding=padding) for half in v.chunk(2, -1)], -1)
    wide_q, wide_k = F.pad(q, (0, 4)), F.pad(k, (0, 4))
    by_hand = attend(wide_q, wide_k, v, padding=padding, scale=0.5)
    for form in (halved, by_hand, attend(q, k, v, padding=padding)):
        assert form.shape == split.shape
        assert (form - split).abs().max() < 1e-14
    scores = torch.softmax((q @ k.mT / 2).masked_fill(torch.ones(TIME, TIME).triu(1) > 0, -math.inf), -1)
    if not padded:
        assert (scores @ v - split).abs().max() < 1e-14


def test_9_subtracting_maps_or_mixes_is_the_same() -> None:
    mechanism = build("differential")
    x = inputs(2, TIME, WIDTH)
    v = mechanism.split_heads(mechanism.v(x), HEADS // 2)
    mixed = mechanism.attention_map(x, frame()) @ v
    assert torch.allclose(mechanism.write(mixed, frame()), mechanism(x, frame()), rtol=1e-11, atol=1e-13)


def test_9_rows_of_the_first_versions_map_sum_to_1_minus_lambda() -> None:
    mechanism = build("differential")
    x = inputs(2, TIME, WIDTH)
    sums = mechanism.attention_map(x, frame()).sum(-1)
    lam = (
        math.exp((mechanism.lambda_q1 @ mechanism.lambda_k1).item())
        - math.exp((mechanism.lambda_q2 @ mechanism.lambda_k2).item())
        + 0.8
        - 0.6 * math.exp(-0.3)
    )
    assert torch.allclose(sums, torch.full_like(sums, 1 - lam), atol=1e-13)


def test_9_rows_of_the_second_versions_map_sum_to_1_minus_sigmoid() -> None:
    mechanism = build("differential:version=2")
    x = inputs(2, TIME, WIDTH)
    sums = mechanism.attention_map(x, frame()).sum(-1)
    wanted = 1 - torch.sigmoid(x @ mechanism.lambda_map.weight.T).transpose(1, 2)
    assert torch.allclose(sums, wanted, atol=1e-13)


@pytest.mark.parametrize("sign", [1, -1])
def test_9_where_both_maps_agree_the_norm_leaves_the_sign_of_1_minus_lambda(sign: int) -> None:
    mechanism = build("differential", shake=0.0)
    with torch.no_grad():  # exp(a) - exp(0) + start is 1 -+ 0.5
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            getattr(mechanism, name).zero_()
        wanted_lambda = 1 - 0.5 * sign
        mechanism.lambda_q1[0] = 1.0
        mechanism.lambda_k1[0] = math.log(wanted_lambda + 1 - lambda_init(LAYER))
    assert mechanism.share(inputs(1, 1, WIDTH)).item() == pytest.approx(wanted_lambda)
    x = inputs(3, 1, WIDTH) * 100  # large compared with the norm's eps
    v = mechanism.v(x).unflatten(-1, (HEADS // 2, -1))
    normed = v / v.square().mean(-1, keepdim=True).sqrt() * (1 - lambda_init(LAYER))
    assert torch.allclose(mechanism(x, frame(1)), sign * mechanism.o(normed.flatten(-2)), rtol=1e-4)


def test_9_without_lambda_and_norm_the_first_version_is_attention_of_the_even_sub_heads() -> None:
    mechanism = build("differential")
    with torch.no_grad():
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            getattr(mechanism, name).zero_()
    mechanism.lambda_init = 0.0
    x = inputs(2, TIME, WIDTH)
    q, k, v = (
        getattr(mechanism, name)(x).unflatten(-1, (n, -1)).transpose(1, 2)
        for name, n in zip("qkv", (4, 4, 2))
    )
    q, k = (frame().rotate(side)[:, 0::2] for side in (q, k))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found: list[Tensor] = []
    mechanism.write = lambda mixed, frame: found.append(mixed)
    mechanism(x, frame())
    assert torch.allclose(found[0], wanted, rtol=1e-12, atol=1e-14)


def test_9_a_closed_gate_makes_the_second_version_standard_attention_of_the_even_queries() -> None:
    mechanism, standard = (
        build("differential:version=2"),
        parse_layout("standard").pattern[0].build(Shape(WIDTH, HEADS, LAYER, 2, 64)).double(),
    )
    x = inputs(2, TIME, WIDTH)
    x[..., 0] = 1.0
    with torch.no_grad():
        mechanism.lambda_map.weight.zero_()
        mechanism.lambda_map.weight[:, 0] = -math.inf
        even = mechanism.q.weight.unflatten(0, (2 * HEADS, -1))[0::2]
        standard.q.weight.copy_(even.flatten(0, 1))
        for name in "kvo":
            getattr(standard, name).weight.copy_(getattr(mechanism, name).weight)
    assert torch.allclose(mechanism(x, frame()), standard(x, frame()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("layer", "value"), [(0, 0.200), (1, 0.356), (7, 0.727), (11, 0.778), (23, 0.799)])
def test_lambda_init_of_the_layers(layer: int, value: float) -> None:
    assert lambda_init(layer) == pytest.approx(value, abs=5e-4)


def on_meta(arm: str, size: str, ffn: int = 0) -> Decoder:
    shape = dataclasses.replace(SIZES[size], ffn=ffn or SIZES[size].ffn)
    return Decoder.on_meta(shape, parse_layout(arm).layers(shape.layers))


COUNTS = {
    "10m": (10_491_392, 936, 10_482_944),
    "60m": (59_297_792, 1872, 59_261_952),
    "150m": (151_867_392, 2816, 151_973_376),
    "454m": (454_175_744, 3752, 454_363_136),
}


@pytest.mark.parametrize("size", COUNTS)
def test_8_parameter_counts_of_section_4(size: str) -> None:
    first, ffn, second = COUNTS[size]
    assert on_meta("differential", size).parameter_count() == first
    assert on_meta("differential:version=2", size, ffn).parameter_count() == second


@pytest.mark.parametrize(
    ("arm", "extra"), [("differential", 6 * 64), ("differential:version=2", 512**2 + 512 * 8)]
)
def test_8_extra_parameters_of_a_layer(arm: str, extra: int) -> None:
    difference = on_meta(arm, "60m").parameter_count() - on_meta("standard", "60m").parameter_count()
    assert difference == 8 * extra


def test_8_cache_and_flops_are_the_published_ones() -> None:
    width, heads, keys = 512, 8, 513 / 2
    shape = Shape(width, heads, 0, 8, 512)
    for arm, linear, per_key in (
        ("differential", 8 * width**2, 6 * width),
        ("differential:version=2", 10 * width**2 + 2 * width * heads, 8 * width),
    ):
        mechanism = parse_layout(arm).pattern[0].build(shape)
        assert mechanism.flops(512).causal == linear + per_key * keys
        assert (
            sum(entry.bytes(1, 1, torch.bfloat16) for entry in mechanism.cache_spec() or ()) == 2 * width * 2
        )


def test_circuits() -> None:
    for arm, own, decayed in (
        ("differential", ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"), False),
        ("differential:version=2", ("lambda_map.weight",), True),
    ):
        groups = {
            (circuit.tag, circuit.follows, circuit.decay): circuit.parameters
            for circuit in build(arm).circuits()
        }
        assert groups["own", "qk", decayed] == own
        assert groups["qk", None, True] == ("q.weight", "k.weight")
        assert groups["ov", None, True] == ("v.weight", "o.weight")
        assert groups.get(("ov", None, False)) == (("gain",) if arm == "differential" else None)


def test_initial_values() -> None:
    mechanism = parse_layout("differential").pattern[0].build(Shape(4096, 4))
    mechanism.initialise(seeded_draw(1, "test", 0.02))
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        assert getattr(mechanism, name).std().item() == pytest.approx(0.1, rel=0.1)
    assert bool((mechanism.gain == 1).all())
    assert not torch.equal(mechanism.lambda_q1, mechanism.lambda_q2)


def test_impossible_options_are_rejected() -> None:
    with pytest.raises(UserError, match="kv_heads needs version=2"):
        DifferentialOptions(kv_heads=2)
    with pytest.raises(UserError, match="unknown value for version"):
        DifferentialOptions(version=3)
    with pytest.raises(UserError, match="even number of heads; got 3"):
        parse_layout("differential").pattern[0].build(Shape(12, 3))
    with pytest.raises(UserError, match="evenly"):
        build("differential:version=2,kv_heads=8")


def test_labels() -> None:
    labels = [parse_layout(arm).label for arm in ARMS[:2]]
    assert labels == ["differential V1", "differential V2"]
    assert parse_layout("differential:version=2,kv_heads=1").label == "differential V2, 1 kv head"
