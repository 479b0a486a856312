"""Statistics of a corpus: its size, predictability and coherence.

Computed on the train split, on at most 4 MB in 64 evenly spaced segments (bytes and documents count all of it):

    bytes, documents       of text, a separator counted as one byte; bytes_per_document is their ratio
    unigram, bigram        entropy of a byte, and of a byte given the one before it, in bits
    xz                     compressed size over size, per segment, so that only the order within a segment counts
    types                  distinct words among 1,000 consecutive words
    repetition             fraction of a window's words that occur earlier in it
    near, far              Jaccard overlap of the words of the two halves of a window, and of halves of two random
                           windows; near above far measures the coherence of a window
    domain_bits            mutual information in bits of a window and the domain of a byte in it, if domains are known: 0 if
                           all windows have the same mixture
    domains                entropy of the domain in bits; domain_bits equals it if each window has one domain

A word is a run of letters and digits. The window is in bytes; separators count as spaces.
"""

from __future__ import annotations

import lzma
import random
import re
import statistics

import numpy as np

from headtohead.common.errors import UserError
from headtohead.data.coherence import domain_information
from headtohead.data.shards import Prepared
from headtohead.data.text import Array, Progress, silent

Statistics = dict[str, float | None]
WINDOW = 1024
COLUMNS = {
    "bytes": "bytes",
    "documents": "documents",
    "bytes_per_document": "bytes per document",
    "unigram": "unigram bits",
    "bigram": "bigram bits",
    "xz": "xz ratio",
    "types": "types per word",
    "repetition": "repetition",
    "near": "overlap near",
    "far": "far",
    "domain_bits": "domain bits",
    "domains": "of",
}
"""The statistics by name, and their table headers."""
_FORMS = dict.fromkeys(("bytes", "documents", "bytes_per_document"), ",.0f")
_FORMS |= dict.fromkeys(("unigram", "bigram"), ".2f")
_VERSION = 1
_MAX_BYTES, _SEGMENTS = 4_000_000, 64
_WORD = re.compile(rb"[0-9A-Za-z\x80-\xff]+")
_TYPED = 1000


def corpus_statistics(corpus: Prepared, window: int = WINDOW, progress: Progress = silent) -> Statistics:
    """Return the statistics of a corpus for windows of `window` bytes; computed once and cached with the corpus."""
    if window < 16:
        raise UserError(
            f"window={window} bytes is too small; at least 16 are needed for two halves with words"
        )
    return corpus.cached(
        f"statistics-{window}", _VERSION, "statistics", COLUMNS, lambda: _measured(corpus, window, progress)
    )


def statistics_head() -> list[str]:
    """Return the header of a table of statistics."""
    return list(COLUMNS.values())


def statistics_row(row: Statistics) -> list[str]:
    """Return the statistics of a corpus as formatted text; a dash if one is not defined."""
    values = {name: row.get(name) for name in COLUMNS}
    return [
        "–" if value is None else format(value, _FORMS.get(name, ".3f")) for name, value in values.items()
    ]


def _measured(corpus: Prepared, window: int, progress: Progress) -> Statistics:
    train = corpus.splits["train"]
    message = f"statistics of {corpus.label}"
    progress(message, 0.0)
    texts = _segments(corpus)
    unigram, bigram = _entropies(texts)
    packed = 0
    for index, text in enumerate(texts):
        progress(message, 0.1 + 0.6 * index / len(texts))
        packed += len(lzma.compress(text, preset=6))
    progress(message, 0.7)
    windows = [text[at : at + window] for text in texts for at in range(0, len(text) - window + 1, window)]
    half = window // 2
    halves = [(_WORD.findall(text[:half]), _WORD.findall(text[half:])) for text in windows]
    progress(message, 0.9)
    found: Statistics = {
        "bytes": train.bytes,
        "documents": len(train.documents),
        "bytes_per_document": train.bytes / max(1, len(train.documents)),
        "unigram": unigram,
        "bigram": bigram,
        "xz": packed / sum(map(len, texts)),
        "types": _types(texts),
        "repetition": _repetition(halves),
        "near": _overlap(halves),
        "far": _overlap(_shuffled(halves)),
        "domain_bits": None,
        "domains": None,
    }
    order = corpus.notes.get("order")
    if isinstance(order, dict) and len(str(order.get("train"))) == len(train.documents):
        token_bytes = train.token_lengths(corpus.tokenizer.token_bytes())
        sizes = np.add.reduceat(token_bytes, train.documents.astype(np.int64))
        lengths = [round(float(size)) for size in sizes]
        found["domain_bits"], found["domains"] = domain_information(str(order["train"]), lengths, window)
    return found


def _segments(corpus: Prepared) -> list[bytes]:
    """Return the text of evenly spaced segments of the train split."""
    train, tokenizer = corpus.splits["train"], corpus.tokenizer
    count = len(train.tokens)
    length = min(count // _SEGMENTS, int(_MAX_BYTES / _SEGMENTS * count / max(1, train.bytes))) or count
    texts = []
    for start in np.linspace(0, count - length, _SEGMENTS if length < count else 1).astype(int):
        tokens = np.asarray(train.tokens[start : start + length])
        if tokenizer.vocabulary <= 256:
            texts.append(tokens.astype(np.uint8).tobytes().replace(bytes([tokenizer.separator]), b" "))
        else:
            parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.separator) + 1)
            texts.append(" ".join(tokenizer.decode(part.tolist()) for part in parts).encode())
    return texts


def _entropies(texts: list[bytes]) -> tuple[float, float]:
    """Return the entropy of a byte, and of a byte given the one before it."""
    pairs: Array = np.zeros(2**16)
    for text in texts:
        codes = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        pairs += np.bincount(codes[:-1] * 256 + codes[1:], minlength=2**16)
    both, first = _bits(pairs), _bits(pairs.reshape(256, 256).sum(1))
    return first, both - first


def _bits(counts: Array) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _types(texts: list[bytes]) -> float | None:
    words = [word for text in texts for word in _WORD.findall(text)]
    groups = [words[start : start + _TYPED] for start in range(0, len(words) - _TYPED + 1, _TYPED)]
    return statistics.fmean(len(set(group)) / _TYPED for group in groups) if groups else None


_Halves = list[tuple[list[bytes], list[bytes]]]


def _repetition(halves: _Halves) -> float | None:
    total = sum(len(a) + len(b) for a, b in halves)
    return 1 - sum(len({*a, *b}) for a, b in halves) / total if total else None


def _overlap(halves: _Halves) -> float | None:
    """Return the Jaccard overlap of the words of two halves, averaged over windows with words in both."""
    shares = [len({*a} & {*b}) / len({*a, *b}) for a, b in halves if a and b]
    return statistics.fmean(shares) if shares else None


def _shuffled(halves: _Halves) -> _Halves:
    """Return first halves with the second halves of other windows, drawn at random with a fixed seed."""
    draw = random.Random("far").random
    keys = [(draw(), index) for index in range(len(halves))]
    others = [index for _, index in sorted(keys)]
    # Each is paired with the next in a random cycle, so that none is paired with its own second half.
    partner = dict(zip(others, [*others[1:], *others[:1]], strict=True))
    return [(a, halves[partner[index]][1]) for index, (a, _) in enumerate(halves)] if len(halves) > 1 else []
