from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import headtohead as h2h
from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.terms import Composed, class_term
from headtohead.model.decoder import Decoder
from headtohead.model.generation import Sampling, generate, sample
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=32, vocabulary=20)
GREEDY = Sampling(temperature=0)


def model(arm: str = "standard", **settings: object) -> Decoder:
    size = TINY.with_settings(init_std=0.3, **settings)
    return Decoder(size, parse_layout(arm).layers(2), seed=2).double()


def written(
    decoder: Decoder, prompt: list[list[int]], count: int, sampling: Sampling = GREEDY, padding=None
) -> list[list[int]]:  # type: ignore[no-untyped-def]
    return torch.cat(list(generate(decoder, torch.tensor(prompt), count, sampling, padding)), 1).tolist()


@pytest.mark.parametrize(
    "arm", ["standard", "sharing:tie=kv", "even(sharing:tie=kv,kv_heads=1)", "diagonal", "standard:window=3"]
)
def test_cached_generation_is_the_argmax_of_the_full_forward(arm: str) -> None:
    decoder = model(arm)
    text = [3, 1, 4, 1, 5]
    for token in written(decoder, [text], 12)[0]:
        assert token == int(decoder.logits(torch.tensor([text]))[0, -1].argmax())
        text.append(token)


def test_prompts_of_different_lengths_do_not_disturb_each_other() -> None:
    decoder = model("sharing:tie=kv")
    together = torch.tensor([[0, 0, 7, 8, 9], [3, 1, 4, 1, 5]])
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    both = written(decoder, together.tolist(), 8, padding=real)
    assert both == [written(decoder, [[7, 8, 9]], 8)[0], written(decoder, [[3, 1, 4, 1, 5]], 8)[0]]


@pytest.mark.parametrize("arm", ["sharing:tie=kv", "differential"])
def test_prompts_of_different_lengths_can_continue_beyond_the_context(arm: str) -> None:
    prompt = [[0, 0, *range(1, 19)], [*range(20)]]
    both = written(model(arm), prompt, 30, padding=torch.tensor([[False] * 2 + [True] * 18, [True] * 20]))
    assert both == [written(model(arm), [row], 30)[0] for row in (prompt[0][2:], prompt[1])]


def test_a_layer_without_cache_recomputes_to_the_same_text() -> None:
    wrapped = h2h.wrap(lambda shape: torch.nn.Linear(shape.width, shape.width), name="plain")
    decoder = Decoder(
        TINY.with_settings(init_std=0.3),
        [parse_layout("standard").pattern[0], Composed((class_term(wrapped),))],
        1,
    ).double()
    assert not decoder.decodable
    text = [3, 1, 4]
    for token in written(decoder, [text], 6)[0]:
        assert token == int(decoder.logits(torch.tensor([text]))[0, -1].argmax())
        text.append(token)


def test_the_same_seed_generates_the_same_text() -> None:
    decoder = model()
    first = written(decoder, [[1, 2]], 16, Sampling(1.0, 0.9, seed=5))
    assert first == written(decoder, [[1, 2]], 16, Sampling(1.0, 0.9, seed=5))
    assert first != written(decoder, [[1, 2]], 16, Sampling(1.0, 0.9, seed=6))


def test_top_p_keeps_only_the_most_likely_tokens() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    generator = torch.Generator().manual_seed(0)
    seen = {int(sample(logits, Sampling(1.0, 0.7), generator)) for _ in range(200)}
    assert seen == {0, 1}
    assert {int(sample(logits, Sampling(1.0, 0.01), generator)) for _ in range(20)} == {0}


def test_impossible_requests_are_rejected() -> None:
    for values, words in (
        ({"temperature": -1}, "must be 0 or more"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ):
        with pytest.raises(UserError, match=words):
            Sampling(**values)
    with pytest.raises(UserError, match="prompt is empty"):
        written(model(), [[]], 1)
    with pytest.raises(UserError, match="has 32 learned positions"):
        written(model(positions="learned"), [[1] * 30], 8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": float("nan")}, "temperature=nan must be a number"),
        ({"temperature": float("inf")}, "temperature=inf must be a number"),
        ({"seed": 10**20}, "is out of range"),
    ],
)
def test_impossible_sampling_options_are_rejected(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Sampling(**given)
