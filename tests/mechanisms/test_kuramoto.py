"""Kuramoto attention: its reference, and properties that the formulas imply."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call

from headtohead.common.errors import UserError
from headtohead.kernels import plain
from headtohead.mechanisms.contract.base import Frame, Rotary, Shape, seeded_draw
from headtohead.mechanisms.contract.options import changed_options, options_as_dict
from headtohead.mechanisms.families.groups import Circle
from headtohead.mechanisms.families.kuramoto_options import KuramotoOptions
from headtohead.mechanisms.kuramoto import Kuramoto
from headtohead.mechanisms.kuramoto_gated import KuramotoGated, KuramotoGatedOptions
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.study.plan.budgets import match_params
from tests.references import kuramoto as reference

HEADS, WIDTH, TIME = 4, 16, 6
FORMS = [options for options in KuramotoOptions.examples() if options.coupling != "off"]  # type: ignore[attr-defined]
FORMS += [
    KuramotoOptions(group="son", order=4, heads="full"),
    KuramotoOptions(group="s3", value="dense"),
    KuramotoOptions(group="so3", heads="full", gate="token", drift="half"),
    KuramotoOptions(mask="inclusive", gate="token", heads="full"),
    KuramotoOptions(update="embed", heads="full", gain="capped", phase_map="key"),
    KuramotoOptions(harmonics=2, successor="replace", heads="full", mask="strict_null", cache="features"),
    KuramotoGatedOptions(),
]


def name_of(options: Any) -> str:
    changed = ",".join(f"{key}={value}" for key, value in changed_options(options).items())
    return type(options).__name__.removesuffix("Options").lower() + ":" + changed


def build(
    options: Any = None, *, positions: str = "rope", heads: int = HEADS, width: int = WIDTH
) -> Kuramoto:
    options = options or KuramotoOptions()
    kind = KuramotoGated if isinstance(options, KuramotoGatedOptions) else Kuramoto
    mechanism = kind(Shape(width, heads, 1, 2, 32, positions=positions), options)  # type: ignore[arg-type]
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    with torch.no_grad():
        for name, parameter in mechanism.named_parameters():
            parameter.add_(seeded_draw(2, "test", 0.2)(name, parameter.shape))
    return mechanism.double()


def frame(time: int = TIME, rope: bool = True, **facts: Any) -> Frame:
    return Frame(time=time, rotary=Rotary(10_000.0, 32) if rope else None, **facts)


def phases(batch: int = 2, time: int = TIME, width: int = WIDTH, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(batch, time, width, dtype=torch.float64, generator=generator)


def loops(mechanism: Kuramoto, x: Tensor, rope: bool = True) -> Tensor:
    """The reference for this mechanism's parameters."""
    options = SimpleNamespace(**options_as_dict(mechanism.options))
    parameters, tables = dict(mechanism.named_parameters()), dict(mechanism.named_buffers())
    rows = [reference.layer(row, parameters, options, mechanism.heads, rope, tables) for row in x]
    return torch.stack(rows)


