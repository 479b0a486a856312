"""The Triton kernels of dynamics and decoding in Triton's interpreter, in float32 against float64 plain references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headtohead import kernels
from headtohead.kernels.attention import decode_rope_triton as decode_turned
from headtohead.kernels.attention import decode_triton
from headtohead.kernels.attention.decode import ROPE_MODES, attend_placed, decode, decode_plain
from headtohead.kernels.dynamics import integrator as dynamics
from headtohead.kernels.dynamics import integrator_triton as dynamics_triton
from headtohead.kernels.dynamics import operators as dynamics_fused
from headtohead.kernels.pointwise.rotary import rotary_table
from headtohead.mechanisms.contract.base import ForwardState, Frame, Rotary, Shape, seeded_draw
from headtohead.mechanisms.coupled import Coupled, CoupledOptions
from headtohead.mechanisms.sharing import Sharing, SharingOptions
from headtohead.mechanisms.standard import Standard, StandardOptions
from tests.compare import assert_close, named

pytestmark = pytest.mark.usefixtures("interpreted")

SLOW = pytest.mark.slow
WEIGHTS = ("w1", "b1", "w2", "b2")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))
    )


def near(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5, name: str = "output") -> None:
    assert_close({name: ours}, {name: theirs}, tolerance, by="norm")


def plain_reference(
    q: Tensor, k: Tensor, dt: Tensor, steps: int, scheme: str, *weights: Any
) -> tuple[Tensor, Tensor]:
    w1, b1, w2, b2 = weights

    def force(x: Tensor) -> Tensor:
        if w2.ndim < w1.ndim:
            return dynamics.potential_force_plain(x, w1, b1, w2)
        return dynamics.head_mlp(x, w1, b1, w2, b2)

    pair: tuple[Tensor, Tensor] = getattr(dynamics, scheme)(q, k, dt.unsqueeze(-1), steps, force)
    return pair


def case(
    batch: int, time: int, heads: int, dim: int, hidden: int, potential: bool, apart: bool, biased: bool
) -> list[Tensor | None]:
    """q, k, dt, w1, b1, w2, b2 in float64."""
    sets = (heads,) if apart else ()
    return [
        draw(batch, time, heads, dim),
        draw(batch, time, heads, dim, seed=1),
        0.3 * draw(heads),
        draw(*sets, hidden, dim) * dim**-0.5,
        draw(*sets, hidden) if biased else None,
        draw(*sets, hidden, seed=2) if potential else draw(*sets, dim, hidden, seed=2) * hidden**-0.5,
        draw(*sets, dim, seed=3) if biased and not potential else None,
    ]


def gradients(function: Any, inputs: list[Tensor | None], steps: int, scheme: str) -> dict[str, Tensor]:
    q, k, dt, *weights = inputs
    outputs = function(q, k, dt, steps, scheme, *weights)
    weighted = [
        (output * torch.linspace(-1, 1 + place, output.numel(), dtype=output.dtype).view(output.shape)).sum()
        for place, output in enumerate(outputs)
    ]
    names = [
        name for name, tensor in zip(("q", "k", "dt", *WEIGHTS), inputs, strict=True) if tensor is not None
    ]
    leaves = [tensor for tensor in inputs if tensor is not None]
    found = torch.autograd.grad(sum(weighted), leaves)  # type: ignore[arg-type]
    return named([*outputs, *found], ["evolved q", "evolved k", *(f"d{name}" for name in names)])


def typed(inputs: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(dtype).detach().requires_grad_() for tensor in inputs]


@pytest.mark.parametrize(
    ("scheme", "steps", "shape", "potential", "apart", "biased"),
    [
        ("euler", 1, (2, 5, 3, 32, 16), False, False, True),
        pytest.param("euler", 1, (1, 129, 2, 64, 64), False, False, True, marks=SLOW),
        ("euler", 1, (1, 3, 2, 128, 20), False, False, False),
        pytest.param("euler", 3, (2, 5, 3, 32, 20), False, False, True, marks=SLOW),
        ("euler", 1, (2, 3, 4, 64, 8), False, True, False),
        pytest.param("leapfrog", 1, (1, 1, 1, 128, 64), False, False, True, marks=SLOW),
        pytest.param("leapfrog", 7, (1, 3, 2, 32, 24), False, False, True, marks=SLOW),
        ("leapfrog", 3, (1, 129, 2, 32, 24), True, False, True),
        ("symplectic_euler", 1, (2, 3, 12, 16, 6), False, False, True),
        ("symplectic_euler", 2, (1, 7, 4, 12, 6), True, True, True),
    ],
)
def test_the_integrator_equals_its_plain_reference(
    scheme: str, steps: int, shape: tuple[int, ...], potential: bool, apart: bool, biased: bool
) -> None:
    inputs = case(*shape, potential, apart, biased)  # type: ignore[call-arg]
    theirs = gradients(plain_reference, typed(inputs, torch.float64), steps, scheme)
    ours = gradients(dynamics_fused.integrate, typed(inputs, torch.float32), steps, scheme)
    assert_close(ours, theirs, 2e-5, by="norm")


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e4])
def test_the_integrator_at_extreme_values(size: float) -> None:
    inputs = case(1, 5, 2, 32, 16, False, False, True)
    inputs[:2] = [size * tensor for tensor in inputs[:2] if tensor is not None]
    theirs = gradients(plain_reference, typed(inputs, torch.float64), 2, "leapfrog")
    ours = gradients(dynamics_fused.integrate, typed(inputs, torch.float32), 2, "leapfrog")
    assert_close(ours, theirs, 1e-4, by="norm")


def test_the_integrator_reads_strided_views() -> None:
    joined = draw(2, 5, 3 * 2 * 32).float()
    q, k, _ = (part.unflatten(-1, (2, 32)) for part in joined.split(64, -1))
    rest = [
        None if tensor is None else tensor.float() for tensor in case(2, 5, 2, 32, 16, False, False, True)[2:]
    ]
    ours = dynamics_fused.integrate(q, k, rest[0], 1, "euler", *rest[1:])  # type: ignore[arg-type]
    turned = [side.transpose(1, 2).contiguous().transpose(1, 2) for side in (q, k)]
    again = dynamics_fused.integrate(*turned, rest[0], 1, "euler", *rest[1:])  # type: ignore[arg-type]
    for one, other in zip(ours, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shared", [False, True])
def test_a_population_of_integrators_equals_separate_ones(shared: bool) -> None:
    cases = [
        [
            None if tensor is None else tensor.float() + seed / 8
            for tensor in case(2, 3, 2, 16, 8, False, False, True)
        ]
        for seed in range(3)
    ]
    stacked = [torch.stack(list(parts)).requires_grad_() for parts in zip(*cases, strict=True)]  # type: ignore[arg-type]
    places = [0, 0, None if shared else 0, 0, 0, 0, 0]
    inputs = [part if place == 0 else part[0] for part, place in zip(stacked, places, strict=True)]

    def run(q: Tensor, k: Tensor, dt: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        return dynamics_fused.integrate(q, k, dt, 2, "leapfrog", *weights)

    together = torch.vmap(run, in_dims=tuple(places))(*inputs)
    grads = torch.autograd.grad(together[0].sin().sum() + together[1].cos().sum(), inputs)
    apart = [
        run(*(part[seed] if place == 0 else part for part, place in zip(inputs, places, strict=True)))
        for seed in range(3)
    ]
    loss = sum(q.sin().sum() + k.cos().sum() for q, k in apart)
    names = ["dq", "dk", "ddt", *(f"d{name}" for name in WEIGHTS)]
    separate = torch.autograd.grad(loss, inputs)  # type: ignore[arg-type]
    assert_close(named(grads, names), named(separate, names), 1e-6, by="norm")
    for side in range(2):
        near(together[side], torch.stack([pair[side] for pair in apart]), 1e-7)


@pytest.mark.slow
def test_the_operators_pass_opcheck() -> None:
    inputs = typed(case(1, 3, 2, 16, 8, False, False, True), torch.float32)
    q, k, dt, w1, b1, w2, b2 = (tensor.detach() for tensor in inputs if tensor is not None)
    given = (q[None], k[None], dt[None], w1[None, None], b1[None, None], w2[None, None], b2[None, None])
    leaves = tuple(tensor.clone().requires_grad_() for tensor in given)
    torch.library.opcheck(torch.ops.headtohead.coupled, (*leaves, 0, 1))
    torch.library.opcheck(torch.ops.headtohead.coupled_backward, (*given, q[None], k[None], 1, 2))
    q, kv = draw(2, 4, 32).float().requires_grad_(), draw(2, 2, 40, 32).float().requires_grad_()
    torch.library.opcheck(torch.ops.headtohead.kv_decode, (q, kv, None, 0, 0.2))
    given = (q.detach(), kv.detach(), None, None, 0, 0.2, torch.tensor([7]))
    torch.library.opcheck(torch.ops.headtohead.placed_decode, given)


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    calls: list[int] = []
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: calls.append(1) or real(*given))
    return calls


@pytest.mark.parametrize(
    "options",
    [
        CoupledOptions(),
        CoupledOptions(dynamics="leapfrog", steps=2, force="potential"),
        CoupledOptions(dynamics="symplectic_euler", per_head=True, dt_per="layer", dt_param="softplus"),
    ],
)
def test_the_coupling_takes_the_fused_path(options: CoupledOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, dynamics_triton, "forward")
    stage = Coupled(Shape(64, 4), options)
    stage.initialise(seeded_draw(1, "test", 0.3))
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(0.2)
    q, k = (draw(2, 4, 5, 16, seed=seed).float() for seed in range(2))
    results = []
    for plainly in (False, True):
        if plainly:
            with kernels.plain():
                pair = stage.evolve(q, k, Frame(time=5))
        else:
            pair = stage.evolve(q, k, Frame(time=5))
        found = torch.autograd.grad(pair[0].sin().sum() + pair[1].cos().sum(), list(stage.parameters()))
        names = ["q", "k", *(f"d{name}" for name, _ in stage.named_parameters())]
        results.append(named([*pair, *found], names))
    assert len(calls) == 1
    assert_close(*results, 1e-5, by="norm")


def test_other_dynamics_take_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, dynamics_triton, "forward")
    for options in (
        CoupledOptions(dynamics="affine"),
        CoupledOptions(force="linear"),
        CoupledOptions(force_input="k"),
        CoupledOptions(hidden=1024),
    ):
        stage = Coupled(Shape(64, 4), options)
        stage.initialise(seeded_draw(1, "test", 0.3))
        stage.evolve(draw(1, 4, 3, 16).float(), draw(1, 4, 3, 16, seed=1).float(), Frame(time=3))
    assert not calls


def test_compiling_leaves_the_operator_whole() -> None:
    stage = Coupled(Shape(64, 4), CoupledOptions())
    stage.initialise(seeded_draw(1, "test", 0.3))
    q, k = (draw(2, 4, 5, 16, seed=seed).float() for seed in range(2))
    compiled = torch.compile(
        lambda q, k: stage.evolve(q, k, Frame(time=5)), backend="aot_eager", fullgraph=True
    )
    for one, other in zip(compiled(q, k), stage.evolve(q, k, Frame(time=5)), strict=True):
        near(one, other, 1e-6)


@pytest.mark.parametrize("turn", ROPE_MODES)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 4, 129, 32),
        (2, 2, 1, 3, 128),
        *(
            pytest.param(shape, marks=SLOW)
            for shape in ((1, 6, 2, 300, 64), (3, 8, 4, 65, 48), (1, 1, 1, 2, 8))
        ),
    ],
)
def test_decoding_equals_its_plain_reference(shape: tuple[int, ...], turn: str) -> None:
    batch, heads, kv_heads, keys, dim = shape
    table = rotary_table(torch.arange(keys), dim, 10_000.0, torch.float64)
    q, kv = draw(batch, heads, 1, dim), draw(batch, kv_heads, keys + 5, dim)[:, :, :keys]
    results = []
    for dtype, function in ((torch.float32, decode), (torch.float64, decode_plain)):
        inputs = [tensor.to(dtype).detach().requires_grad_() for tensor in (q, kv)]
        output = function(*inputs, table.to(dtype), turn, dim**-0.5)
        found = torch.autograd.grad(output.sin().sum(), inputs)
        results.append(named([output, *found], ["output", "dq", "dkv"]))
    assert_close(*results, 1e-5, by="norm")


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 64, 299, *(pytest.param(place, marks=SLOW) for place in (1, 63, 200))])
@pytest.mark.parametrize("turn", ROPE_MODES)
def test_decoding_at_a_position_ignores_later_positions(place: int, turn: str) -> None:
    table = rotary_table(torch.arange(300), 64, 10_000.0, torch.float64)
    q, kv, v = draw(2, 6, 1, 64), draw(2, 2, 300, 64), draw(2, 2, 300, 64, seed=1)
    wanted = decode_plain(q, kv[:, :, : place + 1], table[: place + 1], turn, 0.125)
    for later in (kv, v):  # later positions have no effect, whatever their content
        later[:, :, place + 1 :] = 1e30
    at = torch.tensor([place])
    near(decode(q.float(), kv.float(), table.float(), turn, 0.125, at), wanted)
    near(decode_plain(q, kv, table, turn, 0.125, at), wanted, 1e-12)
    apart = kernels.attend(q, kv[:, :, : place + 1], v[:, :, : place + 1])
    near(attend_placed(q.float(), kv.float(), v.float(), at), apart)
    near(attend_placed(q, kv, v, at), apart, 1e-12)


# Launch configurations: few and many keys per block, one program and several, with and without early loading.
TURNED = [
    decode_triton.Config(16, 4, 3, 1),
    decode_triton.Config(64, 4, 3, 8),
    decode_turned.Sums(4, 1, False, 1),
    decode_turned.Sums(2, 4, True, 16),
]


def rotated(
    config: Any, batch: int, heads: int, kv_heads: int, keys: int, dim: int, size: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Ours in float32 and the plain reference in float64, with keys rotated in the score."""
    table = rotary_table(torch.arange(keys), dim, 10_000.0, torch.float64)
    q, kv = size * draw(batch, heads, 1, dim), size * draw(batch, kv_heads, keys + 5, dim)[:, :, :keys]
    theirs = decode_plain(q, kv, table, "score", dim**-0.5).squeeze(2)
    return decode_triton.decode(q.squeeze(2).float(), kv.float(), table.float(), 1, dim**-0.5, config), theirs


