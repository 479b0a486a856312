"""The toy's sequences: distribution, determinism, variants."""

from __future__ import annotations

import torch

from headtohead.data.tasks.toy import Source, draw_tokens
from headtohead.papers.faster_qk.task import CHUNK, count_tokens, draw_chunk, held_out, log_counts

CPU = torch.device("cpu")


def test_a_sequence_is_context_then_query() -> None:
    tokens, classes = draw_tokens(Source(1, length=64), 4000, torch.Generator().manual_seed(3))
    assert tokens.shape == (4000, 63)
    assert torch.equal(tokens[:, -1], 5 + classes)
    context = tokens[:, :-1]
    own = context >= 10
    assert torch.equal(context[own] // 10 - 1, classes[:, None].expand_as(context)[own])
    # P(distinct) = 5.5 / 15.5, and the ten own tokens have weights .1, .2 .. 1
    assert abs(float(own.float().mean()) - 5.5 / 15.5) < 0.004
    shares = torch.bincount(context[own] % 10, minlength=10) / own.sum()
    assert torch.allclose(shares, torch.arange(1, 11) / 55, atol=0.004)
    common = torch.bincount(context[~own], minlength=10) / (~own).sum()
    assert torch.allclose(common, torch.full((10,), 0.1), atol=0.004)
    assert torch.allclose(torch.bincount(classes) / 4000, torch.full((4,), 0.25), atol=0.03)


def test_uniform_attention_sees_the_share_of_distinct_tokens() -> None:
    counts, _ = held_out(Source(0), CPU)
    assert counts.sum(1).unique().tolist() == [63]
    assert abs(float((counts[:, 10:].sum(1) / 63.0).mean()) - 0.349) < 0.003


def test_the_variant_has_the_label_as_input_and_the_query_as_target() -> None:
    source = Source(1, balanced=True, label_in_input=True)
    tokens, classes = draw_tokens(source, 128, torch.Generator().manual_seed(1))
    assert torch.equal(tokens[:, -1], 1 + classes)
    assert source.target == 5
    assert torch.bincount(classes).tolist() == [32] * 4


def test_sequences_are_a_function_of_seed_and_step() -> None:
    first, again = (draw_chunk(Source(1234), 7, CPU, logarithm=False) for _ in range(2))
    assert first[0].shape == (CHUNK, 32, 50)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    for other in (draw_chunk(Source(1235), 7, CPU, False), draw_chunk(Source(1234), 8, CPU, False)):
        assert not torch.equal(first[0], other[0])


def test_counts_and_their_logarithm() -> None:
    tokens = torch.tensor([[3, 3, 12, 5]])
    counts = count_tokens(tokens)
    assert counts[0, [3, 5, 12, 0]].tolist() == [2, 1, 1, 0]
    assert torch.equal(log_counts(counts, 5), counts.float().log())