@pytest.mark.parametrize("options", FORMS, ids=name_of)
@pytest.mark.parametrize("positions", ["rope", pytest.param("none", marks=pytest.mark.slow)])
def test_output_and_every_gradient_equal_the_reference(options: Any, positions: str) -> None:
    mechanism, rope = build(options, positions=positions), positions == "rope"
    free = phases().requires_grad_()
    x = reference.place(options.group, options.order, free)
    ours, theirs = mechanism(x, frame(rope=rope)), loops(mechanism, x, rope)
    assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()
    parameters = dict(mechanism.named_parameters())
    weights, inputs = phases(seed=4), (free, *parameters.values())
    wanted = torch.autograd.grad((theirs * weights).sum(), inputs, retain_graph=True)
    found = torch.autograd.grad((ours * weights).sum(), inputs)
    largest = max(float(gradient.abs().max()) for gradient in wanted)
    for name, one, other in zip(("x", *parameters), found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-10 * max(float(other.abs().max()), 1e-3 * largest), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("options", [KuramotoOptions(), KuramotoGatedOptions()], ids=name_of)
def test_in_lower_precision_it_stays_near_the_reference(
    options: Any, dtype: torch.dtype, tolerance: float
) -> None:
    mechanism = build(options)
    x = phases().to(dtype)
    wanted = loops(mechanism, x.double())
    found = mechanism.to(dtype)(x, frame()).double()
    assert (found - wanted).norm() < tolerance * wanted.norm()


def test_double_loop_dense_form_and_sdpa_are_one() -> None:
    mechanism, x = build(), phases()
    wanted = torch.zeros_like(x)
    gate = torch.nn.functional.softplus(mechanism.gate)
    for b, t, h in ((b, t, h) for b in range(2) for t in range(1, TIME) for h in range(HEADS)):
        own = range(4 * h, 4 * h + 4)
        rate = [10_000.0 ** (-(j % 4) / 4) for j in range(WIDTH)]
        score = torch.stack(
            [
                sum(gate[j] * torch.cos(x[b, t, j] - x[b, u, j] + rate[j] * (t - u)) for j in own)
                for u in range(t)
            ]
        )
        weight = torch.softmax(score, 0)
        for j in own:
            wanted[b, t, j] = mechanism.kappa[j] * (weight * torch.sin(x[b, :t, j] - x[b, t, j])).sum()
    fast = mechanism(x, frame())
    with plain():
        dense = mechanism(x, frame())
    assert (fast - wanted).abs().max() < 1e-12
    assert (dense - wanted).abs().max() < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        KuramotoOptions(),
        KuramotoOptions(gate="token"),
        KuramotoOptions(mask="strict_null"),
        KuramotoOptions(harmonics=2, successor="mix"),
    ],
    ids=name_of,
)
def test_gradcheck_on_phases_gates_and_gains(options: KuramotoOptions) -> None:
    mechanism, x = build(options, heads=2, width=4), phases(1, 4, 4).requires_grad_()
    parameters = {name: value.detach().requires_grad_() for name, value in mechanism.named_parameters()}

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(mechanism, dict(zip(parameters, values, strict=True)), (x, frame(4)))

    assert gradcheck(run, (x, *parameters.values()))


def test_adding_multiples_of_2_pi_has_no_effect() -> None:
    mechanism, x = build(KuramotoGatedOptions()), phases()
    turns = torch.randint(-3, 4, x.shape, generator=torch.Generator().manual_seed(1))
    moved = mechanism(x + 2 * math.pi * turns.double(), frame())
    assert torch.allclose(moved, mechanism(x, frame()), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "invariant"),
    [
        (KuramotoOptions(), True),
        (KuramotoOptions(successor="mix", heads="full"), True),
        (KuramotoOptions(harmonics=3), True),
        (KuramotoOptions(mask="strict_null"), False),
        (KuramotoOptions(value="dense"), False),
    ],
    ids=["default", "mix", "harmonics", "null", "dense"],
)
def test_shifting_a_coordinate_of_all_tokens_leaves_the_update(
    options: KuramotoOptions, invariant: bool
) -> None:
    mechanism, x = build(options), phases()
    moved = x.clone()
    moved[..., 5] += 0.7
    same = torch.allclose(mechanism(moved, frame()), mechanism(x, frame()), atol=1e-12)
    assert same == invariant


def test_equal_phases_do_not_move() -> None:
    x = phases(time=1).expand(-1, TIME, -1).contiguous()
    assert build()(x, frame()).abs().max() < 1e-15


def test_known_answers() -> None:
    mechanism = Kuramoto(Shape(1, 1, positions="none"), KuramotoOptions(sharpness=1.0)).double()
    with torch.no_grad():
        mechanism.gate.fill_(math.log(math.expm1(1.0)))
    quarter = math.pi / 2
    x = torch.tensor([0.0, quarter, 2 * quarter], dtype=torch.float64).view(1, 3, 1)
    bare = frame(3, rope=False)
    update = mechanism(x, bare).detach().flatten()
    assert update[1].item() == pytest.approx(-1.0, abs=1e-12)
    weights = mechanism.attention_map(x, bare)
    assert weights is not None
    assert weights[0, 0, 2].tolist() == pytest.approx([0.26894, 0.73106, 0.0], abs=5e-6)
    assert update[2].item() == pytest.approx(-0.73106, abs=5e-6)


