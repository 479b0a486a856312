"""Indicators of attention maps with known values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headtohead.interpret.maps import indicators

L = 12


def stacked(*maps: Tensor) -> Tensor:
    """Return one sequence's maps (1, heads, time, time)."""
    return torch.stack(maps).unsqueeze(0)


IDENTITY = torch.eye(L)
UNIFORM = torch.ones(L, L).tril() / torch.arange(1, L + 1).unsqueeze(1)
SINK = torch.zeros(L, L).index_fill(1, torch.tensor(0), 1.0)
HARMONIC = sum(1 / i for i in range(1, L + 1))


def test_9_identity() -> None:
    found = indicators(stacked(IDENTITY))
    assert found["entropy"] == 0
    assert found["concentration"] == pytest.approx(math.sqrt(L))
    assert found["sink"] == pytest.approx(1 / L)
    assert [found[f"local_{n}"] for n in range(4)] == [1, 0, 0, 0]


def test_9_uniform_prefix() -> None:
    found = indicators(stacked(UNIFORM).expand(3, 2, -1, -1))
    assert found["entropy"] == pytest.approx(math.lgamma(L + 1))
    assert found["concentration"] == pytest.approx(math.sqrt(HARMONIC))
    assert found["sink"] == pytest.approx(HARMONIC / L)
    assert found["head_diversity"] == pytest.approx(0, abs=1e-12)
    for n in range(4):
        assert found[f"local_{n}"] == pytest.approx(sum(1 / i for i in range(n + 1, L + 1)) / (L - n))


def test_9_all_sink() -> None:
    found = indicators(stacked(SINK))
    assert found["entropy"] == 0
    assert found["concentration"] == pytest.approx(math.sqrt(L))
    assert found["sink"] == 1
    for n in range(4):
        assert found[f"local_{n}"] == pytest.approx(1 / (L - n))


def test_9_two_heads_identity_and_sink() -> None:
    found = indicators(stacked(IDENTITY, SINK))
    assert found["head_diversity"] == pytest.approx(2 * (L - 1) / (L * (L + 1)))


def test_signed_maps_are_replaced_by_their_absolute_values() -> None:
    signs = torch.ones(L, L)
    signs[:, ::2] = -1
    assert indicators(stacked(-3 * UNIFORM * signs), signed=True) == pytest.approx(
        indicators(stacked(UNIFORM))
    )