@pytest.mark.parametrize("config", TURNED, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 2, 1, 64),
        (1, 4, 2, 130, 96),
        (1, 24, 1, 19, 32),
        *(
            pytest.param(shape, marks=SLOW)
            for shape in (
                (2, 3, 3, 77, 64),
                (1, 4, 1, 67, 128),
                (1, 2, 2, 261, 32),
                (1, 8, 1, 33, 32),
                (1, 1, 1, 45, 256),
            )
        ),
    ],
)
def test_rotated_keys_equal_the_plain_reference(config: Any, shape: tuple[int, ...]) -> None:
    if isinstance(config, decode_turned.Sums) and shape[1] != shape[2]:
        with pytest.raises(ValueError, match="one query head"):
            rotated(config, *shape)  # type: ignore[call-arg]
        return
    near(*rotated(config, *shape))  # type: ignore[call-arg]


@pytest.mark.parametrize("config", TURNED, ids=str)
@pytest.mark.parametrize("size", [1e-20, pytest.param(0.0, marks=SLOW), pytest.param(30.0, marks=SLOW)])
def test_rotated_keys_at_extreme_values(config: Any, size: float) -> None:
    near(*rotated(config, 1, 2, 2, 70, 32, size), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("config", [TURNED[0], TURNED[2]], ids=str)
def test_a_query_rotated_step_by_step_stays_accurate(config: Any) -> None:
    near(*rotated(config, 1, 1, 1, 2000, 32))


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e3])
def test_decoding_at_extreme_values(size: float) -> None:
    q, kv = size * draw(1, 2, 1, 32), size * draw(1, 2, 70, 32)
    near(decode(q.float(), kv.float(), None, "nothing"), decode_plain(q, kv, None, "nothing", 32**-0.5), 1e-4)