@pytest.mark.parametrize("harmonics", [1, 2])
@pytest.mark.parametrize("successor", ["none", "replace", "mix"])
def test_causality_bit_for_bit(successor: str, harmonics: int) -> None:
    mechanism, x = build(KuramotoOptions(successor=successor, harmonics=harmonics)), phases()
    before = mechanism(x, frame())
    for t in range(1, TIME):
        changed = x.clone()
        changed[:, t] += 1.0
        assert torch.equal(mechanism(changed, frame())[:, :t], before[:, :t])


@pytest.mark.parametrize("options", FORMS, ids=name_of)
def test_the_first_token_stays_and_nobody_attends_to_itself(options: Any) -> None:
    mechanism = build(options)
    x = reference.place(options.group, options.order, phases())
    weights = mechanism.attention_map(x, frame())
    assert weights is not None
    if options.mask != "strict_null":
        zero = torch.zeros_like(weights[..., 0, 0])
        diagonal = weights.diagonal(dim1=-2, dim2=-1)
        assert torch.equal(diagonal, torch.zeros_like(diagonal)) == (options.mask == "strict")
        assert torch.equal(weights[..., 0, :].sum(-1), zero) == (options.mask == "strict")
    if options.value == "phase":
        assert mechanism(x, frame())[:, 0].abs().max() < 1e-15


@pytest.mark.parametrize(
    ("group", "drift"),
    [
        ("s1", "half"),
        *((group, drift) for group in ("s1", "s3", "so3", "sphere") for drift in ("fixed", "learned")),
    ],
)
def test_the_score_depends_on_distances_alone(group: str, drift: str) -> None:
    mechanism = build(KuramotoOptions(group=group, drift=drift))
    x = reference.place(group, 4, phases())
    left = torch.ones(2, TIME + 3, dtype=torch.bool)
    shown = mechanism.attention_map(x, frame())
    # Prepend three tokens, then cut them out of the map: the rest are scores at shifted positions.
    longer = mechanism.attention_map(torch.cat((x[:, :3], x), 1), frame(TIME + 3, padding=left))
    assert shown is not None
    assert longer is not None
    rest = longer[..., 4:, 3:]
    rest = rest / rest.sum(-1, keepdim=True)
    assert torch.allclose(rest, shown[..., 1:, :], atol=1e-12)


def test_weights_solve_the_entropy_regularised_problem() -> None:
    mechanism, x = build(positions="none"), phases()
    weights = mechanism.attention_map(x, frame(rope=False))
    assert weights is not None
    gate = torch.nn.functional.softplus(mechanism.gate)
    score = (gate * torch.cos(x.unsqueeze(2) - x.unsqueeze(1))).unflatten(-1, (HEADS, -1)).sum(-1)
    score = score.permute(0, 3, 1, 2)
    for t in range(1, TIME):
        row, chance = score[..., t, :t], weights[..., t, :t]
        reached = (chance * row).sum(-1) - (chance * chance.log()).sum(-1)
        assert torch.allclose(reached, torch.logsumexp(row, -1), atol=1e-12)


def test_at_fixed_weights_a_step_climbs_and_is_the_gradient() -> None:
    x = phases(4, TIME, WIDTH)
    weights = torch.rand(4, TIME, TIME, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).tril(
        -1
    )
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)
    others = x.detach()

    def agreement(state: Tensor) -> Tensor:
        return torch.einsum("btu,btuj->btj", weights, torch.cos(state.unsqueeze(2) - others.unsqueeze(1)))

    point = Circle().features(x.unsqueeze(-1))
    mean = torch.einsum("btu,bujf->btjf", weights, point)
    pull = Circle().pull(x.unsqueeze(-1), point, mean).squeeze(-1)
    state = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(agreement(state).sum(), state)
    assert torch.allclose(pull, slope, atol=1e-12)
    strength = mean.norm(dim=-1).clamp_min(1e-12)
    for product in (0.1, 0.5, 1.0, 1.9, 2.0):
        after = agreement(x + product / strength * pull)
        assert (after - agreement(x)).min() > -1e-12, product


def test_known_answers_of_the_second_harmonic() -> None:
    options = KuramotoOptions(sharpness=1.0, harmonics=2)
    mechanism = Kuramoto(Shape(1, 1, positions="none"), options).double()
    x = torch.tensor([0.0, math.pi / 4], dtype=torch.float64).view(1, 2, 1)
    for coefficients, wanted in (([1.0, 0.0], -math.sqrt(0.5)), ([0.0, 1.0], -1.0), ([0.0, -2.0], 2.0)):
        with torch.no_grad():
            mechanism.kappa.copy_(torch.tensor(coefficients))
        assert mechanism(x, frame(2, rope=False))[0, 1, 0].item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("successor", ["none", "replace", "mix"])
