"""A window keeps a ring buffer: as many tokens as it shows, the same outputs as a full forward."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import headtohead as h2h
from headtohead.mechanisms.contract.base import Frame
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.terms import Composed, class_term
from headtohead.mechanisms.standard import Standard, StandardOptions
from headtohead.model.decoder import Decoder
from headtohead.model.decoding import Decoding, one_step
from headtohead.model.generation import Sampling, generate
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=64, vocabulary=20)
ARMS = {
    "standard:window=1": 2 * 1,
    "standard:window=4": 2 * 4,
    "standard:window=500": 2 * 40,
    "(standard:window=4 standard)*1": 4 + 40,
    "(standard:window=4 standard:window=16)*1": 4 + 16,
}
"""Tokens kept at 40 positions, over both layers."""


def model(arm: str) -> Decoder:
    size = TINY.with_settings(init_std=0.3)
    return Decoder(size, parse_layout(arm).layers(2), seed=2).double().eval()


def tokens(batch: int, time: int) -> Tensor:
    return torch.randint(0, 20, (batch, time), generator=torch.Generator().manual_seed(time))


@pytest.mark.parametrize("arm", ARMS)
def test_declared_bytes_are_the_allocated_ones(arm: str) -> None:
    decoder = model(arm)
    caches = decoder.new_caches(3, 40)
    width = 2 * 16 * torch.float64.itemsize  # keys and values of a token
    assert caches.bytes == decoder.cache_bytes(3, 40, torch.float64) == 3 * ARMS[arm] * width
    with torch.inference_mode():
        decoder.logits(tokens(3, 40), caches=caches)
    assert caches.bytes == 3 * ARMS[arm] * width


def test_cost_states_the_bytes_that_generation_allocates() -> None:
    for arm in ("standard", "standard:window=16", "(standard:window=16 standard)*1"):
        found = h2h.cost(arm, size="nano", context=100)
        decoder = Decoder(SIZES["nano"], parse_layout(arm).layers(2), seed=1)
        assert found["cache_bytes"] == decoder.new_caches(1, 100, torch.bfloat16).bytes
    windowed, usual = (h2h.cost(arm, context=100) for arm in ("standard:window=16", "standard"))
    assert windowed["cache_bytes"] * 100 == usual["cache_bytes"] * 16
    assert windowed["cache_bytes_per_token"] == usual["cache_bytes_per_token"]


@torch.inference_mode()
@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed-shapes"])
@pytest.mark.parametrize("arm", ARMS)
def test_generation_equals_generation_without_a_cache(
    arm: str, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headtohead.model import generation

    if fixed:
        monkeypatch.setattr(generation, "decoding", lambda model, caches, *rest: Decoding(model, caches))
    decoder, text = model(arm), tokens(2, 11)
    found = torch.cat([*generate(decoder, text, 45, Sampling(seed=1))], 1)
    monkeypatch.setattr(Decoder, "decodable", False)
    assert torch.equal(found, torch.cat([*generate(decoder, text, 45, Sampling(seed=1))], 1))


@torch.inference_mode()
def test_padded_prompts_continue_as_alone() -> None:
    decoder, text = model("standard:window=4"), tokens(2, 9)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :7] = False
    both = torch.cat([*generate(decoder, text, 20, Sampling(0), padding=real)], 1)
    for row, first in ((0, 7), (1, 0)):
        alone = torch.cat([*generate(decoder, text[row : row + 1, first:], 20, Sampling(0))], 1)
        assert torch.equal(both[row : row + 1], alone)


@dataclass(frozen=True)
class OthersOptions(StandardOptions):
    window: int = h2h.option(4, "keys a query attends to")


class Others(Standard):
    """Windowed attention to other tokens only."""

    Options = OthersOptions
    graph_safe = True  # type: ignore[assignment]

    def __init__(self, shape: Any, options: Any) -> None:
        super().__init__(shape, options)
        self.strict = True


@torch.inference_mode()
@pytest.mark.parametrize("window", [1, 2, 4, 30])
def test_steps_that_exclude_the_token_itself(window: int) -> None:
    layers = [Composed((class_term(Others, {"window": window}),))] * 2
    decoder = Decoder(TINY.with_settings(init_std=0.3), layers, seed=2).double().eval()
    text = tokens(2, 20)
    whole, caches = decoder.logits(text), decoder.new_caches(2, 20)
    decoder.logits(text[:, :1], caches=caches)
    step = Decoding(decoder, caches)
    for place in range(1, 20):
        assert torch.allclose(step(text[:, place : place + 1]), whole[:, place], rtol=1e-9)


@pytest.mark.parametrize("window", [1, 3, 8, 40])
def test_a_ring_returns_what_the_new_rows_attend_to(window: int) -> None:
    choose, values = random.Random(window), torch.arange(30.0).view(1, 30, 1)
    cache = Cache([Entry("k", (1,), window=window)], 1, 30, torch.float32, "cpu")
    while cache.length < 30:
        time = choose.randint(1, min(7, 30 - cache.length))
        stop = cache.length + time
        found = cache.append("k", values[:, cache.length : stop])
        assert found.flatten().tolist() == [*range(max(0, cache.length - window + 1), stop)]
        cache.length = stop
    assert cache.tensors["k"].numel() == min(window, 30)
    assert sorted(cache.tensors["k"].flatten().tolist()) == [*range(max(0, 30 - window), 30)]


def test_a_window_belongs_to_an_entry_per_token() -> None:
    with pytest.raises(ValueError, match="'state' is per sequence"):
        Entry("state", (3,), "sequence", window=4)


class MasksItself(Standard):
    """Mixes as a file could before there were ring buffers: over every token, with its own mask."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        if cache is not None:
            k, v = cache.append("k", k), cache.append("v", v)
        scores = (q @ k.mT).masked_fill(~frame.mask(q.device, self.window), float("-inf"))
        return scores.softmax(-1) @ v


class KeepsAll(Standard):
    """Declares entries of every token, and attends with `frame.attend(window=...)`."""

    graph_safe = True  # type: ignore[assignment]

    def cache_spec(self) -> tuple[Entry, ...]:
        return tuple(dataclasses.replace(entry, window=0) for entry in super().cache_spec())


@torch.inference_mode()
@pytest.mark.parametrize("kind", [MasksItself, KeepsAll])
def test_a_mechanism_may_keep_every_token_of_a_window(kind: type[Standard]) -> None:
    text = tokens(2, 12)
    layers = [Composed((class_term(kind, {"window": 3}),))] * 2
    decoder = Decoder(TINY.with_settings(init_std=0.3), layers, seed=2).double().eval()
    caches = decoder.new_caches(2, 12)
    assert caches.bytes == decoder.cache_bytes(2, 12, torch.float64) == 2 * 2 * 2 * 12 * 16 * 8
    decoder.logits(text[:, :5], caches=caches)
    step = Decoding(decoder, caches) if decoder.graph_safe else partial(one_step, decoder, caches)
    found = torch.stack([step(text[:, place : place + 1]) for place in range(5, 12)], 1)
    assert torch.allclose(found, decoder.logits(text)[:, 5:], rtol=1e-9)
