"""The deconstructed mechanisms against their references, and properties that the formulas imply."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from headtohead.common.errors import UserError
from headtohead.kernels import attend, linear_attend, plain
from headtohead.kernels.attention.prefix import prefix_softmax
from headtohead.kernels.attention.taylor import taylor_attend
from headtohead.mechanisms.contract.base import Companion, Frame, Mechanism, Rotary, Shape, seeded_draw
from headtohead.mechanisms.contract.counting import counted_flops
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.mechanisms.contract.terms import Term
from headtohead.mechanisms.families import companion as companion_module
from headtohead.model.classifier import Reader
from headtohead.model.decoder import Decoder
from headtohead.model.generation import Sampling, generate
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES, Size
from tests.references import deconstructed as reference

VARIANTS = ("token_mlp", "approximate", "non_approximate", "rnd_emb_qk", "fixed_seq_qk", "static_emb_qk")
CONTROLS = ("prefix_mean", "no_attention")
ACCOMPANIED = ("rnd_emb_qk", "fixed_seq_qk")
HEADS, WIDTH, TIME = 4, 16, 7
TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=16, vocabulary=32, layers=4)
TEXT = [(7 * i * i + 3 * i) % 31 for i in range(200)]


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(arm: str, positions: str = "rope", bias: str = "none") -> Mechanism:
    shape = Shape(WIDTH, HEADS, 1, 2, 32, positions=positions, bias=bias)  # type: ignore[arg-type]
    mechanism = parse_layout(arm).pattern[0].build(shape)
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    with torch.no_grad():
        for name, parameter in mechanism.named_parameters():
            parameter.add_(seeded_draw(2, "test", 0.2)(name, parameter.shape))
    return mechanism.double()


def model(arm: str, size: Size = TINY, seed: int = 1, **settings: object) -> Decoder:
    size = size.with_settings(**{"init_std": 0.3, **settings})
    return Decoder(size, parse_layout(arm).layers(size.layers), seed, companion=TEXT).double()


def tokens(batch: int = 2, time: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, 32, (batch, time), generator=torch.Generator().manual_seed(seed))


def frame_of(x: Tensor, embeddings: Tensor, beside: Tensor, positions: str) -> Frame:
    return Frame(
        time=x.shape[1],
        rotary=Rotary(10_000.0, 32) if positions == "rope" else None,
        embeddings=embeddings,
        norm=lambda tensor: 2 * tensor,
        companion=Companion(beside),
    )


def expected(
    mechanism: Mechanism, x: Tensor, embeddings: Tensor, beside: Tensor, p: dict[str, Tensor], rope: bool
) -> Tensor:
    name, options = mechanism.name, mechanism.options
    if name in ("token_mlp", "prefix_mean"):
        return torch.stack([getattr(reference, name)(row, p) for row in x])
    facts = {"heads": HEADS, "kv_heads": options.kv_heads or HEADS}
    if name == "approximate":
        facts |= {"rope": rope, "features": options.features, "normaliser": options.normaliser}
        return torch.stack([reference.approximate(row, p, **facts) for row in x])
    if name == "non_approximate":
        return torch.stack([reference.non_approximate(row, p, silu=options.silu, **facts) for row in x])
    if name == "static_emb_qk":
        sources = [row if options.norm == "raw" else 2 * row for row in embeddings]
    elif getattr(options, "per_layer", False):
        sources = [2 * mechanism.noise] * len(x)
    else:
        sources = [beside[0].detach() if options.detach else beside[0]] * len(x)
    rows = [
        reference.from_elsewhere(row, s, p, rope=rope, **facts) for row, s in zip(x, sources, strict=True)
    ]
    return torch.stack(rows)


ARMS = [
    Term(builtin_mechanisms()[name], options).text
    for name in (*VARIANTS, "prefix_mean")
    for options in builtin_mechanisms()[name].Options.examples()
]


def compare(arm: str, positions: str, bias: str) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Return outputs and gradients of the mechanism and of its reference."""
    mechanism = build(arm, positions, bias)
    x, embeddings, beside = (
        random(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate(((2, TIME, WIDTH), (2, TIME, WIDTH), (1, 32, WIDTH)), 3)
    )
    weights, p = random(2, TIME, WIDTH, seed=8), dict(mechanism.named_parameters())
    ours = mechanism(x, frame_of(x, embeddings, beside, positions))
    theirs = expected(mechanism, x, embeddings, beside, p, positions == "rope")
    inputs = (x, embeddings, beside, *p.values())
    grads = [torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True) for y in (ours, theirs)]
    names = ["output", "x", "embeddings", "companion", *p]
    kept = [place for place, grad in enumerate(grads[1]) if grad is not None]
    assert kept == [place for place, grad in enumerate(grads[0]) if grad is not None]
    return (
        [ours.detach(), *(grads[0][place] for place in kept)],
        [theirs.detach(), *(grads[1][place] for place in kept)],
        ["output", *(names[place + 1] for place in kept)],
    )


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("positions", "bias"), [("rope", "none"), ("none", "all")])
def test_output_and_every_gradient_equal_the_reference(arm: str, positions: str, bias: str) -> None:
    ours, theirs, names = compare(arm, positions, bias)
    largest = max(float(grad.abs().max()) for grad in theirs[1:])
    for name, a, b in zip(names, ours, theirs, strict=True):
        scale = max(float(b.abs().max()), 0.0 if name == "output" else 1e-3 * largest)
        assert (a - b).abs().max() <= 1e-10 * scale, name


