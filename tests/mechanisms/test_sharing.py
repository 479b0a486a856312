"""Projection sharing: properties that the formulas imply."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.kernels import linear_cross_entropy
from headtohead.mechanisms.contract.base import Frame, Mechanism, Rotary, Shape, seeded_draw
from headtohead.mechanisms.positional import alibi_bias, channels_2d, t5_buckets
from headtohead.mechanisms.sharing import SharingOptions
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from tests.references.attention import turn
from tests.references.sharing import bucket, planes

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
        # Shift the positions of queries and keys by taking the tail of a longer frame.
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
    assert torch.allclose(run(learnt, inputs()), run(tied, inputs()), rtol=1e-12), (
        "learnt is initially (Q, K=V)"
    )


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


@pytest.mark.parametrize("count", [3, 10, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_3_the_2d_term_as_a_1x1_map_equals_the_closed_form(causal: bool, count: int) -> None:
    """sum_c w_c (S + P_c) + b over a (time, time, m) table, against a temperature and a bias by key."""
    plus = build(f"sharing:tie=qk,pos2d=true,pos2d_m={count},pos2d_init=paper", "none")
    with torch.no_grad():
        plus.pos2d.offset.fill_(0.7)
    frame = Frame(time=TIME, causal=causal)
    q, k, _ = plus.project(inputs(), None)
    scores = q @ k.transpose(-2, -1) / plus.dim**0.5
    rows = [[planes(i, j, count) for j in range(TIME)] for i in range(TIME)]
    table = torch.tensor(rows, dtype=torch.float64)
    mapped = (plus.pos2d.weights * (scores.unsqueeze(-1) + table)).sum(-1) + plus.pos2d.offset
    mapped = mapped.masked_fill(~frame.mask(mapped.device), float("-inf"))
    assert torch.allclose(plus.attention_map(inputs(), frame), mapped.softmax(-1), rtol=1e-10)


@pytest.mark.parametrize("tie", ["none", "kv", "qk", "qkv"])
def test_3_the_identity_start_is_the_form_without_the_term(tie: str) -> None:
    plus, plain = build(f"sharing:tie={tie},pos2d=true"), build(f"sharing:tie={tie}")
    for mechanism in (plus, plain):
        mechanism.initialise(seeded_draw(1, "test", 0.3))  # once more, in float64
    assert torch.allclose(run(plus, inputs()), run(plain, inputs()), rtol=1e-10, atol=1e-12)


def test_3_the_channels_of_the_2d_term() -> None:
    assert (channels_2d(10), channels_2d(50)) == ((6, 4), (26, 24))


@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_are_single_near_and_logarithmic_far(causal: bool) -> None:
    distance = torch.arange(-300, 301)
    found = t5_buckets(distance, causal)
    assert found.max() == 31
    if causal:
        assert found[300:].tolist() == [bucket(i) for i in range(301)]
        return
    behind, ahead = found[300:], found[:300].flip(0)
    assert torch.equal(behind[1:] + 16, ahead), "later keys have the other half of the buckets"
    assert behind[:8].tolist() == list(range(8))
    assert behind[-1] == 15


def test_alibi_falls_off_by_powers_of_two() -> None:
    bias = alibi_bias(8, Frame(time=4), torch.device("cpu"), torch.float64)
    assert [float(slope) for slope in bias[:, 3, 2]] == [-(2.0**-h) for h in range(1, 9)]
    assert torch.equal(bias[0, 3], torch.tensor([-1.5, -1.0, -0.5, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("rope", ["none", "score", "roundtrip", "rotated", "decoupled"])
def test_normalized_keys_lose_their_norm_and_values_keep_it(rope: str) -> None:
    """Keys twice as long: the same map, outputs twice as large."""
    mechanism = build(f"sharing:tie=kv,kv_norm=gain,rope={rope}")
    x, frame = 1e3 * inputs(), Frame(time=TIME, rotary=Rotary(10_000.0, 256))  # far above the norm's eps
    if rope == "decoupled":
        with torch.no_grad():  # the rotated part is not normalized
            mechanism.k.weight.unflatten(0, (HEADS, -1))[:, mechanism.carried :] = 0.0
    before, weights = run(mechanism, x), mechanism.attention_map(x, frame)
    with torch.no_grad():
        mechanism.k.weight.mul_(2.0)
    assert torch.allclose(mechanism.attention_map(x, frame), weights, rtol=1e-5, atol=1e-7)
    assert torch.allclose(run(mechanism, x), 2 * before, rtol=1e-5, atol=1e-3)


def test_a_gain_on_rotated_keys_is_equal_within_rotary_pairs() -> None:
    for rope, entries in (("roundtrip", 2), ("rotated", 2), ("score", 4), ("none", 4), ("decoupled", 2)):
        assert len(build(f"sharing:tie=kv,kv_norm=gain,rope={rope}").k_gain) == entries


def test_4_the_round_trip_is_the_sum_over_relative_rotations() -> None:
    mechanism = build("sharing:tie=kv,rope=roundtrip")
    frame = Frame(time=TIME, rotary=Rotary(10_000.0, 256))
    weights = mechanism.attention_map(inputs(), frame)
    k = mechanism.split_heads(mechanism.k(inputs()), HEADS)
    mixed = torch.zeros(2, HEADS, TIME, mechanism.dim, dtype=torch.float64)
    for b, h, i in itertools.product(range(2), range(HEADS), range(TIME)):
        for j in range(i + 1):
            mixed[b, h, i] += (weights[b, h, i, j] * turn(k[b, h, j], j - i)).detach()
    wanted = mechanism.o(mixed.transpose(1, 2).flatten(2))
    assert torch.allclose(run(mechanism, inputs()), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("rope", "moves"),
    [
        ("score", False),
        ("roundtrip", False),
        ("rotated", True),
        ("none", False),
        ("decoupled", False),
        ("decoupled,rotary_key=shared", False),
    ],
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
    """One cached tensor with the diagonals applied on read, against separate q, k, v (no rope)."""
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


RACED = [*itertools.product(("none", "kv"), (1, 2, 4), ("auto",)), ("qk", 0, "auto"), ("qkv", 0, "auto")]
RACED += [("kv", groups, rope) for groups in (1, 4) for rope in ("none", "score", "rotated", "decoupled")]
RACED += [
    ("qkv", 0, "decoupled"),
    ("kv", 2, "decoupled,rotary_key=shared"),
    ("kv", 2, "auto,kv_norm=gain"),
    ("kv", 2, "score,kv_norm=gain"),
    ("kv", 2, "decoupled,kv_norm=gain"),
    ("kv", 2, "decoupled,rotary_key=shared,kv_norm=scale_free"),
    ("qk", 0, "auto,pos2d=true,pos2d_init=paper"),
    ("qk", 0, "auto,score_bias=t5"),
    ("kv", 2, "none,score_bias=alibi"),
]


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


@pytest.mark.parametrize(
    ("options", "elements"),
    [
        ("rope=decoupled", 64),
        ("rope=decoupled,kv_heads=2", 32),
        ("rope=decoupled,rotary_key=shared", 64 + 8),
        ("rope=decoupled,rotary_key=shared,kv_heads=2", 32 + 8),
        ("kv_norm=gain", 64 + 4),
        ("kv_norm=scale_free,kv_heads=1", 16 + 1),
        ("pos2d=true,score_bias=t5", 64),
    ],
)
def test_6_cache_of_the_other_options(options: str, elements: int) -> None:
    """Decoupled: d_c + d_r per key head, d_r once if shared; a key's norm is one scalar per key head."""
    model = Decoder(SIZES["nano"], parse_layout(f"sharing:tie=kv,{options}").layers(2), seed=1)
    assert (
        model.new_caches(3, 64).bytes == model.cache_bytes(3, 64, torch.float32) == 2 * 3 * 64 * elements * 4
    )


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
    model = Decoder.on_meta(size, parse_layout(arm).layers(size.layers))
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
        assert Decoder.on_meta(shape, parse_layout(text).layers(shape.layers)).parameter_count() == count, (
            size
        )


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ("pos2d=true", 10 + 1),
        ("pos2d=true,pos2d_m=50", 50 + 1),
        ("score_bias=alibi", 0),
        ("score_bias=t5", 32 * 4),
        ("kv_norm=gain", 8),
        ("kv_norm=gain,rope=score", 16),
        ("rope=decoupled", -64 * 32),
        ("rope=decoupled,rotary_key=shared", 64 * 4 * 8 + 64 * 8),
    ],
)
def test_7_parameters_of_the_other_options(options: str, more: int) -> None:
    """(X)+ is X + m + 1; if decoupled, the output projection reads half of each head."""
    shape = Shape(64, 4)
    counts = [
        sum(parameter.numel() for parameter in parse_layout(arm).pattern[0].build(shape).parameters())
        for arm in (f"sharing:tie=kv,{options}", "sharing:tie=kv")
    ]
    assert counts[0] - counts[1] == more