def test_harmonics_start_as_the_layer_without_them(successor: str) -> None:
    shape, x = Shape(WIDTH, HEADS, 1, 2, 32, positions="rope"), phases()
    one, three = (
        Kuramoto(shape, KuramotoOptions(successor=successor, harmonics=count)).double() for count in (1, 3)
    )
    assert (one(x, frame()) - three(x, frame())).abs().max() < 1e-14
    added = sum(p.numel() for p in three.parameters()) - sum(p.numel() for p in one.parameters())
    assert added == 2 * WIDTH * (2 if successor == "mix" else 1)
    assert all(parameter.ndim == 1 for parameter in three.parameters()), "a matrix would be decayed"


def test_synchrony_is_that_of_the_first_harmonic() -> None:
    shape, x = Shape(WIDTH, HEADS, 1, 2, 32, positions="rope"), phases()
    one, three = (
        Kuramoto(shape, KuramotoOptions(harmonics=count)).double().synchrony(x, frame()) for count in (1, 3)
    )
    assert one is not None
    assert three is not None
    for name, wanted, found in zip(one._fields, one, three, strict=True):
        assert torch.allclose(found, wanted, atol=1e-14), name


def test_dense_values_are_ordinary_attention_on_features() -> None:
    mechanism, x = build(KuramotoOptions(value="dense"), positions="none"), phases()
    gate = torch.nn.functional.softplus(mechanism.gate).view(HEADS, 1, 4)
    c, s = (part.unflatten(-1, (HEADS, 4)).transpose(1, 2) for part in (x.cos(), x.sin()))
    root = gate.sqrt()
    k = torch.cat((root * c, root * s), -1)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        k[..., 1:, :], k[..., :-1, :], torch.cat((c, s), -1)[..., :-1, :], is_causal=True, scale=1.0
    )
    c, s = (part.transpose(1, 2).flatten(2) for part in mixed.chunk(2, -1))
    wanted = torch.stack((c, s), -1).flatten(2) @ mechanism.v.weight.T
    assert torch.allclose(mechanism(x, frame(rope=False))[:, 1:], wanted, atol=1e-12)


def test_without_coupling_only_the_feed_forward_part_is_left() -> None:
    size = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=16, vocabulary=32)
    model = Decoder(size, parse_layout("kuramoto:coupling=off,ffn_start=small").layers(2), seed=1)
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))
    alone = torch.stack([model.logits(tokens[:, i : i + 1])[:, 0] for i in range(9)], 1)
    assert torch.allclose(model.logits(tokens), alone, atol=1e-6)
    assert len(list(model.blocks[0].mechanism.parameters())) == 0


@pytest.mark.parametrize("group", ["sphere", "son"])
def test_circles_as_vectors_and_as_matrices_move_equally(group: str) -> None:
    angles, x = build(width=8), phases(width=8)
    drift = "fixed"
    other = build(
        KuramotoOptions(group=group, order=2, drift=drift, gate_map="free"),
        width=16 if group == "sphere" else 32,
    )
    gate = torch.nn.functional.softplus(angles.gate)
    with torch.no_grad():
        other.gate.copy_(gate if group == "sphere" else gate / 2)  # tr of 2 x 2 rotations is 2 cos
        other.kappa.copy_(angles.kappa)
    c, s = x.cos(), x.sin()
    turned = torch.stack((c, s) if group == "sphere" else (c, -s, s, c), -1)
    tangent = torch.stack((-s, c) if group == "sphere" else (-s, -c, c, -s), -1)
    wanted = angles(x, frame()).unsqueeze(-1) * tangent
    assert torch.allclose(other(turned.flatten(2), frame()), wanted.flatten(2), atol=1e-12)