def test_decoding_a_population_equals_separate_decoding() -> None:
    q, kv = draw(3, 2, 4, 1, 32).float(), draw(3, 2, 2, 40, 32).float()
    together = torch.vmap(lambda q, kv: decode(q, kv, None, "nothing"))(q, kv)
    assert torch.equal(
        together, torch.stack([decode(one, other, None, "nothing") for one, other in zip(q, kv, strict=True)])
    )


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["roundtrip", "score", "rotated", "none"])
@pytest.mark.parametrize("kv_heads", [2, pytest.param(4, marks=SLOW)])
def test_a_shared_cache_is_read_once(rope: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, decode_triton, "decode")
    layer = Sharing(Shape(64, 4), SharingOptions(tie="kv", kv_heads=kv_heads, rope=rope))
    layer.initialise(seeded_draw(1, "test", 0.3))
    x = draw(2, 9, 64).float()
    rotary = Rotary(10_000.0, 64)
    with torch.no_grad():
        whole = layer(x, Frame(time=9, rotary=rotary))
        cache = layer.new_cache(2, 12)
        parts = [layer(x[:, :6], Frame(time=6, rotary=rotary), cache)]
        cache.length = 6
        for place in range(6, 9):
            parts.append(layer(x[:, place : place + 1], Frame(start=place, time=1, rotary=rotary), cache))
            cache.length = place + 1
    assert len(calls) == 3
    near(torch.cat(parts, 1), whole)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["roundtrip", "score", "rotated", "none", "standard", "window"])