def test_score_terms_and_the_learned_mix_have_no_weight_decay() -> None:
    for arm, follows in (
        ("sharing:value_mix=learnt", None),
        ("sharing:pos2d=true", "qk"),
        ("sharing:score_bias=t5", "qk"),
    ):
        own = [circuit for circuit in build(arm).circuits() if circuit.tag == "own"]
        assert [(circuit.decay, circuit.follows) for circuit in own] == [(False, follows)]


@pytest.mark.parametrize("groups", [2, 4, 8, 16])
def test_7_exact_pairs_have_equal_parameters_flops_and_cache(groups: int) -> None:
    # The tied form has one bias vector fewer: the pair is exact without biases.
    size = dataclasses.replace(SIZES["sharing-300m"].with_settings(bias="none"), layers=2, vocabulary=256)
    shared = Decoder.on_meta(size, parse_layout(f"sharing:tie=kv,kv_heads={groups}").layers(2))
    halved = Decoder.on_meta(size, parse_layout(f"standard:kv_heads={groups // 2}").layers(2))
    assert shared.parameter_count() == halved.parameter_count()
    assert shared.flops(2048) == halved.flops(2048)
    assert shared.cache_bytes(1, 1, torch.bfloat16) == halved.cache_bytes(1, 1, torch.bfloat16)


