"""The checks of section 3 of the specification, by number."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.kernels import linear_cross_entropy
from headtohead.mechanisms.base import Frame, Mechanism, Rotary, Shape, seeded_draw
from headtohead.mechanisms.sharing import SharingOptions
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

WIDTH, HEADS, TIME = 16, 4, 9


def build(arm: str, positions: str = "rope", bias: str = "none", seed: int = 1) -> Mechanism:
    mechanism = (
        parse_layout(arm).pattern[0].build(Shape(WIDTH, HEADS, 0, 1, 256, positions=positions, bias=bias))
    )
    mechanism.initialise(seeded_draw(seed, "test", 0.3))
    return mechanism.double()


def copy_weights(source: Mechanism, target: Mechanism, names: dict[str, str]) -> None:
    """Copy source's projections into target: {target's name: source's name}."""
    with torch.no_grad():
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                if getattr(getattr(target, ours), kind) is not None:
                    getattr(getattr(target, ours), kind).copy_(getattr(getattr(source, theirs), kind))


def inputs(seed: int = 5) -> Tensor:
    return torch.randn(2, TIME, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(mechanism: Mechanism, x: Tensor, start: int = 0, positions: str = "rope") -> Tensor:
    rotary = Rotary(10_000.0, 256) if positions == "rope" else None
    padding = None
    if start:
        # Shift all positions by looking at the tail of a longer frame: queries and keys alike.
        class Shifted(Rotary):
            def slice(self, first: int, last: int, like: Tensor) -> Tensor:
                return super().slice(first + start, last + start, like)

        rotary = Shifted(10_000.0, 256) if positions == "rope" else None
    return mechanism(x, Frame(time=x.shape[1], rotary=rotary, padding=padding))


@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.parametrize(("tie", "names"), [("kv", "q k k"), ("qk", "k k v"), ("qkv", "k k k")])
def test_1_tied_forms_equal_qkv_with_copied_weights_and_summed_gradients(
    tie: str, names: str, bias: str
) -> None:
    tied = build(f"sharing:tie={tie}", "none", bias)
    whole = build("sharing", "none", bias, seed=2)
    copy_weights(tied, whole, dict(zip("qkv", names.split(), strict=True)) | {"o": "o"})
    x = inputs()
    ours, theirs = run(tied, x, positions="none"), run(whole, x, positions="none")
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for name in {"q": "q", "k": "k", "v": "v"}:
        if not hasattr(tied, name):
            continue
        copies = [target for target, source in zip("qkv", names.split(), strict=True) if source == name]
        summed = sum(getattr(whole, copy).weight.grad for copy in copies)
        assert torch.allclose(getattr(tied, name).weight.grad, summed, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_1_grouped_tied_forms_equal_grouped_qkv(groups: int) -> None:
    tied = build(f"sharing:tie=kv,kv_heads={groups}", "none")
    whole = build(f"standard:kv_heads={groups}", "none", seed=2)
    copy_weights(tied, whole, {"q": "q", "k": "k", "v": "k", "o": "o"})
    assert torch.allclose(
        run(tied, inputs(), positions="none"), run(whole, inputs(), positions="none"), rtol=1e-12
    )


def test_1_as_many_groups_as_heads_is_no_grouping() -> None:
    for grouped, plain in (
        (f"sharing:tie=kv,kv_heads={HEADS}", "sharing:tie=kv"),
        (f"standard:kv_heads={HEADS}", "standard"),
    ):
        assert torch.equal(run(build(grouped), inputs()), run(build(plain), inputs()))


def test_2_the_mix_0_1_is_k_equals_v() -> None:
    mixed, tied = build("sharing:value_mix=(0,1)"), build("sharing:tie=kv,rope=score")
    assert torch.allclose(run(mixed, inputs()), run(tied, inputs()), rtol=1e-12)
    learnt = build("sharing:value_mix=learnt")
    assert torch.allclose(run(learnt, inputs()), run(tied, inputs()), rtol=1e-12), "learnt starts as (Q, K=V)"


def test_2_q_minus_k_is_the_difference_of_the_two_outputs() -> None:
    minus, first, second = (build(f"sharing:value_mix={mix}") for mix in ("(1,-1)", "(1,0)", "(0,1)"))
    assert torch.allclose(
        run(minus, inputs()), run(first, inputs()) - run(second, inputs()), rtol=1e-9, atol=1e-12
    )


def test_2_q_minus_k_is_zero_when_queries_are_keys() -> None:
    minus = build("sharing:value_mix=(1,-1)")
    copy_weights(minus, minus, {"q": "k"})
    assert run(minus, inputs()).abs().max() < 1e-14


@pytest.mark.parametrize("positions", ["none", "rope"])
def test_3_queries_that_are_keys_give_symmetric_scores_without_negative_eigenvalues(positions: str) -> None:
    tied = build("sharing:tie=qk", positions)
    frame = Frame(time=TIME, rotary=Rotary(10_000.0, 64) if positions == "rope" else None)
    q, k, v = tied.project(inputs(), None)
    q, k, _ = tied.position(q, k, v, frame)
    scores = q @ k.transpose(-2, -1)
    assert torch.allclose(scores, scores.transpose(-2, -1), atol=1e-12)
    assert torch.linalg.eigvalsh(scores).min() > -1e-10


@pytest.mark.parametrize(
    ("rope", "moves"), [("score", False), ("roundtrip", False), ("rotated", True), ("none", False)]
)
def test_4_shifting_all_positions(rope: str, moves: bool) -> None:
    mechanism = build(f"sharing:tie=kv,rope={rope}")
    change = (run(mechanism, inputs(), start=100) - run(mechanism, inputs())).abs().max()
    assert (change > 1e-3) if moves else (change < 1e-10)


def test_4_score_alone_equals_keeping_both_tensors() -> None:
    one, two = build("sharing:tie=kv,rope=score"), build("standard", seed=2)
    copy_weights(one, two, {"q": "q", "k": "k", "v": "k", "o": "o"})
    assert torch.allclose(run(one, inputs()), run(two, inputs()), rtol=1e-12)


def test_4_the_depth_2_query_folded_equals_unfolded() -> None:
    for bias in ("none", "all"):
        mechanism = build("sharing:tie=kv,query_depth=2", bias=bias)
        cache = mechanism.new_cache(2, TIME, torch.float64)
        folded = mechanism(inputs(), Frame(time=TIME, rotary=Rotary(10_000.0, 64)), cache)
        assert torch.allclose(folded, run(mechanism, inputs()), rtol=1e-10, atol=1e-12)


def test_4_the_diagonal_form_folded_equals_unfolded() -> None:
    """One cached tensor, the diagonals applied where it is read, against q, k, v formed apart (no rope)."""
    mechanism = build("diagonal:init=signs", "none")
    with torch.no_grad():
        for diagonal in (mechanism.q_diagonal, mechanism.k_diagonal, mechanism.v_diagonal):
            diagonal.mul_(torch.rand(WIDTH, dtype=torch.float64) + 0.5)
    apart = build("standard", "none")
    with torch.no_grad():
        for name in "qkv":
            getattr(apart, name).weight.copy_(
                getattr(mechanism, f"{name}_diagonal")[:, None] * mechanism.s.weight
            )
        apart.o.weight.copy_(mechanism.o.weight)
    assert torch.allclose(
        run(mechanism, inputs(), positions="none"), run(apart, inputs(), positions="none"), rtol=1e-10
    )


RACED = [*itertools.product(("none", "kv"), (1, 2, 4), ("auto",)), ("qk", 4, "auto"), ("qkv", 4, "auto")]
RACED += [("kv", groups, rope) for groups in (1, 4) for rope in ("none", "score", "rotated")]


@pytest.mark.parametrize(("tie", "groups", "rope"), RACED)
def test_5_causality_and_decoding(tie: str, groups: int, rope: str) -> None:
    size = dataclasses.replace(SIZES["nano"], context=32, vocabulary=50)
    arm = f"sharing:tie={tie},kv_heads={groups},rope={rope}"
    model = Decoder(size, parse_layout(arm).layers(2), seed=1).double()
    tokens = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(0))
    full = model.logits(tokens)
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 50
    assert torch.equal(model.logits(changed)[:, :12], full[:, :12])
    caches = model.new_caches(2, 20)
    parts = [model.logits(tokens[:, :7], caches=caches)]
    parts += [model.logits(tokens[:, i : i + 1], caches=caches) for i in range(7, 20)]
    assert torch.allclose(torch.cat(parts, 1), full, rtol=1e-9, atol=1e-12)


def test_6_k_equals_v_allocates_one_tensor_and_declares_it() -> None:
    model = Decoder(SIZES["nano"], parse_layout("sharing:tie=kv").layers(2), seed=1)
    caches = model.new_caches(3, 64)
    assert [len(layer.tensors) for layer in caches.layers] == [1, 1]
    assert caches.bytes == model.cache_bytes(3, 64, torch.float32) == 2 * 3 * 64 * 64 * 4


PUBLISHED_CACHE = {
    "standard": 80,
    "sharing:tie=kv": 40,
    "sharing:tie=qk": 80,
    "sharing:tie=qkv": 40,
    "standard:kv_heads=4": 20,
    "standard:kv_heads=1": 5,
    "sharing:tie=kv,kv_heads=4": 10,
    "sharing:tie=kv,kv_heads=1": 2.5,
}


@pytest.mark.parametrize("arm", PUBLISHED_CACHE)
def test_6_published_cache_of_the_300m_model(arm: str) -> None:
    size = SIZES["sharing-300m"]
    model = Decoder.outline(size, parse_layout(arm).layers(size.layers))
    assert model.cache_bytes(1, 1, torch.bfloat16) == PUBLISHED_CACHE[arm] * 1024


COUNTS = {
    "standard": (1_750_272, 52_024_320, 305_534_976, 1_215_102_976),
    "sharing:tie=kv": (1_618_176, 49_923_072, 284_542_976, 1_122_783_232),
    "sharing:tie=qk": (1_618_176, 49_923_072, 284_542_976, 1_122_783_232),
    "standard:kv_heads=H/2": (1_618_176, 49_923_072, 284_542_976, 1_122_783_232),
    "sharing:tie=qkv": (1_486_080, 47_821_824, 263_550_976, 1_030_463_488),
    "standard:kv_heads=H/4": (1_552_128, 48_872_448, 274_046_976, 1_076_623_360),
    "standard:kv_heads=1": (1_552_128, 48_347_136, 266_174_976, 1_036_233_472),
    "sharing:tie=kv,kv_heads=H/4": (1_519_104, 48_347_136, 268_798_976, 1_053_543_424),
    "sharing:tie=kv,kv_heads=1": (1_519_104, 48_084_480, 264_862_976, 1_033_348_480),
    "sharing:tie=kv,query_depth=2": (1_749_248, 52_020_224, 305_514_496, 1_215_057_920),
    "diagonal": (1_489_152, 47_834_112, 263_612_416, 1_030_598_656),
}


@pytest.mark.parametrize("arm", COUNTS)
def test_7_parameter_counts_of_section_4(arm: str) -> None:
    for size, count in zip(
        ("sharing-xs", "sharing-s", "sharing-300m", "sharing-1.2b"), COUNTS[arm], strict=True
    ):
        shape = SIZES[size]
        text = arm.replace("H/2", str(shape.heads // 2)).replace("H/4", str(shape.heads // 4))
        assert Decoder.outline(shape, parse_layout(text).layers(shape.layers)).parameter_count() == count, (
            size
        )


@pytest.mark.parametrize("groups", [2, 4, 8, 16])
def test_7_exact_pairs_have_equal_parameters_flops_and_cache(groups: int) -> None:
    # One bias vector less is stored by the tied form: the pair is exact without biases.
    size = dataclasses.replace(SIZES["sharing-300m"].with_settings(bias="none"), layers=2, vocabulary=256)
    shared = Decoder.outline(size, parse_layout(f"sharing:tie=kv,kv_heads={groups}").layers(2))
    halved = Decoder.outline(size, parse_layout(f"standard:kv_heads={groups // 2}").layers(2))
    assert shared.parameter_count() == halved.parameter_count()
    assert shared.flops(2048) == halved.flops(2048)
    assert shared.cache_bytes(1, 1, torch.bfloat16) == halved.cache_bytes(1, 1, torch.bfloat16)


@pytest.mark.parametrize(
    ("arm", "billions"), [("standard", 792.7), ("sharing:tie=kv", 749.7), ("sharing:tie=qkv", 706.8)]
)
def test_7_published_multiply_adds_at_300m(arm: str, billions: float) -> None:
    size = SIZES["sharing-300m"]
    model = Decoder.outline(size, parse_layout(arm).layers(size.layers))
    assert model.flops(2048).full * 2048 / 2 / 1e9 == pytest.approx(billions, abs=0.05)


def test_8_appending_padding_never_changes_the_masked_loss() -> None:
    size = dataclasses.replace(SIZES["nano"], vocabulary=50)
    model = Decoder(size, parse_layout("sharing:tie=kv").layers(2), seed=1).double()
    tokens = torch.randint(0, 50, (2, 10), generator=torch.Generator().manual_seed(0))

    def loss(tokens: Tensor, targets: Tensor, padding: Tensor | None) -> Tensor:
        x = model.hidden(tokens, padding=padding)
        return linear_cross_entropy(x.flatten(0, 1), model.readout, targets.flatten())[0]

    alone = loss(tokens[:, :-1], tokens[:, 1:], None)
    padded = torch.cat((tokens[:, :-1], torch.zeros(2, 5, dtype=torch.long)), 1)
    targets = torch.cat((tokens[:, 1:], torch.full((2, 5), -1)), 1)
    real = torch.cat((torch.ones(2, 9, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)), 1)
    assert torch.allclose(loss(padded, targets, real), alone, rtol=1e-12)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tie": "qk", "value_mix": (1.0, -1.0)}, "v would be 0"),
        ({"tie": "kv", "value_mix": "learnt"}, "already"),
        ({"tie": "qkv", "query_depth": 2}, "query of its own"),
        ({"tie": "none", "rope": "roundtrip"}, "does not share"),
        ({"value_mix_norm": "unit"}, "needs value_mix"),
        ({"value_mix": (0.0, 0.0)}, "no value"),
        ({"tie": "vk"}, "did you mean"),
        ({"query_depth": 3}, "at most 2"),
        ({"kv_heads": -1}, "at least 0"),
    ],
)
def test_contradictions_are_refused_when_the_options_are_built(
    values: dict[str, object], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        SharingOptions(**values)  # type: ignore[arg-type]


def test_shared_queries_and_keys_refuse_groups() -> None:
    with pytest.raises(UserError, match="identical"):
        build("sharing:tie=qk,kv_heads=2")


def test_labels_are_the_tuples_people_use() -> None:
    labels = {
        arm: parse_layout(arm).label
        for arm in ("sharing:tie=kv", "sharing:value_mix=(1,-1)", "sharing:value_mix=learnt")
    }
    assert list(labels.values()) == ["(Q, K=V)", "V = Q - K", "V = aQ + bK"]
    assert parse_layout("sharing:tie=kv,kv_heads=1").label == "(Q, K=V), 1 kv head"