@pytest.mark.parametrize("arm", [*VARIANTS, "prefix_mean"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_low_precision_stays_near_the_reference(arm: str, dtype: torch.dtype, tolerance: float) -> None:
    mechanism = build(arm)
    x, embeddings, beside = (
        random(2, TIME, WIDTH),
        random(2, TIME, WIDTH, seed=4),
        random(1, 32, WIDTH, seed=5),
    )
    p = dict(mechanism.named_parameters())
    with torch.no_grad():
        theirs = expected(mechanism, x, embeddings, beside, p, True)
        frame = frame_of(x.to(dtype), embeddings.to(dtype), beside.to(dtype), "rope")
        ours = mechanism.to(dtype)(x.to(dtype), frame)
    assert (ours.double() - theirs).norm() < tolerance * theirs.norm()


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("arm", ["{}", "even({})", "odd({})", "last({})"])
@pytest.mark.parametrize("name", ACCOMPANIED)
def test_the_whole_model_equals_two_explicit_streams(name: str, arm: str, detach: bool) -> None:
    size = dataclasses.replace(TINY, layers=2)
    layout = arm.format(f"{name}:detach={str(detach).lower()}")
    decoder, text = model(layout, size), tokens(1, 9)
    borrows = [composed.base.kind.name == name for composed in decoder.arms]
    p, theta = dict(decoder.named_parameters()), decoder.rotary.theta
    ours = decoder.logits(text)[0]
    theirs = reference.two_streams(
        text[0], decoder.companion, p, borrows, heads=4, theta=theta, detach=detach
    )
    assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()
    weights = random(*ours.shape)
    grads = [torch.autograd.grad((y * weights).sum(), list(p.values())) for y in (ours, theirs)]
    for key, a, b in zip(p, *grads, strict=True):
        assert (a - b).abs().max() <= 1e-9 * b.abs().max(), key


# 1. Parameters.

COUNTS = {
    "deconstructed-xs": 2_135_168,
    "deconstructed-xs24": 6_339_712,
    "deconstructed-s": 59_331_072,
    "deconstructed-70m": 50_937_344,
    "deconstructed-160m": 151_926_528,
    "deconstructed-500m": 436_037_504,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", COUNTS)
def test_1_every_variant_has_the_parameters_of_the_table_uniform_and_hybrid(size: str, name: str) -> None:
    for arm in (name, f"even({name})"):
        shape = SIZES[size]
        on_meta = Decoder.on_meta(shape, parse_layout(arm).layers(shape.layers))
        assert on_meta.parameter_count() == COUNTS[size]


@pytest.mark.parametrize("name", VARIANTS)
def test_1_the_published_1_7b_shape_with_normalized_queries_and_keys(name: str) -> None:
    shape = SIZES["deconstructed-1.7b"]
    arm, count = (name, 1_629_865_984) if name == "token_mlp" else (f"{name}:qk_norm=true", 1_629_873_152)
    assert Decoder.on_meta(shape, parse_layout(arm).layers(28)).parameter_count() == count


def test_1_the_controls_have_fewer() -> None:
    standard, mean, none = (
        Decoder.on_meta(TINY, parse_layout(arm).layers(4)).parameter_count()
        for arm in ("standard", "prefix_mean", "no_attention")
    )
    assert standard - mean == 4 * 2 * 16 * 16, "no queries and keys"
    assert standard - none == 4 * (4 * 16 * 16 + 16), "no attention, and no norm before it"


# 2. Causality.

LAYOUTS = [*VARIANTS, *CONTROLS, *(f"even({name})" for name in (*VARIANTS, *CONTROLS))]
LAYOUTS += [
    "approximate:features=elementwise",
    "rnd_emb_qk:per_layer=true",
    "even(rnd_emb_qk:per_layer=true)",
]
LAYOUTS += [
    "(fixed_seq_qk non_approximate)*2",
    "(rnd_emb_qk static_emb_qk)*2",
    "fixed_seq_qk:length=40,offset=9",
]


@pytest.mark.parametrize("arm", LAYOUTS)
@pytest.mark.parametrize("slow", [False, True])
def test_2_changing_a_token_leaves_all_earlier_logits_bit_identical(arm: str, slow: bool) -> None:
    decoder, first = model(arm), tokens()
    second = first.clone()
    second[:, 7:] = (second[:, 7:] + 5) % 32
    if slow:
        with plain():
            before, after = decoder.logits(first), decoder.logits(second)
    else:
        before, after = decoder.logits(first), decoder.logits(second)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


# 3. No mixing.


def test_3_uniform_token_mlp_depends_on_its_own_token_alone() -> None:
    decoder, first = model("token_mlp"), tokens()
    second = first.clone()
    second[:, :5] = (second[:, :5] + 3) % 32
    assert torch.equal(decoder.logits(first)[:, 5:], decoder.logits(second)[:, 5:])


def test_3_its_loss_is_the_same_at_every_context_and_never_below_the_bigram_entropy() -> None:
    decoder = model("token_mlp", dataclasses.replace(TINY, layers=2), init_std=0.1).float()
    text = np.array(TEXT * 3)
    stream = torch.tensor(text)
    pairs, counts = np.unique(np.stack((text[:-1], text[1:])), axis=1, return_counts=True)
    firsts = np.bincount(text[:-1])
    floor = -(counts * np.log(counts / firsts[pairs[0]])).sum() / (len(text) - 1)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        decoder(stream[:-1].view(1, -1), stream[1:].view(1, -1))[0].backward()
        optimizer.step()
    usable = (len(text) - 1) // 12 * 12
    losses = []
    for context in (1, 4, 12):
        inputs, targets = (part[:usable].view(-1, context) for part in (stream[:-1], stream[1:]))
        losses.append(float(decoder.nats(inputs, targets).mean()))
    assert max(losses) - min(losses) < 1e-5
    whole = float(decoder.nats(stream[:-1].view(1, -1), stream[1:].view(1, -1)).mean())
    assert whole < 0.9 * math.log(31), "it has learned something"
    assert whole >= floor


# 4. Fixed maps.


def maps(decoder: Decoder, text: Tensor) -> list[Tensor]:
    """Return the attention map of every layer for these tokens."""
    found: list[Tensor] = []

    def keep(mechanism: Mechanism, arguments: tuple[Tensor, Frame]) -> None:
        if (
            arguments[0].shape[0] == len(text)
            and arguments[1].start == 0
            and arguments[1].embeddings is not None
        ):
            found.append((mechanism, mechanism.attention_map(*arguments)))  # type: ignore[arg-type]

    handles = [block.mechanism.register_forward_pre_hook(keep) for block in decoder.layers]
    with torch.no_grad():
        decoder.logits(text)
    for handle in handles:
        handle.remove()
    # The data's call comes after the companion's: the last map of each layer is the data's.
    by_layer = {mechanism: weights for mechanism, weights in found}  # noqa: C416
    return [by_layer[block.mechanism] for block in decoder.layers]


@pytest.mark.parametrize("name", [*ACCOMPANIED, "rnd_emb_qk:per_layer=true"])
def test_4_maps_are_identical_across_inputs_and_batch_sizes(name: str) -> None:
    decoder = model(name)
    one, two = maps(decoder, tokens(1)), maps(decoder, tokens(3, seed=5))
    for first, second in zip(one, two, strict=True):
        assert first.shape[0] == 1
        assert second.shape[0] == 3
        assert all(torch.equal(first[0], row) for row in second)


@pytest.mark.parametrize("layout", ["{}", "even({})", "bottom({})"])
def test_4_with_its_own_text_as_input_fixed_seq_qk_is_standard(layout: str) -> None:
    decoder, standard = model(layout.format("fixed_seq_qk")), model("standard")
    assert decoder.companion.tolist() == TEXT[:16]
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), standard.parameters(), strict=True)), (
        "the same initial values"
    )
    text = torch.tensor([TEXT[:16]])
    ours, theirs = decoder.logits(text), standard.logits(text)
    assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()
    other = torch.tensor([TEXT[1:17]])
    assert (decoder.logits(other) - standard.logits(other)).abs().max() > 1e-3