@pytest.mark.parametrize(
    ("arm", "billions"), [("standard", 792.7), ("sharing:tie=kv", 749.7), ("sharing:tie=qkv", 706.8)]
)
def test_7_published_multiply_adds_at_300m(arm: str, billions: float) -> None:
    size = SIZES["sharing-300m"]
    model = Decoder.on_meta(size, parse_layout(arm).layers(size.layers))
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
        ({"tie": "qkv", "query_depth": 2}, "separate query projection"),
        ({"tie": "none", "rope": "roundtrip"}, "does not share"),
        ({"value_mix_norm": "unit"}, "needs value_mix"),
        ({"value_mix": (0.0, 0.0)}, "no value"),
        ({"tie": "qk", "rope": "decoupled"}, "does not share"),
        ({"tie": "qk", "kv_norm": "gain"}, "does not share"),
        ({"tie": "kv", "rotary_key": "shared"}, "needs rope=decoupled"),
        ({"tie": "qkv", "rope": "decoupled", "rotary_key": "shared"}, "separate query projection"),
        ({"pos2d_m": 20}, "need pos2d"),
        ({"pos2d_init": "paper"}, "need pos2d"),
        ({"pos2d": True, "pos2d_m": 2}, "at least 3"),
        ({"tie": "vk"}, "did you mean"),
        ({"query_depth": 3}, "at most 2"),
        ({"kv_heads": -1}, "at least 0"),
    ],
)
def test_contradictions_are_rejected_when_the_options_are_built(
    values: dict[str, object], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        SharingOptions(**values)  # type: ignore[arg-type]


def test_shared_queries_and_keys_reject_groups() -> None:
    with pytest.raises(UserError, match="same number of heads"):
        build("sharing:tie=qk,kv_heads=2")


def test_a_head_without_two_pairs_cannot_be_decoupled() -> None:
    with pytest.raises(UserError, match="is too small"):
        parse_layout("sharing:tie=kv,rope=decoupled").pattern[0].build(Shape(8, 4))


def test_labels_are_the_tuples_people_use() -> None:
    labels = {
        arm: parse_layout(arm).label
        for arm in ("sharing:tie=kv", "sharing:value_mix=(1,-1)", "sharing:value_mix=learnt")
    }
    assert list(labels.values()) == ["(Q, K=V)", "V = Q - K", "V = aQ + bK"]
    assert parse_layout("sharing:tie=kv,kv_heads=1").label == "(Q, K=V), 1 kv head"
    assert parse_layout("sharing:tie=qk,pos2d=true,score_bias=t5").label == "(Q=K, V)+, t5 bias"
