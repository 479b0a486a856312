from __future__ import annotations

import numpy as np
import pytest
import torch

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Example
from headtohead.data.tasks.batches import Batches, by_length, collated
from headtohead.data.tasks.registry import prepare_task
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size


def examples(count: int = 100) -> list[Example]:
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        tokens = random.integers(1, 50, size=int(random.integers(1, 30)))
        found.append(Example(tokens, random.random((int(random.integers(1, 4)), len(tokens))) < 0.3, label=1))
    return found


def test_an_epoch_has_every_example_once_in_its_own_order() -> None:
    rows = examples()
    batches = Batches(rows, 8, seed=3)
    assert batches.per_epoch == 13
    orders = []
    for epoch in range(2):
        indices = [batches.batch(13 * epoch + number).places.tolist() for number in range(13)]
        assert sorted(index for batch in indices for index in batch) == list(range(100))
        orders.append(indices)
    assert orders[0] != orders[1]
    again = Batches(rows, 8, seed=3)
    assert again.batch(20).places.tolist() == orders[1][7], "stateless: any batch at any time"
    assert Batches(rows, 8, seed=4).batch(0).places.tolist() != orders[0][0]
    with pytest.raises(UserError, match="batch=0"):
        Batches(rows, 0, 1)


def test_examples_of_similar_length_share_a_batch() -> None:
    rows = examples(1000)
    batches = Batches(rows, 8, seed=1)
    padded = sum(int((batch.ends.max() - batch.ends).sum()) for batch in map(batches.batch, range(125)))
    assert padded < 0.1 * sum(len(row.tokens) for row in rows)
    lengths = [int(batches.batch(number).ends.max()) for number in range(125)]
    assert lengths != sorted(lengths)


def test_padding_is_marked_and_has_no_targets() -> None:
    rows = examples(20)
    batch = collated(rows, range(20))
    assert batch.padding is not None
    for row, example in enumerate(rows):
        length = len(example.tokens)
        assert batch.tokens[row, :length].tolist() == example.tokens.tolist()
        assert batch.padding[row].tolist() == [index < length for index in range(batch.tokens.shape[1])]
        assert batch.ends[row] == length - 1
        assert batch.targets[row, length - 1] == example.label
    assert (batch.targets >= 0).sum() == 20, "one label per example, at the last real token"
    longest = max(range(20), key=lambda index: len(rows[index].tokens))
    alone = collated(rows, [longest])
    assert alone.padding is None, "a single example has no padding"
    assert alone.ends.tolist() == [len(rows[longest].tokens) - 1]


def test_the_tokens_at_padding_have_no_effect() -> None:
    task = prepare_task("grammar:train=60", context=32)
    batch = collated(task.splits["train"], range(16))
    assert batch.padding is not None
    size = Size("t", width=16, layers=2, heads=2, ffn=24, context=32, vocabulary=task.vocabulary)
    model = Decoder(size.with_settings(init_std=0.2), parse_layout("standard").layers(2), seed=0).eval()
    other = torch.where(batch.padding, batch.tokens, torch.full_like(batch.tokens, 7))
    assert not torch.equal(other, batch.tokens)
    for causal in (True, False):
        with torch.no_grad():
            one, two = (
                model.hidden(tokens, padding=batch.padding, causal=causal) for tokens in (batch.tokens, other)
            )
        assert torch.equal(one[batch.padding], two[batch.padding])


def test_without_the_answers_only_the_prompt_is_left() -> None:
    rows = prepare_task("reverse:train=30,length=4", context=32).splits["train"]
    whole, question = collated(rows, range(8)), collated(rows, range(8), written=False)
    assert whole.tokens.shape == (8, 8)
    assert torch.equal(question.tokens, whole.tokens[:, :5])
    assert question.ends.tolist() == [4] * 8
    assert (question.targets == -1).all()
    assert torch.equal(question.spans, whole.spans)


def test_spans_are_the_first_and_the_last_relevant_token() -> None:
    tokens = np.arange(1, 7)
    masks = ([0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 1], [0] * 6, [1, 0, 0, 1, 0, 0])
    rows = [Example(tokens, np.array([mask], dtype=bool), label=0) for mask in masks]
    assert collated(rows, range(4)).spans.tolist() == [[2, 4], [5, 5], [0, 0], [0, 3]]


@pytest.mark.parametrize("padded", [True, False])
def test_groups_by_length_hold_every_example_once(padded: bool) -> None:
    lengths = [len(example.tokens) for example in examples(50)]
    groups = list(by_length(lengths, 40, padded))
    assert sorted(index for group in groups for index in group) == list(range(50))
    for group in groups:
        assert len(group) * max(lengths[index] for index in group) <= 40
        assert padded or len({lengths[index] for index in group}) == 1