@pytest.mark.parametrize("kv_heads", [2, pytest.param(4, marks=SLOW)])
def test_a_step_at_a_position_uses_the_kernel(
    arm: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    real = decode_triton.decode
    monkeypatch.setattr(
        decode_triton,
        "decode",
        lambda *given, **named: calls.append(named["values"] is not None) or real(*given, **named),
    )
    layer: Standard | Sharing
    standard = arm in ("standard", "window")
    if standard:
        window = 4 if arm == "window" else 0
        layer = Standard(Shape(64, 4), StandardOptions(kv_heads=kv_heads, window=window))
    else:
        layer = Sharing(Shape(64, 4), SharingOptions(tie="kv", kv_heads=kv_heads, rope=arm))
    layer.initialise(seeded_draw(1, "test", 0.3))
    x = draw(2, 9, 64).float()
    rotary = Rotary(10_000.0, 64)
    with torch.no_grad():
        whole = layer(x, Frame(time=9, rotary=rotary))
        cache = layer.new_cache(2, 12)
        layer(x[:, :6], Frame(time=6, rotary=rotary), cache)
        cache.length = 6
        for place in range(6, 9):
            cache.place = torch.tensor([place])
            frame = Frame(start=6, time=1, rotary=rotary, state=ForwardState(place=cache.place))
            near(layer(x[:, place : place + 1], frame, cache), whole[:, place : place + 1])
    assert calls == [standard] * 3