def test_the_tangent_term_is_that_of_akorn_in_two_dimensions() -> None:
    # AKOrN, arXiv 2410.13821, N = 2, no stimulus, no rotation: Proj_x(sum_u J x_u) with J = A.
    mechanism, x = build(KuramotoOptions(gain="one")), phases()
    weights = mechanism.attention_map(x, frame())
    assert weights is not None
    points = torch.stack((x.cos(), x.sin()), -1)
    pulled = torch.einsum("bhtu,buhdf->bthdf", weights, points.unflatten(2, (HEADS, 4))).flatten(2, 3)
    along = (pulled * points).sum(-1, keepdim=True)
    tangent = pulled - along * points
    moved = (tangent * torch.stack((-x.sin(), x.cos()), -1)).sum(-1)
    assert torch.allclose(mechanism(x, frame()), moved, atol=1e-12)


@pytest.mark.parametrize("harmonics", [1, 2])
@pytest.mark.parametrize("cache", ["f32", "i16", "features"])
def test_incremental_decoding_is_the_full_forward(cache: str, harmonics: int) -> None:
    mechanism, x = build(KuramotoOptions(cache=cache, harmonics=harmonics)).float(), phases().float()
    kept = mechanism.new_cache(2, TIME, torch.float32)
    parts = []
    for t in range(TIME):
        parts.append(mechanism(x[:, t : t + 1], frame(1, start=t), kept))
        kept.length += 1
    error = (torch.cat(parts, 1) - mechanism(x, frame())).abs().max()
    assert error < (2e-4 if cache == "i16" else 1e-5)
    assert (error > 1e-6) == (cache == "i16"), "16-bit angles are rounded, the others are not"
    assert kept.bytes == sum(entry.bytes(2, TIME, torch.float32) for entry in mechanism.cache_spec())


def test_angles_in_16_bits_are_off_by_half_a_step_and_logits_by_little() -> None:
    size = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=64, vocabulary=32)
    arm = "kuramoto:ffn_start=small,cache="
    exact, coarse = (Decoder(size, parse_layout(arm + kind).layers(2), seed=1) for kind in ("f32", "i16"))
    tokens = torch.randint(0, 32, (2, 40), generator=torch.Generator().manual_seed(1))
    caches = coarse.new_caches(2, 40)
    rounded = coarse.logits(tokens, caches=caches)
    angles = caches.layers[0].tensors["state"].double() * (2 * math.pi / 2**16)
    error = torch.remainder(angles - exact.embedding.weight[tokens].double() + math.pi, 2 * math.pi) - math.pi
    assert error.abs().max() <= math.pi / 2**16 * 1.01
    assert (rounded - exact.logits(tokens)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("options", "per_token"),
    [
        (KuramotoOptions(), {torch.float32: 4 * WIDTH, torch.bfloat16: 4 * WIDTH, torch.float64: 8 * WIDTH}),
        (KuramotoOptions(cache="i16"), {torch.float32: 2 * WIDTH, torch.bfloat16: 2 * WIDTH}),
        (KuramotoOptions(cache="features"), {torch.bfloat16: 8 * WIDTH}),
        (KuramotoOptions(successor="replace"), {torch.bfloat16: 4 * WIDTH}),
        (KuramotoOptions(successor="mix", harmonics=3), {torch.bfloat16: 4 * WIDTH}),
        (KuramotoGatedOptions(), {torch.bfloat16: 4 * WIDTH + 4 * WIDTH}),
        (KuramotoOptions(coupling="off"), {torch.float32: 0}),
    ],
    ids=["f32", "i16", "features", "successor", "harmonics", "gated", "off"],
)
def test_declared_cache_bytes_are_the_published_ones(options: Any, per_token: dict[torch.dtype, int]) -> None:
    mechanism = build(options)
    for dtype, wanted in per_token.items():
        declared = sum(entry.bytes(3, 10, dtype) for entry in mechanism.cache_spec())
        assert declared == 3 * 10 * wanted
        assert mechanism.new_cache(3, 10, dtype).bytes == declared


# Counts, costs, circuits, rejected options.

COUNTS = [
    ("kuramoto", "1m", 296, 1_047_040),
    ("kuramoto:gate=pair,successor=replace", "1m", 210, 1_100_800),
    ("kuramoto", "1m", 288, 1_021_440),
    ("kuramoto", "5m", 624, 4_992_256),
    ("kuramoto:heads=full", "1m", 288, 1_023_360),
    ("kuramoto:heads=full", "5m", 624, 5_003_008),
    ("kuramoto:value=dense", "1m", 240, 1_031_040),
    ("kuramoto:value=dense", "5m", 520, 4_978_432),
    ("kuramoto:successor=mix", "1m", 288, 1_022_080),
    ("kuramoto:successor=mix", "5m", 624, 4_993_792),
    ("kuramoto:readout=tied", "1m", 312, 1_032_832),
    ("kuramoto:readout=tied", "5m", 640, 4_984_320),
    ("kuramoto:coupling=off", "1m", 288, 1_020_160),
    ("kuramoto:coupling=off", "5m", 624, 4_989_184),
]


