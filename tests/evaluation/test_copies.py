"""The longest earlier match of a token's context."""

from __future__ import annotations

import torch

from headtohead.evaluation.copies import match_lengths


def longest(row: list[int], t: int) -> int:
    """The length of the longest match that ends at t, by trying every place and length."""
    lengths = [
        n for u in range(t) for n in range(1, u + 2) if row[u - n + 1 : u + 1] == row[t - n + 1 : t + 1]
    ]
    return max(lengths, default=0)


def test_a_known_text() -> None:
    text = [ord(letter) for letter in "abcxabcab"]
    assert match_lengths(torch.tensor([text])).tolist() == [[0, 0, 0, 0, 1, 2, 3, 1, 2]]


def test_matches_may_overlap_and_every_window_is_its_own() -> None:
    tokens = torch.tensor([[7, 7, 7, 7], [1, 2, 3, 4]])
    assert match_lengths(tokens).tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]


def test_random_texts_equal_a_search_of_all_places() -> None:
    tokens = torch.randint(0, 3, (4, 24), generator=torch.Generator().manual_seed(1))
    wanted = [[longest(row, t) for t in range(24)] for row in tokens.tolist()]
    assert match_lengths(tokens).tolist() == wanted
