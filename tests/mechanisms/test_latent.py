"""Latent attention (MLA): absorbed = explicit, its costs, its cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Frame, Rotary, Shape, seeded_draw
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.contract.projected import mean_keys
from headtohead.mechanisms.latent import Latent, LatentOptions
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

WIDTH, HEADS, TIME = 16, 4, 9


def build(positions: str = "rope", bias: str = "none", **options: object) -> Latent:
    shape = Shape(WIDTH, HEADS, 0, 1, 256, positions=positions, bias=bias)
    mechanism = Latent(shape, LatentOptions(**options))
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    with torch.no_grad():
        for name, parameter in mechanism.named_parameters():
            parameter.add_(seeded_draw(2, "test", 0.2)(name, parameter.shape))
    return mechanism.double()


def inputs(time: int = TIME) -> Tensor:
    return torch.randn(2, time, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def frame(positions: str, start: int = 0, time: int = TIME, shift: int = 0) -> Frame:
    class Shifted(Rotary):
        def slice(self, first: int, last: int, like: Tensor) -> Tensor:
            return super().slice(first + shift, last + shift, like)

    return Frame(start=start, time=time, rotary=Shifted(10_000.0, 256) if positions == "rope" else None)


EVERY = [
    {},
    {"latent": 7},
    {"query_latent": 5},
    {"latent_norm": True},
    {"latent": 20, "query_latent": 5, "latent_norm": True},
]


@pytest.mark.parametrize("options", EVERY, ids=str)
@pytest.mark.parametrize(("positions", "bias"), [("rope", "none"), ("rope", "all"), ("none", "qkv")])
def test_4_absorbed_equals_explicit(options: dict[str, object], positions: str, bias: str) -> None:
    """Every row decoded from only the cached latents equals that in training, and so do the gradients."""
    mechanism, x = build(positions, bias, **options), inputs()
    explicit = mechanism(x, frame(positions))
    queries, kept = mechanism._read(x, frame(positions))
    absorbed = mechanism.write(mechanism._absorbed(queries, kept, frame(positions)), frame(positions))
    assert torch.allclose(absorbed, explicit, rtol=1e-10, atol=1e-12)
    parameters = tuple(mechanism.parameters())
    ours, theirs = (torch.autograd.grad(output.square().sum(), parameters) for output in (absorbed, explicit))
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-10 * largest


def test_decoding_never_forms_keys_or_values() -> None:
    """Decoding returns the correct row with the explicit form disabled."""
    mechanism, x = build(), inputs()
    wanted = mechanism(x, frame("rope"))[:, -1:]
    cache: Cache = mechanism.new_cache(2, TIME, torch.float64)
    mechanism(x[:, :-1], frame("rope", 0, TIME - 1), cache)
    cache.length = TIME - 1
    mechanism._explicit = None  # type: ignore[method-assign, assignment]
    assert torch.allclose(mechanism(x[:, -1:], frame("rope", TIME - 1, 1), cache), wanted, rtol=1e-10)


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_4_shifting_all_positions_changes_nothing(options: dict[str, object]) -> None:
    mechanism, x = build(**options), inputs()
    assert torch.allclose(mechanism(x, frame("rope", shift=100)), mechanism(x, frame("rope")), atol=1e-10)


def test_positions_matter_through_the_rotary_key() -> None:
    """Order changes the output of the last token: without the rotary key it would not."""
    x = inputs()
    swapped = x[:, [1, 0, *range(2, TIME)]]
    for positions, moves in (("rope", True), ("none", False)):
        mechanism = build(positions)
        ours, theirs = (mechanism(rows, frame(positions))[:, -1] for rows in (x, swapped))
        assert bool((ours - theirs).abs().max() > 1e-3) is moves


@pytest.mark.parametrize(("latent", "rope_dim"), [(0, 0), (100, 16), (32, 8)])
def test_7_parameters_flops_and_cache_equal_the_table(latent: int, rope_dim: int) -> None:
    size = SIZES["60m"]
    d, heads, context = size.width, size.heads, 512
    arm = f"latent:latent={latent},rope_dim={rope_dim}"
    mechanism = parse_layout(arm).pattern[0].build(Shape(d, heads, context=context))
    d_r = rope_dim or d // heads
    d_c = latent or d - d_r
    parameters = d * d_c + d * d_r + 2 * d_c * d + d * (d + heads * d_r) + d * d
    assert sum(parameter.numel() for parameter in mechanism.parameters()) == parameters
    keys = mean_keys(context)
    trained, decoded = mechanism.flops(context).causal, mechanism.flops(context, mode="decode").causal
    assert trained == 2 * parameters + (4 * d + 2 * heads * d_r) * keys
    assert decoded == 2 * parameters + 2 * heads * (2 * d_c + d_r) * context
    assert sum(entry.bytes(1, 1, torch.bfloat16) for entry in mechanism.cache_spec()) == 2 * (d_c + d_r)


@pytest.mark.parametrize(("name", "latent"), [("sharing-300m", 960), ("sharing-s", 448)])
def test_the_default_has_the_cache_of_k_equals_v(name: str, latent: int) -> None:
    size = dataclasses.replace(SIZES[name].with_settings(positions="rope"), layers=1)
    ours, theirs = (
        Decoder.on_meta(size, parse_layout(arm).layers(1)) for arm in ("latent", "sharing:tie=kv")
    )
    layer = ours.layers[0].mechanism
    assert (layer.latent, layer.rope_dim) == (latent, 64)
    assert ours.cache_bytes(1, 1, torch.bfloat16) == theirs.cache_bytes(1, 1, torch.bfloat16)


def test_initial_values_keep_the_scale_of_one_matrix() -> None:
    """W_UK W_D starts with the standard deviation of a single key matrix, as does W_Q W_DQ."""
    mechanism = Latent(Shape(256, 4), LatentOptions(query_latent=96))
    mechanism.initialise(seeded_draw(1, "test", 0.02))
    for up, down in ((mechanism.k, mechanism.down), (mechanism.q, mechanism.q_down)):
        product = (up.weight @ down.weight).detach()
        assert float(product.std()) == pytest.approx(0.02, rel=0.05)


def test_the_latent_is_in_circuit_both() -> None:
    tags = {name: c.tag for c in build(query_latent=5, latent_norm=True).circuits() for name in c.parameters}
    both = {name for name, tag in tags.items() if tag == "both"}
    assert both == {"down.weight", "gain"}
    assert {name for name, tag in tags.items() if tag == "ov"} == {"v.weight", "o.weight"}


@pytest.mark.parametrize(
    ("positions", "options", "reason"),
    [
        ("none", {"rope_dim": 4}, "needs positions=rope"),
        ("rope", {"rope_dim": 16}, "leaves no latent"),
    ],
)
def test_widths_that_do_not_fit_the_model_are_rejected(
    positions: str, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        build(positions, **options)


def test_an_odd_rotary_key_is_rejected() -> None:
    with pytest.raises(UserError, match="pairs"):
        LatentOptions(rope_dim=3)


def test_labels_name_the_widths() -> None:
    assert parse_layout("latent:latent=96,rope_dim=16").label == "MLA, latent 96, rope 16"