@pytest.mark.parametrize(("arm", "size", "ffn", "count"), COUNTS)
def test_parameters_are_the_published_ones(arm: str, size: str, ffn: int, count: int) -> None:
    shape = dataclasses.replace(SIZES[size], ffn=ffn)
    assert Decoder.on_meta(shape, parse_layout(arm).layers(shape.layers)).parameter_count() == count


@pytest.mark.parametrize(("size", "ffn"), [("1m", 288), ("5m", 624)])
def test_the_published_widths_are_the_solved_ones(size: str, ffn: int) -> None:
    shape = SIZES[size]
    target = Decoder.on_meta(shape, parse_layout("standard").layers(shape.layers)).parameter_count()
    assert abs(match_params(shape, parse_layout("kuramoto").layers(shape.layers), target).ffn - ffn) <= 1


def test_flops_are_the_published_ones() -> None:
    for size, ffn, total in (("1m", 288, 2.63e6), ("5m", 624, 11.41e6)):
        shape = dataclasses.replace(SIZES[size], ffn=ffn)
        model = Decoder.on_meta(shape, parse_layout("kuramoto").layers(shape.layers))
        assert model.flops(256).causal == pytest.approx(total, rel=2e-3)
        width, layers = shape.width, shape.layers
        exact = layers * (8 * width * 255 / 2 + 10 * width * ffn) + 4 * width * 256
        assert model.flops(256).causal == exact
        more = Decoder.on_meta(shape, parse_layout("kuramoto:harmonics=3").layers(shape.layers))
        assert more.flops(256).causal == exact + layers * 8 * width * 255 / 2, "each harmonic mixes 2 D more"


def test_initial_values_are_the_published_ones() -> None:
    mechanism = Kuramoto(Shape(128, 4), KuramotoOptions())
    assert mechanism.gate[0].item() == pytest.approx(-1.579, abs=5e-4)
    assert torch.nn.functional.softplus(mechanism.gate).view(4, -1).sum(-1).tolist() == pytest.approx(
        [6.0] * 4
    )
    for gate_map in ("exp", "sigmoid_scaled", "free"):
        other = Kuramoto(Shape(128, 4), KuramotoOptions(gate_map=gate_map))
        gates = other._gates(torch.zeros(1))
        assert isinstance(gates, Tensor)
        assert gates.sum((-2, -1)).tolist() == pytest.approx([12.0] * 4, rel=1e-5), (
            "each gate applies to two features"
        )
    full = Kuramoto(Shape(128, 4), KuramotoOptions(heads="full", gain="capped"))
    assert (2 * torch.sigmoid(full.kappa)).tolist() == pytest.approx([0.25] * 128)
    mixed = Kuramoto(Shape(128, 4), KuramotoOptions(heads="full", successor="mix"))
    assert mixed.here.tolist() == [0.25] * 128
    assert torch.count_nonzero(mixed.after) == 0
    random = Kuramoto(Shape(64, 4, context=8), KuramotoOptions(coupling="random_frozen"))
    random.initialise(seeded_draw(1, "x", 0.02))
    assert random.frozen_q.square().sum(-1).tolist() == pytest.approx([64.0] * 8)
    assert not torch.equal(random.frozen_q, random.frozen_k)


