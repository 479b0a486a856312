"""The coupling against its reference, and properties that the formulas imply."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.functional import jacobian

from headtohead.common.errors import UserError
from headtohead.kernels.dynamics import integrator as dynamics
from headtohead.mechanisms.contract.base import Frame, Mechanism, Rotary, Shape, seeded_draw
from headtohead.mechanisms.contract.options import options_as_dict
from headtohead.mechanisms.contract.terms import Composed, Term
from headtohead.mechanisms.coupled import Coupled, CoupledOptions
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from tests.references import attention, differential
from tests.references import coupled as reference

WIDTH, HEADS, TIME = 16, 4, 6
EXAMPLES = {Coupled.label(options): options for options in CoupledOptions.examples()}
TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=32, vocabulary=50)


def shaken(module: Any, size: float = 0.3) -> Any:
    """Move every parameter off its initial value: a zero last layer hides what it multiplies."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(seeded_draw(2, "shake", size)(name, parameter.shape))
    return module.double()


def layer(arm: str | CoupledOptions, positions: str = "rope", bias: str = "none") -> Mechanism:
    composed = parse_layout(arm).pattern[0] if isinstance(arm, str) else Composed((Term(Coupled, arm),))
    mechanism = composed.build(Shape(WIDTH, HEADS, 1, 2, 64, positions=positions, bias=bias))  # type: ignore[arg-type]
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    return mechanism.double()


def stage(dim: int = 4, heads: int = HEADS, shake: float = 0.3, **values: Any) -> Coupled:
    built = Coupled(Shape(heads * dim, heads), CoupledOptions(**values))
    built.initialise(seeded_draw(1, "test", 0.3))
    return shaken(built, shake)