# 5. Static queries and keys; rows of maps.


def test_5_one_layer_of_static_emb_qk_is_standard() -> None:
    size = dataclasses.replace(TINY, layers=1)
    assert torch.equal(
        model("static_emb_qk", size).logits(tokens()), model("standard", size).logits(tokens())
    )
    raw = model("static_emb_qk:norm=raw", size).logits(tokens())
    assert not torch.allclose(raw, model("standard", size).logits(tokens()))


def test_5_a_static_map_depends_on_the_embedding_and_its_layers_norm_q_and_k_alone() -> None:
    decoder = model("static_emb_qk")
    before = maps(decoder, tokens())[2]
    for name, parameter in decoder.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1 + 0.1 * random(*parameter.shape))
            moved = not torch.equal(maps(decoder, tokens())[2], before)
            parameter.copy_(kept)
        own = [f"blocks.2.{part}" for part in ("mixer_norm.gain", "mechanism.q.weight", "mechanism.k.weight")]
        assert moved == (name in ["embedding.weight", *own]), name


@pytest.mark.parametrize(
    "name", ["approximate", "non_approximate", *ACCOMPANIED, "static_emb_qk", "prefix_mean"]
)
def test_5_rows_of_the_map_are_distributions(name: str) -> None:
    for weights in maps(model(name), tokens()):
        assert (weights >= 0).all()
        assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]), atol=1e-12)
        assert (weights.triu(1) == 0).all()


