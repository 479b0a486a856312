"""Likeness of projections and statistics of phases, on cases with known answers."""

from __future__ import annotations

import math

import pytest
import torch

from headtohead.interpret.phases import layer_phases, phase_statistics
from headtohead.interpret.projections import effective_rank, layer_projections, likeness
from headtohead.mechanisms.kuramoto import Synchrony
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import find_size


def decoder(arm: str) -> Decoder:
    size = find_size("nano")
    return Decoder(size, parse_layout(arm).layers(size.layers), 1).eval()


TOKENS = torch.arange(40).reshape(2, 20)


def test_equal_projections_are_alike_in_every_measure() -> None:
    torch.manual_seed(0)
    weight, other, x = torch.randn(8, 8), torch.randn(8, 8), torch.randn(2, 5, 8)
    found = likeness({"q": other, "k": weight, "v": 3 * weight}, x, 4)
    for measure in ("weights", "outputs", "angles"):
        assert found[measure]["kv"] == pytest.approx(1.0)
        assert found[measure]["qk"] < 0.99
    assert found["rank"]["k"] == pytest.approx(found["rank"]["v"])
    assert found["rank_share"]["q"] == pytest.approx(found["rank"]["q"] / 8)


def test_principal_angles_do_not_depend_on_the_basis() -> None:
    torch.manual_seed(1)
    weight, turn = torch.randn(4, 16), torch.linalg.qr(torch.randn(4, 4))[0]
    found = likeness({"q": torch.randn(4, 16), "k": weight, "v": turn @ weight}, torch.randn(1, 3, 16), 4)
    assert found["angles"]["kv"] == pytest.approx(1.0)
    assert found["weights"]["kv"] < 0.9


@pytest.mark.parametrize(("values", "rank"), [([1, 1, 1, 1], 4.0), ([1, 0, 0, 0], 1.0), ([1, 1, 0, 0], 2.0)])
def test_the_effective_rank_of_known_singular_values(values: list[float], rank: float) -> None:
    assert effective_rank(torch.diag(torch.tensor(values, dtype=torch.float64))) == pytest.approx(rank)


def test_grouped_keys_are_compared_with_their_queries_and_tied_layers_have_none() -> None:
    for arm in ("standard", "standard:kv_heads=2", "coupled"):
        found = layer_projections(decoder(arm), TOKENS)
        assert all(layer is not None and set(layer["weights"]) == {"kv", "qk", "qv"} for layer in found), arm
    for arm in ("sharing:tie=kv", "kuramoto", "no_attention"):
        assert layer_projections(decoder(arm), TOKENS) == [None, None], arm


def test_phases_that_agree_have_order_one_and_equal_gates_full_entropy() -> None:
    ones = torch.ones(1, 4)
    same = Synchrony(ones, torch.ones(1, 3, 4), torch.full((4,), 1.5), torch.ones(2, 1, 8))
    found = phase_statistics(same)
    assert (found["order"], found["pull"], found["step"]) == (1.0, 1.0, 1.5)
    assert (found["overshoots"], found["unstable"]) == (1.0, 0.0)
    assert found["gate_entropy"] == pytest.approx(1.0)
    assert found["gate_coordinates"] == pytest.approx(8.0)
    sharp = torch.zeros(2, 1, 8)
    sharp[..., 0] = 5.0
    found = phase_statistics(same._replace(gates=sharp))
    assert (found["gate_entropy"], found["gate_coordinates"], found["gate_sum"]) == (0.0, 1.0, 5.0)
    assert "gate_sum" not in phase_statistics(same._replace(gates=None))


@pytest.mark.parametrize(
    "arm",
    ["kuramoto", "kuramoto:gain=one", "kuramoto:gate=token", "kuramoto:gate=const", "kuramoto:heads=full",
     "kuramoto:value=dense", "kuramoto:successor=mix", "kuramoto_gated"],
)  # fmt: skip
def test_layers_of_phases_are_measured(arm: str) -> None:
    for layer in layer_phases(decoder(arm), TOKENS):
        assert layer is not None
        assert 0 < layer["order"] <= layer["largest_order"] <= 1
        assert 0 < layer["gate_entropy"] <= 1 + 1e-9
        assert all(map(math.isfinite, layer.values()))
    assert layer_phases(decoder(arm), TOKENS)[0] == layer_phases(decoder(arm), TOKENS)[0]


def test_equal_tokens_are_in_phase_and_layers_without_phases_have_none() -> None:
    layer = layer_phases(decoder("kuramoto:drift=none"), torch.zeros(1, 9, dtype=torch.long))[0]
    assert layer is not None
    assert layer["order"] == pytest.approx(1.0, abs=1e-5)
    assert layer["pull"] == pytest.approx(1.0, abs=1e-5)
    for arm in ("standard", "kuramoto:coupling=off", "kuramoto:group=s3"):
        assert layer_phases(decoder(arm), TOKENS) == [None, None]
    uniform = layer_phases(decoder("kuramoto:coupling=uniform"), TOKENS)[0]
    assert uniform is not None
    assert "gate_entropy" not in uniform
