from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headtohead.data.shards import prepare
from headtohead.data.tasks.zeroshot import KINDS, Choice, Example, Task, find_task
from headtohead.data.text import Array
from headtohead.data.tokenizers import Bytes, Tokenizer
from headtohead.evaluation import zeroshot
from headtohead.evaluation.zeroshot import score_examples
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=64)


def decoder(arm: str = "standard", context: int = 64, vocabulary: int = 256) -> Decoder:
    size = dataclasses.replace(TINY, context=context, vocabulary=vocabulary).with_settings(init_std=0.3)
    return Decoder(size, parse_layout(arm).layers(2), seed=1)


class Rigged(Decoder):
    """A fake model whose next-token logits favor the memorized texts `answers`."""

    def __init__(self, tokenizer: Tokenizer, answers: list[str]) -> None:
        size = dataclasses.replace(TINY, vocabulary=tokenizer.vocabulary)
        super().__init__(size, parse_layout("standard").layers(2), seed=1)
        texts = tokenizer.encode_all(answer.encode() for answer in answers)
        self.known = [[tokenizer.separator, *map(int, text)] for text in texts]

    def logits(self, tokens: Tensor, *, where: Tensor | None = None, **_: object) -> Tensor:  # type: ignore[override]
        found = torch.zeros(*tokens.shape, self.size.vocabulary)
        for row, given in enumerate(tokens.tolist()):
            for known in self.known:
                for index in range(min(len(given), len(known) - 1)):
                    if given[: index + 1] == known[: index + 1]:
                        found[row, index, known[index + 1]] = 20.0
        return found if where is None else found[where]


def chosen(*rows: tuple[str, list[str], int]) -> Task:
    return Task(
        "made",
        False,
        tuple(
            Example(tuple(Choice(context, text) for text in texts), answer) for context, texts, answer in rows
        ),
    )


QUESTIONS = chosen(
    ("a cat", [" sat", " flew away"], 0),
    ("the dog said", [" meow", " woof"], 1),
    ("two and two", [" are five", " are four", " is"], 1),
    ("why", [" long answer here", " b"], 0),
)
WORDS = Task(
    "words", True, tuple(Example((Choice(a, b),)) for a, b in (("he ate", " fish"), ("so", " it is")))
)


def answers(task: Task) -> list[str]:
    right = [example.choices[example.answer] for example in task.examples]
    return [choice.context + choice.text for choice in right]


@pytest.mark.parametrize("kind", ["bytes", "bpe:300"])
def test_a_model_that_knows_every_answer_scores_one(story: Path, kind: str) -> None:
    tokenizer = prepare(f"file:{story}", kind).tokenizer
    for task in (QUESTIONS, WORDS):
        score = score_examples(Rigged(tokenizer, answers(task)), task, tokenizer)
        assert (score.n, score.accuracy, score.standard_error) == (len(task.examples), 1.0, 0.0)
        assert score.accuracy_by_bytes == (None if task.exact else 1.0)
        assert score.nats == pytest.approx(0.0, abs=1e-3)


def test_a_model_that_misses_the_last_token_scores_zero() -> None:
    model = Rigged(Bytes(), [text[:-1] for text in answers(WORDS)])
    assert score_examples(model, WORDS, Bytes()).accuracy == 0.0


def test_a_uniform_model_scores_chance() -> None:
    model = Rigged(Bytes(), [])
    score = score_examples(model, QUESTIONS, Bytes())
    assert score.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    assert score.accuracy_by_bytes == pytest.approx(score.chance), (
        "all choices tie, and a tie of k counts 1/k"
    )
    assert score.accuracy == pytest.approx((1 + 1 / 2 + 0 + 0) / 4), (
        "without division the shortest choice wins"
    )
    lengths = [len(e.choices[e.answer].text) for e in QUESTIONS.examples]
    assert score.nats == pytest.approx(math.log(256) * np.mean(lengths))
    written = score_examples(model, WORDS, Bytes())
    assert written.chance == pytest.approx((256.0**-5 + 256.0**-6) / 2)
    assert written.accuracy == 0.0


def test_the_standard_error_is_that_of_a_proportion() -> None:
    right = answers(QUESTIONS)[:3]
    score = score_examples(Rigged(Bytes(), right), QUESTIONS, Bytes())
    assert score.accuracy == pytest.approx(0.75)
    assert score.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    alone = score_examples(Rigged(Bytes(), right), QUESTIONS.part(1), Bytes())
    assert (alone.n, alone.standard_error) == (1, None)


def by_hand(model: Decoder, context: str, text: str, seen: int) -> float:
    """Return the nats of a choice, token by token, each from the `seen` tokens before it."""
    whole = [0, *context.encode(), *text.encode()]
    total = 0.0
    for index in range(len(whole) - len(text.encode()), len(whole)):
        scores = model.logits(torch.tensor([whole[max(0, index - seen) : index]]))[0, -1].double()
        total -= float(torch.log_softmax(scores, -1)[whole[index]])
    return total