def test_5_elementwise_features_can_give_negative_weights() -> None:
    mechanism = build("approximate:features=elementwise")
    x = random(2, TIME, WIDTH)
    weights = mechanism.attention_map(x, Frame(time=TIME, rotary=Rotary(10_000.0, 32)))
    assert mechanism.signed
    assert (weights < 0).any()
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]), atol=1e-9)


# 6. Taylor weights.


def test_6_taylor_weights_dense_log_score_and_recurrence_are_one() -> None:
    q, k, v = (random(1, 1, 20, 6, seed=seed) for seed in (1, 2, 3))
    dense = taylor_attend(q, k, v)[0, 0]
    for features in ("full", "packed"):
        found = reference.taylor_recurrence(q[0, 0], k[0, 0], v[0, 0], features)
        assert torch.allclose(found, dense, rtol=1e-12)
    weights = reference.taylor_map(q[0, 0], k[0, 0])
    assert torch.allclose(weights @ v[0, 0], dense, rtol=1e-12)


def test_6_taylor_weights_dense_is_the_chunked_form_with_every_gradient() -> None:
    inputs = tuple(random(1, 2, 150, 4, seed=seed).requires_grad_() for seed in (1, 2, 3))

    def features(x: Tensor) -> Tensor:
        y = x * 4**-0.25
        square = (y.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2) * 2**-0.5
        return torch.cat((torch.ones_like(y[..., :1]), y, square), -1)

    def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sums, _ = linear_attend(features(q), features(k), F.pad(v, (0, 1), value=1.0))
        return sums[..., :-1] / sums[..., -1:]

    weights = random(1, 2, 150, 4, seed=4)
    outputs = [function(*inputs) for function in (chunked, taylor_attend)]
    assert torch.allclose(*outputs, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(
        *(torch.autograd.grad((output * weights).sum(), inputs) for output in outputs), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()


@pytest.mark.parametrize("normaliser", ["joint", "per_order"])
def test_6_elementwise_features_dense_is_the_recurrence_is_the_chunked_form(normaliser: str) -> None:
    mechanism = build(f"approximate:features=elementwise,normaliser={normaliser}", "none")
    x = random(1, 150, WIDTH)  # more than two chunks
    frame = Frame(time=150)
    q, k, v = mechanism.project(x, None)
    chunked = mechanism.mix(q, k, v, frame, None)
    with plain():
        steps = mechanism.mix(q, k, v, frame, None)
    dense = mechanism.attention_map(x, frame) @ v
    scale = dense.abs().max()
    assert (chunked - dense).abs().max() < 1e-8 * scale
    assert (steps - dense).abs().max() < 1e-8 * scale
    if normaliser == "joint":
        found = reference.taylor_recurrence(q[0, 0], k[0, 0], v[0, 0], "elementwise")
        assert (found - chunked[0, 0]).abs().max() < 1e-8 * scale


def test_6_first_order_sums_change_sign_which_is_why_per_order_is_never_a_default() -> None:
    q, k = random(400, 8, seed=1), random(400, 8, seed=2)
    sums = (q @ k.T).tril().sum(1)
    assert 0.3 < float((sums < 0).double().mean()) < 0.7
    assert build("approximate:features=elementwise,normaliser=per_order").singular


def test_6_gradients_of_taylor_weights() -> None:
    inputs = tuple(random(1, 2, 5, 4, seed=seed).requires_grad_() for seed in (1, 2, 3))
    assert gradcheck(taylor_attend, inputs)


# 7. One score per key.


def test_7_dense_scan_gate_recurrence_and_sdpa_are_one() -> None:
    scores, v = 3 * random(2, 3, 50, seed=1), random(2, 3, 50, 8, seed=2)
    mixed, _ = prefix_softmax(scores, v)
    with plain():
        steps, _ = prefix_softmax(scores, v)
    # A stock causal kernel: q' = (1, 0, ...), k'_j = (s_j, 0, ...), scale 1.
    one = F.pad(torch.ones_like(scores).unsqueeze(-1), (0, 7))
    core = attend(one, F.pad(scores.unsqueeze(-1), (0, 7)), v, scale=1.0)
    for found in (steps, core):
        assert torch.allclose(found, mixed, rtol=1e-12, atol=1e-14)
    assert torch.allclose(reference.prefix_map(scores[0, 0]) @ v[0, 0], mixed[0, 0], rtol=1e-12, atol=1e-14)
    assert torch.allclose(
        reference.gate_recurrence(scores[0, 0], v[0, 0]), mixed[0, 0], rtol=1e-12, atol=1e-13
    )


def test_7_ratios_of_weights_do_not_depend_on_the_query() -> None:
    weights = build("non_approximate").attention_map(random(1, TIME, WIDTH), Frame(time=TIME))[0, 0]
    ratios = torch.stack([weights[i, 0] / weights[i, 2] for i in range(2, TIME)])
    assert torch.allclose(ratios, ratios[0].expand_as(ratios), rtol=1e-12)


def test_7_rotary_positions_change_nothing() -> None:
    mechanism, x = build("non_approximate:silu=none"), random(2, TIME, WIDTH)
    q, k, _ = mechanism.project(x, None)
    frame = Frame(time=TIME, rotary=Rotary(10_000.0, 32))
    still, turned = (q * k).sum(-1), (frame.rotate(q) * frame.rotate(k)).sum(-1)
    assert torch.allclose(still, turned, rtol=1e-10, atol=1e-12)
    gated = build("non_approximate")
    assert torch.equal(gated(x, frame), gated(x, Frame(time=TIME)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_7_scores_of_a_thousand_stay_finite_and_do_not_reach_back(dtype: torch.dtype) -> None:
    scores = (1e3 * random(1, 2, 40).sign()).float().requires_grad_()
    scores_rising = torch.linspace(-1e3, 1e3, 40).expand(1, 2, 40)
    for given in (scores, scores_rising, -scores_rising):
        v = random(1, 2, 40, 4).to(dtype).requires_grad_()
        mixed, (peak, total) = prefix_softmax(given, v)
        assert torch.isfinite(mixed).all()
        assert torch.isfinite(total).all()
        assert (peak <= 1e3).all()
        mixed.float().square().sum().backward()
        assert torch.isfinite(v.grad).all()
    assert torch.isfinite(scores.grad).all()


def test_7_a_zero_query_is_the_prefix_mean() -> None:
    mechanism, mean = build("non_approximate", bias="all"), build("prefix_mean", bias="all")
    with torch.no_grad():
        mechanism.q.weight.zero_()
        mechanism.q.bias.zero_()
        for name in "vo":
            getattr(mean, name).load_state_dict(getattr(mechanism, name).state_dict())
    x = random(2, TIME, WIDTH)
    assert torch.allclose(mechanism(x, Frame(time=TIME)), mean(x, Frame(time=TIME)), rtol=1e-12, atol=1e-14)


# 8. Decoding, bytes, FLOPs.


@pytest.mark.parametrize("arm", LAYOUTS)
def test_8_prefill_and_cached_decode_equal_the_full_forward(arm: str) -> None:
    decoder, text = model(arm), tokens(3, 14)
    full = decoder.logits(text).detach()
    caches = decoder.new_caches(3, 14)
    parts = [decoder.logits(text[:, :5], caches=caches), decoder.logits(text[:, 5:8], caches=caches)]
    parts += [decoder.logits(text[:, i : i + 1], caches=caches) for i in range(8, 14)]
    assert torch.allclose(torch.cat(parts, 1), full, rtol=1e-9, atol=1e-10 * float(full.abs().max()))
    assert caches.bytes == decoder.cache_bytes(3, 14, torch.float64)


@pytest.mark.parametrize("arm", LAYOUTS)
def test_8_left_padding_and_batch_neighbors_have_no_effect(arm: str) -> None:
    decoder, text = model(arm), tokens(1, 8)
    alone = decoder.logits(text).detach()
    padded = torch.cat((torch.full((1, 3), 9), text), 1)
    both = torch.cat((padded, tokens(1, 11, seed=4)))
    real = torch.ones(2, 11, dtype=torch.bool)
    real[0, :3] = False
    scale = float(alone.abs().max())
    assert (decoder.logits(both, padding=real)[:1, 3:] - alone).abs().max() < 1e-9 * scale
    caches = decoder.new_caches(2, 11, padding=real)
    parts = [decoder.logits(both[:, :6], caches=caches)]
    parts += [decoder.logits(both[:, i : i + 1], caches=caches) for i in range(6, 11)]
    assert (torch.cat(parts, 1)[:1, 3:] - alone).abs().max() < 1e-9 * scale


D, H, T = 16, 4, 16
ELEMENTS = {  # table 2.3: per token, per sequence, shared by the batch
    "static_emb_qk": (2 * D, 0, 0),
    "token_mlp": (0, 0, 0),
    "approximate": (2 * D, 0, 0),
    "approximate:features=elementwise": (0, 3 * D + 2 * D * D // H + H, 0),
    "non_approximate": (0, D + 2 * H, 0),
    "rnd_emb_qk": (D, 0, 2 * T * D),
    "fixed_seq_qk": (D, 0, 2 * T * D),
    "prefix_mean": (0, D, 0),
    "no_attention": (0, 0, 0),
}


@pytest.mark.parametrize("arm", ELEMENTS)
def test_8_cache_and_state_are_those_of_the_table(arm: str) -> None:
    decoder = model(arm).float()
    per_token, per_sequence, shared = ELEMENTS[arm]
    for batch, capacity in ((1, 8), (3, 16)):
        wanted = 4 * 4 * (batch * (capacity * per_token + per_sequence) + shared)
        assert decoder.new_caches(batch, capacity).bytes == wanted
    assert decoder.cache_bytes_per_token(torch.float32) == 4 * 4 * per_token


def test_8_sums_over_tokens_are_kept_wide() -> None:
    mechanism = build("non_approximate")
    cache = mechanism.new_cache(2, 8, torch.bfloat16)
    assert {tensor.dtype for tensor in cache.tensors.values()} == {torch.float32}
    assert cache.bytes == sum(entry.bytes(2, 8, torch.bfloat16) for entry in mechanism.cache_spec())


FLOPS = {  # table 2.3, every key counted, with B sequences in the batch
    "static_emb_qk": lambda b: 8 * D**2 + 4 * D * T,
    "token_mlp": lambda b: 8 * D**2,
    "approximate": lambda b: 8 * D**2 + 4 * D * T,
    "approximate:features=elementwise": lambda b: 8 * D**2 + 4 * H * (1 + 2 * D // H) * (D // H + 1),
    "non_approximate": lambda b: 8 * D**2,
    "rnd_emb_qk": lambda b: 4 * D**2 + 2 * D * T + (4 * D**2 + 2 * D * T) / b,
    "fixed_seq_qk": lambda b: 4 * D**2 + 2 * D * T + (4 * D**2 + 2 * D * T) / b,
}


@pytest.mark.parametrize("arm", FLOPS)
@pytest.mark.parametrize("batch", [1, 3])
def test_8_flops_of_a_layer_are_those_of_the_table_and_the_counted_ones(arm: str, batch: int) -> None:
    mechanism = model(arm).layers[0].mechanism.float()
    declared = mechanism.flops(T, batch)
    assert declared.full == pytest.approx(FLOPS[arm](batch))
    assert counted_flops(mechanism, T, batch, "train") == pytest.approx(declared.full)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arm", ["fixed_seq_qk", "even(rnd_emb_qk)", "first(fixed_seq_qk:length=20)", "prefix_mean"]
)
@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
@pytest.mark.parametrize("batch", [1, 3])
def test_8_flops_of_the_whole_model_are_the_counted_ones(arm: str, mode: str, batch: int) -> None:
    decoder = Decoder.on_meta(TINY, parse_layout(arm).layers(4))
    caches, time = None if mode == "train" else decoder.new_caches(batch, T), 1 if mode == "decode" else T
    if mode == "decode" and caches is not None:
        caches.advance(T - 1)
    with plain(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        decoder.logits(torch.zeros(batch, time, dtype=torch.long, device="meta"), caches=caches)
    declared = decoder.flops(T, batch, mode)  # type: ignore[arg-type]
    assert counter.get_total_flops() / (batch * time) == pytest.approx(declared.full)


def test_8_the_companions_pass_costs_the_batch_one_sequence() -> None:
    """(8 d^2 + 4 d T + 6 d f) / B more per layer in total, as in table 2.3; the last layer's update is not needed."""
    decoder, width = Decoder.on_meta(TINY, parse_layout("fixed_seq_qk").layers(4)), TINY.ffn
    for batch in (1, 8):
        layer = 4 * D**2 + 2 * D * T + (8 * D**2 + 4 * D * T + 6 * D * width) / batch
        unneeded = (4 * D**2 + 2 * D * T + 6 * D * width) / batch
        rest = 2 * D * TINY.vocabulary + 4 * 6 * D * width
        assert decoder.flops(T, batch).full == pytest.approx(4 * layer - unneeded + rest)


# The companion in a model.


def test_inputs_beyond_the_companion_are_rejected() -> None:
    for arm in ("rnd_emb_qk", "rnd_emb_qk:per_layer=true", "even(fixed_seq_qk)"):
        with pytest.raises(UserError, match="companion holds 16 tokens; 17 were requested"):
            model(arm).logits(tokens(1, 17))
    decoder = model("fixed_seq_qk")
    with pytest.raises(UserError, match="companion has 16"):
        list(generate(decoder, tokens(1, 10), 8))
    assert len(list(generate(model("fixed_seq_qk:length=30"), tokens(1, 10), 15))) == 15


@pytest.mark.parametrize(
    "arm", ["fixed_seq_qk", "even(rnd_emb_qk)", "static_emb_qk", "even(non_approximate)"]
)
def test_cached_generation_is_the_argmax_of_the_full_forward(arm: str) -> None:
    decoder, text = model(arm), [3, 1, 4]
    for token in torch.cat(list(generate(decoder, torch.tensor([text]), 10, Sampling(0))), 1)[0].tolist():
        assert token == int(decoder.logits(torch.tensor([text]))[0, -1].argmax())
        text.append(token)


def test_the_companion_is_a_buffer_of_the_model_and_comes_back_with_its_weights() -> None:
    for arm in ("fixed_seq_qk:offset=3", "rnd_emb_qk", "rnd_emb_qk:per_layer=true"):
        decoder = model(arm)
        again = Decoder(decoder.size, decoder.arms, seed=None).double()
        again.load_state_dict(decoder.state_dict())
        assert torch.equal(again.logits(tokens()), decoder.logits(tokens()))
    assert model("fixed_seq_qk:offset=3").companion.tolist() == TEXT[3:19]
    noise = model("rnd_emb_qk:sigma=0.5").companion
    assert noise.shape == (16, 16)
    assert 0.4 < float(noise.std()) < 0.6
    assert not torch.equal(model("rnd_emb_qk", seed=2).companion, model("rnd_emb_qk").companion)
    assert "companion" not in model("standard").state_dict()


def test_an_impossible_companion_is_rejected() -> None:
    layers = parse_layout("fixed_seq_qk").layers(4)
    with pytest.raises(UserError, match="got none"):
        Decoder(TINY, layers, seed=1)
    with pytest.raises(UserError, match="at least 16 tokens; got 9"):
        Decoder(TINY, layers, seed=1, companion=TEXT[:9])
    for arm, words in (
        ("rnd_emb_qk fixed_seq_qk", "one companion"),
        ("rnd_emb_qk rnd_emb_qk:sigma=1", "one companion"),
        ("fixed_seq_qk:length=9", "shorter than the context 16"),
    ):
        with pytest.raises(UserError, match=words):
            model(arm)
    with pytest.raises(UserError, match="needs a companion"):
        build("fixed_seq_qk")(random(1, 4, WIDTH), Frame(time=4))


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("rnd_emb_qk:sigma=0", "query and key equal"),
        ("rnd_emb_qk:sigma=-1", "at least 0"),
        ("rnd_emb_qk:per_layer=true,detach=true", "has no companion"),
        ("approximate:normaliser=per_order", "needs features=elementwise"),
        ("approximate:features=square", "unknown value for features"),
        ("non_approximate:silu=k", "unknown value for silu"),
        ("static_emb_qk:norm=rms", "unknown value for norm"),
        ("fixed_seq_qk:length=-1", "at least 0"),
        ("approximate:window=3", "unknown option"),
    ],
)
def test_contradictions_are_rejected_when_the_options_are_built(arm: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_layout(arm)


@pytest.mark.parametrize("arm", ["fixed_seq_qk", "rnd_emb_qk:kv_heads=2"])
def test_long_inputs_go_through_the_core_to_the_same_output(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, text = model(arm), tokens(3, 14)
    short, before = decoder.logits(text), decoder.flops(16, 3)
    monkeypatch.setattr(companion_module, "LONGEST_MAP", 8)
    long = decoder.logits(text)
    assert (long - short).abs().max() < 1e-11 * short.abs().max()
    assert decoder.flops(16, 3).full > before.full, "scores are no longer shared"


def test_dropout_reaches_the_companion_too() -> None:
    decoder = model("fixed_seq_qk", dropout=0.5).train()
    decoder.embedding.weight.data[:, :] = 1.0
    first, second = maps(decoder, tokens()), maps(decoder, tokens())
    assert not torch.equal(first[1], second[1])


@pytest.mark.slow
def test_an_accompanied_model_compiles_as_one_graph() -> None:
    decoder = model("even(fixed_seq_qk)", dataclasses.replace(TINY, layers=2)).float()
    decoder.hidden(tokens())
    torch._dynamo.reset()
    compiled = torch.compile(decoder.hidden, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(tokens()), decoder.hidden(tokens()), atol=1e-5)


def test_a_stage_applies_to_the_companions_queries_and_keys(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "half.py").write_text(
        "import headtohead as h2h\nclass Half(h2h.Stage):\n    def evolve(self, q, k, frame):\n        return q * 0.5, k\n"
    )
    staged, bare = build(f"fixed_seq_qk+{tmp_path}/half.py:Half"), build("fixed_seq_qk")
    with torch.no_grad():
        bare.q.weight.mul_(0.5)
    x, beside = random(1, TIME, WIDTH), random(1, 32, WIDTH, seed=5)
    ours, theirs = (m(x, frame_of(x, x, beside, "rope")) for m in (staged, bare))
    assert torch.allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("arm", ["fixed_seq_qk", "rnd_emb_qk", "fixed_seq_qk:length=30", "even(rnd_emb_qk)"])
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_bidirectional_answer_does_not_depend_on_how_far_the_batch_is_padded(
    arm: str, positions: str
) -> None:
    decoder, text = model(arm, positions=positions), tokens(1, 12)
    alone = decoder.hidden(text[:, :5], causal=False)
    real = torch.arange(12)[None] < 5
    assert torch.allclose(decoder.hidden(text, padding=real, causal=False)[:, :5], alone, rtol=1e-11)


@pytest.mark.parametrize("length", [16, 12])
@pytest.mark.parametrize("arm", ["fixed_seq_qk", "even(rnd_emb_qk)", "fixed_seq_qk:length=30"])
def test_flops_of_a_bidirectional_model_count_the_whole_companion(arm: str, length: int) -> None:
    with torch.device("meta"):
        reader = Reader(TINY, parse_layout(arm).layers(4), None, causal=False)
    with plain(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        reader.logits(torch.zeros(3, length, dtype=torch.long, device="meta"))
    assert counter.get_total_flops() / (3 * length) == pytest.approx(reader.flops(length, 3).full)
