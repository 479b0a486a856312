from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headtohead.common.errors import UserError
from headtohead.data.shards import Split
from headtohead.data.windows import Windows, permuted, scoring_windows


def split(count: int) -> Split:
    return Split(np.arange(count, dtype=np.uint32), np.array([0], dtype=np.uint64), count)


@given(st.integers(1, 3000), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_keyed_order_is_a_permutation(count: int, key: int) -> None:
    assert sorted(permuted(np.arange(count), count, str(key)).tolist()) == list(range(count))


def test_different_keys_give_different_orders() -> None:
    one, two = (permuted(np.arange(1000), 1000, key) for key in ("1/0", "2/0"))
    assert not np.array_equal(one, two)
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.1
    assert abs(np.corrcoef(one, np.arange(1000))[0, 1]) < 0.1


@given(st.integers(30, 400), st.integers(1, 9), st.integers(1, 7), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_every_epoch_sees_every_window_once(count: int, context: int, batch: int, seed: int) -> None:
    windows = Windows(split(count), context, seed)
    firsts = []
    for first in range(0, 2 * windows.count, batch):
        tokens, targets = windows.batch(first, batch)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        firsts += tokens[:, 0].tolist()
    for epoch in range(2):
        seen = firsts[epoch * windows.count : (epoch + 1) * windows.count]
        assert sorted(seen) == [context * i for i in range(windows.count)]


def test_a_batch_does_not_depend_on_the_batches_before_it() -> None:
    windows = Windows(split(10_000), 16, 3)
    whole = windows.batch(120, 40)[0]
    parts = torch.cat([windows.batch(first, 8)[0] for first in range(120, 160, 8)])
    assert torch.equal(whole, parts)


def test_a_split_shorter_than_the_context_is_rejected() -> None:
    with pytest.raises(UserError, match="a context of 16 needs 17"):
        Windows(split(16), 16, 0)


@given(st.integers(2, 500), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_scoring_predicts_every_token_but_the_first_once(count: int, context: int, batch: int) -> None:
    tokens = np.arange(count)
    seen = []
    for inputs, targets, first in scoring_windows(tokens, context, batch):
        assert inputs.shape == targets.shape
        assert inputs.shape[1] <= context
        assert torch.equal(inputs + 1, targets)
        assert targets.flatten()[0] == first
        seen += targets.flatten().tolist()
    assert seen == list(range(1, count))