def inputs(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def frame(time: int, positions: str = "rope") -> Frame:
    return Frame(time=time, rotary=Rotary(10_000.0, 64) if positions == "rope" else None)


def flat(one: Coupled) -> Any:
    """The stage for one token and one head as a map of the vector (q, k)."""

    def step(state: Tensor) -> Tensor:
        q, k = state.view(2, 1, 1, 1, -1)
        return torch.cat([side.flatten() for side in one.evolve(q, k, Frame(time=1))])

    return step


def facts(options: CoupledOptions) -> dict[str, Any]:
    return {
        key: value
        for key, value in options_as_dict(options).items()
        if key not in ("per_head", "hidden", "force_bias")
    }


def agree(ours: Tensor, theirs: Tensor, x: Tensor, mechanism: Mechanism) -> None:
    """Require equal outputs and equal gradients of x and every parameter, to 1e-10."""
    assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()
    weights = inputs(*ours.shape, seed=4)
    parameters = dict(mechanism.named_parameters())
    found = [
        torch.autograd.grad((output * weights).sum(), (x, *parameters.values())) for output in (ours, theirs)
    ]
    largest = max(float(grad.abs().max()) for grad in found[1])
    for name, a, b in zip(("x", *parameters), *found, strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(float(b.abs().max()), 1e-3 * largest), name


@pytest.mark.parametrize(("positions", "bias"), [("rope", "none"), ("none", "all")])
@pytest.mark.parametrize("label", EXAMPLES)
def test_output_and_every_gradient_equal_the_reference(label: str, positions: str, bias: str) -> None:
    options = EXAMPLES[label]
    if options.order == "after_rope" and positions != "rope":
        return
    mechanism = shaken(layer(options, positions, bias))
    x = inputs(2, TIME, WIDTH).requires_grad_()
    p = dict(mechanism.named_parameters())
    rope = positions == "rope"
    theirs = [reference.coupled(row, p, heads=HEADS, rope=rope, **facts(options)) for row in x]
    agree(mechanism(x, frame(TIME, positions)), torch.stack(theirs), x, mechanism)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    "arm", ["coupled", "coupled:dynamics=leapfrog,steps=3,per_head=true", "coupled:dynamics=affine"]
)
def test_coarse_precision_stays_near_the_reference(arm: str, dtype: torch.dtype, tolerance: float) -> None:
    mechanism = shaken(layer(arm), 0.1).to(dtype)
    x = inputs(2, TIME, WIDTH).to(dtype)
    p = {name: value.double() for name, value in mechanism.named_parameters()}
    options = mechanism.stages["coupled"].options
    wanted = torch.stack(
        [reference.coupled(row, p, heads=HEADS, rope=True, **facts(options)) for row in x.double()]
    )
    assert (mechanism(x, frame(TIME)).double() - wanted).norm() < tolerance * wanted.norm()


def test_the_state_is_kept_in_float32_under_bf16() -> None:
    """Seven steps of a hundredth: bf16 loses most of each, float32 only the last rounding."""
    q, k = (inputs(2, HEADS, TIME, 4, seed=seed).bfloat16() for seed in (5, 6))
    errors = {}
    for state in ("float32", "autocast"):
        one = stage(steps=7, dt_init=0.01, state_dtype=state, shake=0.0)
        wanted, _ = one.evolve(q.double(), k.double(), frame(TIME))
        found, _ = one.bfloat16().evolve(q, k, frame(TIME))
        assert found.dtype == torch.bfloat16
        errors[state] = (found.double() - wanted).norm() / wanted.norm()
    assert errors["float32"] < 0.5 * errors["autocast"]


@pytest.mark.parametrize("label", EXAMPLES)
def test_under_autocast_the_pair_keeps_its_dtype(label: str) -> None:
    one = shaken(stage(**vars(EXAMPLES[label]))).float()
    q, k = (inputs(2, HEADS, TIME, 4, seed=seed).float() for seed in (5, 6))
    wanted = one.evolve(q, k, frame(TIME))
    with torch.autocast("cpu", torch.bfloat16):
        found = one.evolve(q.bfloat16(), k.bfloat16(), frame(TIME))
    for coarse, fine in zip(found, wanted, strict=True):
        assert coarse.dtype == torch.bfloat16
        assert (coarse.float() - fine).norm() < 0.05 * fine.norm()


@pytest.mark.parametrize("tie", ["kv", "qk", "qkv"])
def test_over_sharing_a_shared_value_is_the_evolved_unrotated_key(tie: str) -> None:
    mechanism = shaken(layer(f"sharing:tie={tie}+coupled:steps=2"))
    x = inputs(2, TIME, WIDTH).requires_grad_()
    p = dict(mechanism.named_parameters())
    own = {name.removeprefix("stages.coupled."): value for name, value in p.items()}
    theirs = []
    for row in x:
        key = row @ p["k.weight"].T
        query = row @ p["q.weight"].T if tie == "kv" else key
        q, k = reference.evolved(query, key, own, heads=HEADS, rope=True, **facts(CoupledOptions(steps=2)))
        v = row @ p["v.weight"].T if tie == "qk" else k
        rope = "score" if tie == "qk" else "roundtrip"
        theirs.append(attention.attention(q, k, v, p["o.weight"], heads=HEADS, kv_heads=HEADS, rope=rope))
    agree(mechanism(x, frame(TIME)), torch.stack(theirs), x, mechanism)


@pytest.mark.parametrize("stage_text", ["coupled", "coupled:dynamics=leapfrog", "coupled:dynamics=affine"])
def test_over_differential_1_each_sub_head_is_coupled_before_rope(stage_text: str) -> None:
    mechanism = shaken(layer(f"differential+{stage_text}"))
    options = parse_layout(stage_text).pattern[0].terms[0].options
    x = inputs(2, TIME, WIDTH).requires_grad_()
    p = dict(mechanism.named_parameters())
    own = {name.removeprefix("stages.coupled."): value for name, value in p.items()}
    theirs = []
    for row in x:
        q, k, v = differential.projected(row, p)
        q, k = reference.evolved(q, k, own, heads=HEADS, rope=True, **facts(options))
        theirs.append(differential.first(q, k, v, p, heads=HEADS, layer=1, rope=True))
    agree(mechanism(x, frame(TIME)), torch.stack(theirs), x, mechanism)


RULES = ["euler", "leapfrog", "symplectic_euler", "uncoupled"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("base", ["standard", "sharing:tie=kv", "differential"])
def test_1_dt_zero_is_the_baseline_bit_for_bit(base: str, rule: str) -> None:
    coupled, alone = layer(f"{base}+coupled:dynamics={rule},steps=3"), layer(base)
    shaken(coupled.stages["coupled"])
    with torch.no_grad():
        coupled.stages["coupled"].dt.zero_()
    x = inputs(2, TIME, WIDTH)
    assert torch.equal(coupled(x, frame(TIME)), alone(x, frame(TIME)))


@pytest.mark.parametrize("base", ["standard", "sharing:tie=kv", "differential"])
def test_1_affine_at_its_start_is_the_baseline_bit_for_bit(base: str) -> None:
    x = inputs(2, TIME, WIDTH)
    coupled, alone = layer(f"{base}+coupled:dynamics=affine,steps=2"), layer(base)
    assert torch.equal(coupled(x, frame(TIME)), alone(x, frame(TIME)))


def test_1_euler_starts_as_q_plus_a_tenth_of_k() -> None:
    built = Coupled(Shape(WIDTH, HEADS), CoupledOptions())
    built.initialise(seeded_draw(1, "test", 0.3))
    q, k = inputs(1, HEADS, TIME, 4), inputs(1, HEADS, TIME, 4, seed=6)
    new_q, new_k = built.double().evolve(q, k, frame(TIME))
    assert torch.allclose(new_q, q + 0.1 * k, atol=1e-8)  # 0.1 was initialized in float32
    assert torch.equal(new_k, k)


@pytest.mark.parametrize("per_head", ["false", "true"])
def test_1_a_linear_force_is_standard_attention_with_folded_weights(per_head: str) -> None:
    coupled, folded = shaken(layer(f"coupled:force=linear,per_head={per_head}")), layer("standard")
    own = coupled.stages["coupled"]
    with torch.no_grad():
        for name in "vo":
            getattr(folded, name).weight.copy_(getattr(coupled, name).weight)
        q, k = (getattr(coupled, name).weight.view(HEADS, 4, WIDTH) for name in "qk")
        dt = own.dt.view(-1, 1, 1)
        folded.q.weight.copy_((q + dt * k).flatten(0, 1))
        folded.k.weight.copy_((k + dt * (own.k_force.w2 @ q)).flatten(0, 1))
    x = inputs(2, TIME, WIDTH)
    assert torch.allclose(coupled(x, frame(TIME)), folded(x, frame(TIME)), rtol=1e-12, atol=1e-13)


def test_1_the_score_after_one_euler_step() -> None:
    """q_t.k_u + dt k_t.k_u + dt q_t.f(q_u) + dt^2 k_t.f(q_u)."""
    one = stage(heads=1)
    q, k = inputs(1, 1, TIME, 4), inputs(1, 1, TIME, 4, seed=6)
    new_q, new_k = one.evolve(q, k, frame(TIME))
    f = one.k_force(q.transpose(1, 2)).transpose(1, 2)
    dt = one.dt.item()
    wanted = q @ k.mT + dt * k @ k.mT + dt * q @ f.mT + dt**2 * k @ f.mT
    assert torch.allclose(new_q @ new_k.mT, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", ["euler", "leapfrog", "symplectic_euler"])
def test_1_without_a_force_every_integrator_drifts_in_one_go(rule: str) -> None:
    one = stage(dynamics=rule, force="zero", steps=5)
    q, k = inputs(2, HEADS, TIME, 4), inputs(2, HEADS, TIME, 4, seed=6)
    new_q, new_k = one.evolve(q, k, frame(TIME))
    step = getattr(dynamics, rule)
    slow_q, slow_k = step(
        q.transpose(1, 2), k.transpose(1, 2), one.dt.unsqueeze(-1), 5, lambda state: torch.zeros_like(state)
    )
    assert torch.allclose(new_q, slow_q.transpose(1, 2), rtol=1e-13)
    assert torch.equal(new_k, slow_k.transpose(1, 2))


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_2_leapfrog_reuses_the_closing_force(steps: int) -> None:
    count = 0

    def force(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return torch.sin(3 * x)

    q, k = inputs(1, 2, 3, 4), inputs(1, 2, 3, 4, seed=6)
    dt = torch.tensor([[0.2], [0.3], [-0.4]], dtype=torch.float64)
    fast_q, fast_k = dynamics.leapfrog(q, k, dt, steps, force)
    assert count == steps + 1
    for _ in range(steps):
        k = k + dt / 2 * force(q)
        q = q + dt * k
        k = k + dt / 2 * force(q)
    assert torch.allclose(fast_q, q, rtol=1e-12)
    assert torch.allclose(fast_k, k, rtol=1e-12)


@pytest.mark.parametrize(
    "values",
    [
        {"dynamics": "euler", "steps": 2},
        {"dynamics": "leapfrog", "per_head": True, "force_bias": True},
        {"dynamics": "leapfrog", "force": "potential", "hidden": 6, "steps": 2},
        {"dynamics": "symplectic_euler", "force": "potential", "per_head": True, "hidden": 3},
        {"dynamics": "uncoupled", "hidden": 6},
        {"dynamics": "affine", "hidden": 3, "steps": 2},
    ],
    ids=lambda values: ",".join(str(value) for value in values.values()),
)
def test_2_gradcheck_of_states_step_size_and_weights(values: dict[str, Any]) -> None:
    one = stage(dim=2, heads=2, **{"hidden": 5} | values)
    names = [name for name, _ in one.named_parameters()]

    def run(q: Tensor, k: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(one, dict(zip(names, given, strict=True)), (q, k))

    one.forward = one.integrate  # type: ignore[method-assign]
    values_given = [parameter.detach().requires_grad_() for parameter in one.parameters()]
    states = [inputs(1, 2, 2, 2, seed=seed).requires_grad_() for seed in (5, 6)]
    assert gradcheck(run, (*states, *values_given))


@pytest.mark.parametrize("force", ["mlp", "potential", "linear"])
def test_3_leapfrog_then_minus_dt_returns_the_input(force: str) -> None:
    one = stage(dynamics="leapfrog", force=force, steps=4, shake=0.1)
    q, k = inputs(2, HEADS, TIME, 4), inputs(2, HEADS, TIME, 4, seed=6)
    there = one.evolve(q, k, frame(TIME))
    with torch.no_grad():
        one.dt.neg_()
    for back, start in zip(one.evolve(*there, frame(TIME)), (q, k), strict=True):
        assert (back - start).abs().max() < 1e-14 * start.abs().max()


@pytest.mark.parametrize("force", ["mlp", "potential"])
@pytest.mark.parametrize("rule", ["leapfrog", "symplectic_euler"])
def test_3_volume_is_preserved(rule: str, force: str) -> None:
    one = stage(dim=6, heads=1, dynamics=rule, force=force, steps=3)
    matrix = jacobian(flat(one), inputs(12))
    assert torch.linalg.det(matrix).item() == pytest.approx(1.0, abs=1e-12)


def test_3_euler_changes_the_volume_by_det_of_1_minus_dt_squared_times_the_slope_of_f() -> None:
    one = stage(dim=6, heads=1)
    state = inputs(12)
    slope = jacobian(lambda q: one.k_force(q.view(1, 1, 1, 6)).flatten(), state[:6])
    wanted = torch.linalg.det(torch.eye(6, dtype=torch.float64) - one.dt.item() ** 2 * slope).item()
    found = torch.linalg.det(jacobian(flat(one), state)).item()
    assert found == pytest.approx(wanted, rel=1e-12)
    assert abs(found - 1) > 1e-3


@pytest.mark.parametrize("per_head", [False, True])
def test_4_the_potential_force_is_minus_the_numerical_gradient(per_head: bool) -> None:
    one = stage(force="potential", per_head=per_head, hidden=5)
    net = one.k_force
    x = inputs(1, 1, HEADS, 4)

    def potential(x: Tensor) -> Tensor:
        w1, b1, w2 = (
            value if per_head else value.unsqueeze(0).expand(HEADS, *value.shape)
            for value in (net.w1, net.b1, net.w2)
        )
        inner = torch.einsum("hmd,bthd->bthm", w1, x) + b1
        return (w2 * torch.nn.functional.silu(inner)).sum()

    force = net(x)
    for place in range(x.numel()):
        shift = torch.zeros(x.numel(), dtype=torch.float64)
        shift[place] = 1e-5
        slope = (potential(x + shift.view_as(x)) - potential(x - shift.view_as(x))) / 2e-5
        assert force.flatten()[place].item() == pytest.approx(-slope.item(), abs=1e-8)


def test_4_leapfrog_is_symplectic_with_a_potential_and_not_with_an_mlp() -> None:
    def distance(force: str) -> float:
        one = stage(dim=6, heads=1, dynamics="leapfrog", force=force)
        with torch.no_grad():
            one.dt.fill_(0.3)
        matrix = jacobian(flat(one), inputs(12))
        unit, zero = torch.eye(6, dtype=torch.float64), torch.zeros(6, 6, dtype=torch.float64)
        omega = torch.cat((torch.cat((zero, unit), 1), torch.cat((-unit, zero), 1)))
        return float((matrix.T @ omega @ matrix - omega).abs().max())

    assert distance("potential") < 1e-8
    assert distance("mlp") > 0.1


@pytest.mark.parametrize("rule", [*RULES, "affine"])
def test_5_the_query_sees_the_key_only_under_coupling(rule: str) -> None:
    one = stage(heads=1, dynamics=rule)
    across = jacobian(flat(one), inputs(8))[:4, 4:]
    assert bool((across == 0).all()) == (rule == "uncoupled")


@pytest.mark.parametrize("steps", [1, 3])
def test_5_affine_has_its_inverse_and_log_determinant(steps: int) -> None:
    one = stage(heads=1, dynamics="affine", steps=steps)
    state = inputs(8)
    q, k = (side.view(1, 1, 1, 4) for side in flat(one)(state).chunk(2))
    total = torch.zeros((), dtype=torch.float64)
    for _ in range(steps):
        s, t = one.k_force(q).chunk(2, -1)
        k, total = (k - t) * torch.exp(-s.tanh()), total + s.tanh().sum()
        s, t = one.q_force(k).chunk(2, -1)
        q, total = (q - t) * torch.exp(-s.tanh()), total + s.tanh().sum()
    assert torch.allclose(torch.cat((q.flatten(), k.flatten())), state, rtol=1e-12, atol=1e-13)
    sign, log_determinant = torch.linalg.slogdet(jacobian(flat(one), state))
    assert sign == 1
    assert log_determinant.item() == pytest.approx(total.item(), rel=1e-10)


BASES = ["standard", "sharing:tie=kv", "sharing:tie=kv,rope=score", "differential"]
STAGES = [
    "coupled:steps=2",
    "coupled:dynamics=affine",
    "coupled:order=after_rope",
    "coupled:dynamics=uncoupled",
]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("stage_text", STAGES)
def test_6_causality_and_incremental_decoding(base: str, stage_text: str) -> None:
    model = shaken(Decoder(TINY, parse_layout(f"{base}+{stage_text}").layers(2), seed=1), 0.1)
    tokens = torch.randint(0, 50, (2, 14), generator=torch.Generator().manual_seed(0))
    full = model.logits(tokens)
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 50
    assert torch.equal(model.logits(changed)[:, :9], full[:, :9])
    caches = model.new_caches(2, 14)
    parts = [model.logits(tokens[:, :5], caches=caches)]
    parts += [model.logits(tokens[:, i : i + 1], caches=caches) for i in range(5, 14)]
    assert torch.allclose(torch.cat(parts, 1), full, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", [*RULES, "affine"])
def test_6_a_single_token_outputs_its_value_under_all_dynamics(rule: str) -> None:
    mechanism = shaken(layer(f"coupled:dynamics={rule}"))
    x = inputs(3, 1, WIDTH)
    assert torch.allclose(mechanism(x, frame(1)), mechanism.o(mechanism.v(x)), rtol=1e-13, atol=1e-14)


def test_7_shifting_all_positions_changes_scores_only_if_f_takes_rotated_queries() -> None:
    class Shifted(Rotary):
        def slice(self, start: int, stop: int, like: Tensor) -> Tensor:
            return super().slice(start + 9, stop + 9, like)

    x = inputs(2, TIME, WIDTH)
    moved = {}
    for arm in ("coupled", "coupled:order=after_rope", "coupled:order=after_rope,force=zero"):
        mechanism = shaken(layer(arm))
        here = mechanism.attention_map(x, frame(TIME))
        there = mechanism.attention_map(x, Frame(time=TIME, rotary=Shifted(10_000.0, 64)))
        moved[arm] = (here - there).abs().max().item()
    assert moved["coupled"] < 1e-13
    assert moved["coupled:order=after_rope"] > 1e-4
    assert moved["coupled:order=after_rope,force=zero"] < 1e-13, "q + dt k commutes with rope"


EXTRA = {  # at 60m, without step sizes
    "coupled": 66_560,
    "coupled:per_head=true": 65_536,
    "coupled:per_head=true,force_bias=true": 70_144,
    "coupled:force=potential,per_head=true": 67_584,
    "coupled:force=potential": 67_584,
    "coupled:dynamics=uncoupled": 67_072,
    "coupled:dynamics=uncoupled,per_head=true": 65_536,
    "coupled:force=linear": 8 * 64 * 64,
    "coupled:force=zero": 0,
}


def on_meta(arm: str, size: str) -> Decoder:
    return Decoder.on_meta(SIZES[size], parse_layout(arm).layers(SIZES[size].layers))


@pytest.mark.parametrize("arm", EXTRA)
def test_8_extra_parameters_at_60m(arm: str) -> None:
    extra = on_meta(arm, "60m").parameter_count() - 59_294_720
    assert extra == EXTRA[arm] + 8 * 8
    joint = "," if ":" in arm else ":"
    per_layer = on_meta(f"{arm}{joint}dt_per=layer", "60m").parameter_count() - 59_294_720
    assert per_layer == EXTRA[arm] + 8
    if arm in ("coupled", "coupled:per_head=true"):
        assert 0.00105 < extra / 59_294_720 < 0.00115


@pytest.mark.parametrize(("size", "percent"), [("60m", 0.33), ("150m", 0.29), ("454m", 0.26)])
def test_8_affine_has_3072_parameters_per_head(size: str, percent: float) -> None:
    shape = SIZES[size]
    extra = on_meta("coupled:dynamics=affine", size).parameter_count()
    extra -= on_meta("standard", size).parameter_count()
    assert extra == 3_072 * shape.heads * shape.layers
    assert 100 * extra / on_meta("standard", size).parameter_count() == pytest.approx(percent, abs=0.005)


COUNTS = {
    "coupled": (10_539_032, 59_361_344, 151_962_768, 454_366_592),
    "coupled:per_head=true": (10_513_688, 59_360_320, 152_010_384, 454_560_128),
}


@pytest.mark.parametrize("arm", COUNTS)
def test_8_parameter_counts_of_section_4(arm: str) -> None:
    found = tuple(on_meta(arm, size).parameter_count() for size in ("10m", "60m", "150m", "454m"))
    assert found == COUNTS[arm]


def test_8_declared_cache_bytes_are_the_allocated_ones_and_the_baselines() -> None:
    model, alone = (Decoder(TINY, parse_layout(arm).layers(2), seed=1) for arm in ("coupled", "standard"))
    assert (
        model.new_caches(3, 20).bytes
        == model.cache_bytes(3, 20, torch.float32)
        == alone.cache_bytes(3, 20, torch.float32)
    )


@pytest.mark.parametrize(
    ("arm", "ratio"),
    [("coupled", 1.009), ("coupled:dynamics=leapfrog", 1.017), ("coupled:steps=7", 1.060)],
)
def test_8_flops_at_60m(arm: str, ratio: float) -> None:
    alone = on_meta("standard", "60m").flops(512).causal
    assert alone / 1e6 == pytest.approx(122.8, abs=0.05)
    assert on_meta(arm, "60m").flops(512).causal / alone == pytest.approx(ratio, abs=0.0006)


@pytest.mark.parametrize(
    ("values", "per_width"),
    [
        ({"steps": 3}, 4 * 64 * 3),
        ({"dynamics": "leapfrog", "steps": 3}, 4 * 64 * 4),
        ({"dynamics": "uncoupled", "steps": 3}, 4 * 64 * 3),
        ({"dynamics": "affine", "steps": 3}, 12 * 8 * 3),
        ({"force": "potential", "hidden": 5}, 4 * 5),
        ({"force": "linear"}, 2 * 4),
        ({"force": "zero"}, 0),
    ],
)
def test_8_flops_of_the_stage(values: dict[str, Any], per_width: int) -> None:
    assert stage(**values).flops() == WIDTH * per_width


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"steps": 0}, "at least 1"),
        ({"steps": 8}, "at most 7"),
        ({"dynamics": "hamilton"}, "unknown value for dynamics"),
        ({"dynamics": "uncoupled", "dt_init": 0.0}, "cannot train"),
        ({"dynamics": "uncoupled", "force": "zero"}, "has no effect"),
        ({"dynamics": "uncoupled", "hidden": 7}, "is odd"),
        ({"dynamics": "affine", "force": "linear"}, "takes no force=linear"),
        ({"dynamics": "affine", "dt_init": 0.0}, "takes no dt_init=0"),
        ({"dynamics": "leapfrog", "force_input": "k"}, "needs dynamics=euler"),
        ({"force": "zero", "per_head": True}, "has no weights; it takes no per_head=true"),
        ({"force": "linear", "hidden": 8}, "is one matrix"),
        ({"force": "linear", "force_bias": True}, "would make it affine"),
        ({"dt_param": "softplus", "dt_init": 0.0}, "dt_init=0 is not"),
        ({"dt_init": math.nan}, "must be finite"),
        ({"per_head": "maybe"}, "unknown value for per_head"),
    ],
)
def test_contradictions_are_rejected_when_the_options_are_built(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        CoupledOptions(**values)


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        ("standard:kv_heads=2+coupled", "one query per key; standard has 4 query and 2 key heads"),
        ("sharing:tie=kv,kv_heads=1+coupled", "one query per key"),
        ("differential:version=2+coupled", "one query per key; differential has 8 query and 4 key heads"),
        ("diagonal+coupled", "one cached tensor"),
        ("coupled+coupled:steps=2", "already"),
    ],
)
def test_invalid_compositions_are_rejected_with_the_reason(arm: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        layer(arm)


def test_after_rope_needs_rope() -> None:
    with pytest.raises(UserError, match="needs positions=rope; this model has none"):
        layer("coupled:order=after_rope", positions="none")


def test_all_dynamics_can_train_from_their_initial_values() -> None:
    """From the initial values, every step size and last layer has a gradient or gets one after a step."""
    for options in CoupledOptions.examples():
        mechanism = layer(options)
        x = inputs(2, TIME, WIDTH)
        start = {name: value.detach().clone() for name, value in mechanism.named_parameters()}
        for _ in range(2):
            mechanism(x, frame(TIME)).square().sum().backward()
            with torch.no_grad():
                for parameter in mechanism.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        still = [name for name, value in mechanism.named_parameters() if torch.equal(value, start[name])]
        assert still == [], Coupled.label(options)


def test_the_dynamics_are_a_circuit_of_their_own_that_moves_with_qk() -> None:
    model = Decoder(
        TINY, parse_layout("coupled:qk_norm=after,per_head=true,force_bias=true").layers(2), seed=1
    )
    tags = {
        name: (circuit.tag, circuit.follows, circuit.decay)
        for circuit in model.circuits()
        for name in circuit.parameters
    }
    place = "blocks.0.mechanism.stages.coupled"
    for name in ("w1", "w2"):
        assert tags[f"{place}.k_force.{name}"] == ("own", "qk", True)
    for name in ("dt", "k_force.b1", "k_force.b2"):
        assert tags[f"{place}.{name}"] == ("own", "qk", False)
    assert tags[f"{place}.q_gain"] == ("qk", None, False)


def test_initial_values_are_the_published_ones() -> None:
    built = Coupled(Shape(256, 4), CoupledOptions(dt_init=0.25, dt_param="softplus"))
    built.initialise(seeded_draw(1, "test", 0.02))
    assert torch.allclose(built.step_size(), torch.full((4,), 0.25))
    assert built.k_force.w1.std().item() == pytest.approx(64**-0.5, rel=0.05)
    for value in (built.k_force.b1, built.k_force.w2, built.k_force.b2):
        assert bool((value == 0).all())


def test_labels_name_the_dynamics() -> None:
    labels = {arm: parse_layout(arm).label for arm in ("coupled", "differential+coupled:dynamics=euler")}
    assert list(labels.values()) == ["coupled (euler, 1 step)", "differential V1 + coupled (euler, 1 step)"]
    assert (
        parse_layout("coupled:dynamics=leapfrog,steps=3,force=potential,per_head=true,dt_init=0.2").label
        == "coupled (leapfrog, 3 steps, potential force, per head, dt_init=0.2)"
    )
    assert len(EXAMPLES) == len(CoupledOptions.examples()), "every setting has a different label"
