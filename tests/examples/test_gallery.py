"""Tests of the data behind the gallery's figures."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    file = Path(__file__).parents[2] / "examples" / "gallery.py"
    spec = importlib.util.spec_from_file_location("gallery", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(gallery: ModuleType, name: str) -> Decoder:
    chosen = gallery.ARMS.get(name, {})
    size = SIZES["nano"].with_settings(**chosen.get("model", {}))
    layers = parse_layout(chosen.get("arm", name)).layers(size.layers)
    return Decoder(size, layers, seed=1, companion=list(range(128)))


def tokens(text: str) -> torch.Tensor:
    return torch.tensor([list(text.encode())])


def test_every_mechanism_has_a_panel_and_those_without_a_map_say_so(gallery: ModuleType) -> None:
    for name in builtin_mechanisms():
        panel = gallery.map_panel(name, model(gallery, name), tokens(gallery.TEXT)).to_json()
        assert ("no map" in panel) == (name in ("token_mlp", "no_attention")), name


def test_the_map_shown_is_that_of_the_data(gallery: ModuleType) -> None:
    first, other = tokens("self.name"), tokens("zelf.name")
    for name, moved in (("standard", True), ("fixed_seq_qk", False), ("odd(fixed_seq_qk)", True)):
        decoder = model(gallery, name)
        mine, theirs = (gallery.maps(decoder, text) for text in (first, other))
        assert len(mine) == 2
        assert mine[0].shape == (4, 9, 9)
        assert (not torch.equal(mine[0], theirs[0])) == moved, name


def test_the_head_that_attends_furthest_back_is_chosen(gallery: ModuleType) -> None:
    itself, first = torch.eye(4), torch.zeros(4, 4)
    first[:, 0] = 1
    layer, head, weights = gallery.most_telling([None, torch.stack((itself, -2 * first))])
    assert (layer, head) == (1, 1)
    assert torch.equal(weights, -first)
    assert gallery.most_telling([None, None]) is None


def test_phases_are_those_before_and_after_each_part_of_a_layer(gallery: ModuleType) -> None:
    decoder = model(gallery, "kuramoto")
    states = gallery.phases(decoder, tokens(gallery.TEXT))
    assert [state.shape for state in states] == [(len(gallery.TEXT), 64)] * 5
    assert torch.equal(states[0], decoder.embedding(tokens(gallery.TEXT), None)[0])
    assert not torch.equal(states[0], states[1])
    assert torch.equal(states[1], states[2])  # its feed-forward part starts at zero


def test_the_order_parameter_is_one_for_equal_phases_and_zero_for_opposite_ones(gallery: ModuleType) -> None:
    r, psi = gallery.order(torch.tensor([[0.3, 0.0], [0.3, math.pi]]))
    assert r.tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    assert float(psi[0]) == pytest.approx(0.3)
