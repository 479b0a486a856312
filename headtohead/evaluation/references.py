"""Reference lines for loss charts: the scores of trivial models."""

from __future__ import annotations

import lzma
import math

import numpy as np

from headtohead.data.shards import Prepared
from headtohead.data.text import Array

VERSION = 1
# Counting pairs of a large vocabulary takes memory for each distinct pair; this many tokens are enough.
_MAX_TOKENS = 20_000_000


def reference_lines(corpus: Prepared) -> dict[str, float]:
    """Return bits per byte on the test split of: uniform, unigram, bigram (fitted on train), and xz.

    Unigram counts start at one; bigrams use Witten-Bell smoothing with the unigram. xz compresses only the test text, at
    its strongest setting.
    """
    names = ("uniform", "unigram", "bigram", "xz")
    found = corpus.cached("references", VERSION, "bits_per_byte", names, lambda: _lines(corpus))
    return {name: float(value) for name, value in found.items() if value is not None}


def _lines(corpus: Prepared) -> dict[str, float]:
    train = np.asarray(corpus.splits["train"].tokens[:_MAX_TOKENS]).astype(np.int64)
    test = np.asarray(corpus.splits["test"].tokens).astype(np.int64)
    vocabulary = corpus.tokenizer.vocabulary
    size = float(corpus.splits["test"].token_lengths(corpus.tokenizer.token_bytes())[1:].sum())
    unigram = (np.bincount(train, minlength=vocabulary) + 1.0) / (len(train) + vocabulary)
    text = bytes(test.astype(np.uint8)) if vocabulary <= 256 else corpus.tokenizer.decode_bytes(test.tolist())
    return {
        "uniform": math.log2(vocabulary) * (len(test) - 1) / size,
        "unigram": float(-np.log2(unigram[test[1:]]).sum()) / size,
        "bigram": float(-np.log2(_bigram(train, test, unigram, vocabulary)).sum()) / size,
        "xz": 8.0 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / size,
    }


def _bigram(train: Array, test: Array, unigram: Array, vocabulary: int) -> Array:
    """Return the probability of each test token given the one before it."""
    pairs, counts = _pair_counts(train, vocabulary)
    firsts = pairs // vocabulary
    seen = np.bincount(firsts, weights=counts, minlength=vocabulary)
    kinds = np.bincount(firsts, minlength=vocabulary)
    wanted = test[:-1] * vocabulary + test[1:]
    index = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    count = np.where(pairs[index] == wanted, counts[index], 0)
    before = test[:-1]
    weight = np.maximum(kinds[before], 1)
    probability: Array = (count + weight * unigram[test[1:]]) / (seen[before] + weight)
    return probability


def _pair_counts(train: Array, vocabulary: int) -> tuple[Array, Array]:
    """Return the distinct pairs, encoded as first * vocabulary + second and sorted, with their counts."""
    codes = train[:-1] * vocabulary + train[1:]
    if vocabulary <= 2048:
        counts = np.bincount(codes, minlength=vocabulary * vocabulary)
        pairs = np.flatnonzero(counts)
        return pairs, counts[pairs]
    return np.unique(codes, return_counts=True)