def test_models_of_one_context_share_an_encoded_task_and_no_others() -> None:
    class Counted(Bytes):
        calls = 0

        def encode_all(self, texts: Iterable[bytes]) -> Iterator[Array]:
            Counted.calls += 1
            return super().encode_all(texts)

    for arm in ("standard", "gated_linear"):
        score_examples(decoder(arm), QUESTIONS, Counted())  # each run loads its own
    assert Counted.calls == 2  # contexts and choices
    score_examples(decoder(context=16), QUESTIONS, Counted())
    score_examples(decoder(), WORDS, Counted())
    assert Counted.calls == 6


@pytest.mark.parametrize("arm", ["standard", "gated_linear", "kuramoto", "sharing:tie=kv"])
@torch.no_grad()
def test_padding_is_not_seen_and_not_counted(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(arm).eval()
    all_ = score_examples(model, QUESTIONS, Bytes())
    monkeypatch.setattr(zeroshot, "tokens_per_pass", lambda device: 1)
    one = score_examples(model, QUESTIONS, Bytes())
    assert one.nats == pytest.approx(all_.nats, rel=1e-5)
    assert (one.accuracy, one.accuracy_by_bytes) == (all_.accuracy, all_.accuracy_by_bytes)
    right = [example.choices[example.answer] for example in QUESTIONS.examples]
    wanted = np.mean([by_hand(model, choice.context, choice.text, 64) for choice in right])
    assert all_.nats == pytest.approx(wanted, rel=1e-5)


@torch.no_grad()
def test_division_by_bytes_is_by_bytes_not_characters() -> None:
    model = decoder().eval()
    texts = [" ääää", " aaaaaaa", " a", " bb bb bb bb bb"]
    nats = np.array([by_hand(model, "x", text, 64) for text in texts])
    rates = nats / [len(text.encode()) for text in texts]
    for index in range(4):
        score = score_examples(model, chosen(("x", texts, index)), Bytes())
        assert score.nats == pytest.approx(nats[index], rel=1e-5)
        assert score.accuracy == float(nats.argmin() == index)
        assert score.accuracy_by_bytes == float(rates.argmin() == index)


def test_long_contexts_are_truncated_on_the_left_and_counted() -> None:
    model = decoder(context=16)
    fits, longer = "y" * 13, "z" * 40 + "y" * 13
    score = score_examples(model, chosen((fits, [" ab", " cd"], 0), (longer, [" ab", " cd"], 0)), Bytes())
    assert score.cut == 1
    assert score_examples(model, chosen((fits + "y", [" ab", " cd"], 0)), Bytes()).cut == 0, (
        "only the separator"
    )
    assert score_examples(model, chosen((fits + "yy", [" ab", " cd"], 0)), Bytes()).cut == 1
    ends = [
        score_examples(model, chosen((text, [" ab", " cd"], 0)), Bytes()).nats
        for text in (longer, longer[9:])
    ]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6), "truncated text is not seen"


@torch.no_grad()
def test_a_choice_longer_than_the_context_is_scored_completely() -> None:
    model = decoder(context=16).eval()
    text = " a choice of fifty letters or so, more than fit at once"
    score = score_examples(model, chosen(("why", [text, " b"], 0)), Bytes())
    whole = [0, *b"why", *text.encode()]
    total = 0.0
    for start in range(4, len(whole), 8):
        stop = min(start + 8, len(whole))
        window = whole[max(0, stop - 17) : stop]
        scores = torch.log_softmax(model.logits(torch.tensor([window[:-1]]))[0].double(), -1)
        count = stop - start
        total -= float(scores[range(-count, 0), window[-count:]].sum())
    assert score.nats == pytest.approx(total, rel=1e-5)
    assert score.cut == 1


def test_the_best_constant_answer_is_reported_if_examples_share_their_choices() -> None:
    rows = [(f"q{index}", [" no", " yes"], int(index > 0)) for index in range(4)]
    model = Rigged(Bytes(), [])
    assert score_examples(model, chosen(*rows), Bytes()).one_answer == 0.75
    assert score_examples(model, QUESTIONS, Bytes()).one_answer is None


def test_the_training_mode_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder().train()
    shares: list[float] = []
    monkeypatch.setattr(zeroshot, "tokens_per_pass", lambda device: 1)
    score_examples(model, QUESTIONS, Bytes(), progress=shares.append)
    assert model.training
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.slow
def test_the_shared_tasks_are_scored(shared_data: Path) -> None:
    model = decoder(context=32).eval()
    for name in KINDS:
        score = score_examples(model, find_task(name, shared_data).part(12), Bytes())
        assert score.n == 12
        assert 0 <= score.accuracy <= 1
        assert score.chance < 0.51
        assert math.isfinite(score.nats)