def test_circuits_follow_the_right_group() -> None:
    options = KuramotoOptions(
        gate="pair", phase_map="both", mask="strict_null", drift="learned", value="dense"
    )
    groups = {
        name: (circuit.tag, circuit.follows, circuit.decay)
        for circuit in (*build(options).circuits(), *build().circuits())
        for name in circuit.parameters
    }
    assert groups["q.weight"] == groups["k.weight"] == ("qk", None, True)
    assert groups["gate_q.weight"] == ("own", "qk", True)
    for name in ("gate", "gate_k.bias", "null", "rate"):
        assert groups[name] == ("own", "qk", False)
    assert groups["v.weight"] == ("ov", None, True)
    assert groups["kappa"] == ("own", "ov", False)
    (gains,) = (
        one
        for one in build(KuramotoOptions(harmonics=2, successor="mix")).circuits()
        if "here" in one.parameters
    )
    assert (set(gains.parameters), gains.tag, gains.follows) == ({"here", "after"}, "own", "ov")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"successor": "replace", "mask": "inclusive"}, "would read the token after the query"),
        ({"successor": "mix", "mask": "inclusive"}, "would read the token after the query"),
        ({"coupling": "uniform", "gate": "pair"}, "gate=pair has no effect: coupling=uniform has no scores"),
        ({"coupling": "random_frozen", "mask": "strict_null"}, "strict_null needs scores"),
        ({"coupling": "off", "successor": "mix"}, "coupling=off disables the update"),
        ({"gate": "const", "gate_map": "exp"}, "gate=const has no learned value to map"),
        ({"value": "dense", "update": "embed"}, "takes no tangent step"),
        ({"successor": "mix", "gain": "capped"}, "its own two coefficients"),
        (
            {"harmonics": 2, "gain": "capped"},
            "gain=capped has no effect: harmonics=2 learn a coefficient each",
        ),
        ({"harmonics": 2, "update": "embed"}, "a mean in the plane has no harmonics"),
        ({"harmonics": 2, "value": "dense"}, "harmonics=2 has no effect: value=dense takes no tangent step"),
        ({"harmonics": 2, "coupling": "off"}, "coupling=off disables the update"),
        ({"harmonics": 2, "group": "s3"}, "group=s3 has no angles"),
        ({"harmonics": 0}, "harmonics=0 is too small"),
        ({"group": "s3", "phase_map": "both"}, "group=s3 has no angles"),
        ({"group": "so3", "cache": "i16"}, "cache=i16 keeps angles"),
        ({"order": 3}, "order applies to son and sphere"),
        ({"ffn": "none", "ffn_start": "small"}, "no weights to initialize"),
        ({"gain": "capped", "gain_start": 2.5}, "needs 0 < gain_start < 2"),
    ],
)
def test_contradictions_are_rejected_with_the_reason(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        KuramotoOptions(**given)


def test_a_group_that_does_not_divide_the_width_is_rejected() -> None:
    with pytest.raises(
        UserError, match=r"s3 has blocks of 4 coordinates, which do not divide the 6 of a head"
    ):
        Kuramoto(Shape(12, 2), KuramotoOptions(group="s3"))
    with pytest.raises(
        UserError, match=r"so\(3\) has blocks of 9 coordinates, which do not divide the 16 of the width"
    ):
        Kuramoto(Shape(16, 4), KuramotoOptions(group="son", order=3, heads="full"))
    with pytest.raises(UserError, match="drift=half needs two blocks"):
        Kuramoto(Shape(16, 4), KuramotoOptions(group="s3", drift="half"))


def test_frozen_weights_end_with_the_context() -> None:
    mechanism = build(KuramotoOptions(coupling="random_frozen"))
    with pytest.raises(UserError, match="for 32 tokens; 33 were requested"):
        mechanism(phases(time=33), frame(33))


def test_the_mask_decides_how_much_weight_a_token_keeps_for_itself() -> None:
    # Mean self-weight of random phases with equal gates, (T, d, sum g): by the closed form.
    facts = [(17, 6, 5.0, 0.89, 0.01), (17, 6, 20.0, 0.999, 5e-4)]
    facts += [(256, 32, 4.0, 0.35, 0.01), (256, 32, 8.0, 0.94, 0.01), (256, 32, 16.0, 0.9999, 1e-4)]
    for time, width, total, wanted, margin in facts:
        options = KuramotoOptions(mask="inclusive", gate="const", sharpness=total)
        mechanism = Kuramoto(Shape(width, 1, positions="none"), options).double()
        generator = torch.Generator().manual_seed(1)
        x = math.pi * (2 * torch.rand(8, time, width, dtype=torch.float64, generator=generator) - 1)
        weights = mechanism.attention_map(x, frame(time, rope=False))
        assert weights is not None
        kept = weights.diagonal(dim1=-2, dim2=-1).mean().item()
        assert kept == pytest.approx(wanted, abs=margin), (time, total)
