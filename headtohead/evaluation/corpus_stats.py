"""What a corpus is like, in numbers: how much of it there is, how predictable it is, how well it hangs together.

Of the train split, at most 4 MB in 64 stretches spread evenly over it (the counts of bytes and documents are of all):

    bytes, documents       of text, a separator counted as one byte; bytes_per_document is their ratio
    unigram, bigram        entropy of a byte, and of a byte given the one before it, in bits
    xz                     compressed size over size, a stretch at a time so that its order counts and its place does not
    types                  distinct words among 1,000 in a row
    repetition             share of a window's words that stood in it before
    near, far              words that the two halves of a window share (over those in either), and the halves of two
                           windows drawn at random; near above far is what holds a window together
    domain_bits            bits that the window tells about the domain of a byte in it, where domains are known: none where
                           all windows hold the same mixture, and
    domains                bits of the domain itself where each window holds one

A word is a run of letters and digits. A window is so many bytes; separators are spaces here.
"""

from __future__ import annotations

import lzma
import random
import re
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from headtohead.common.errors import UserError
from headtohead.common.files import read_json, write_json
from headtohead.data.coherence import domain_information
from headtohead.data.shards import Prepared, Split

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
"""The statistics by name, and what the head of a table says."""
_FORMS = {
    "bytes": ",.0f",
    "documents": ",.0f",
    "bytes_per_document": ",.0f",
    "unigram": ".2f",
    "bigram": ".2f",
}
_VERSION = 1
_MAX_BYTES, _STRETCHES = 4_000_000, 64
_WORD = re.compile(rb"[0-9A-Za-z\x80-\xff]+")
_TYPED = 1000


def corpus_statistics(
    corpus: Prepared, window: int = WINDOW, progress: Callable[[str, float], None] = lambda words, share: None
) -> Statistics:
    """Return the statistics of a corpus for windows of so many bytes; made once and kept with the prepared corpus."""
    if window < 16:
        raise UserError(
            f"window={window} bytes is too small; at least 16 are needed for two halves with words"
        )
    path = corpus.folder / f"statistics-{window}.json"
    try:
        stored = read_json(path)
        if stored["version"] == _VERSION and stored["statistics"].keys() == COLUMNS.keys():
            return {
                key: None if value is None else float(value) for key, value in stored["statistics"].items()
            }
    except (UserError, KeyError, TypeError, AttributeError, ValueError):
        pass  # not there yet, or damaged: they are worked out again
    found = _measured(corpus, window, progress)
    write_json(path, {"version": _VERSION, "statistics": found})
    return found


def statistics_head() -> list[str]:
    """Return the heads of a table of statistics."""
    return list(COLUMNS.values())


def statistics_row(row: Statistics) -> list[str]:
    """Return the statistics of a corpus for people; a dash where one is not defined."""
    shown = []
    for name in COLUMNS:
        value = row.get(name)
        shown.append("–" if value is None else format(value, _FORMS.get(name, ".3f")))
    return shown


def _measured(corpus: Prepared, window: int, progress: Callable[[str, float], None]) -> Statistics:
    train = corpus.splits["train"]
    words = f"statistics of {corpus.label}"
    progress(words, 0.0)
    texts = _stretches(corpus)
    unigram, bigram = _entropies(texts)
    packed = 0
    for place, text in enumerate(texts):
        progress(words, 0.1 + 0.6 * place / len(texts))
        packed += len(lzma.compress(text, preset=6))
    progress(words, 0.7)
    halves = [
        (
            _WORD.findall(text[start : start + window // 2]),
            _WORD.findall(text[start + window // 2 : start + window]),
        )
        for text in texts
        for start in range(0, len(text) - window + 1, window)
    ]
    progress(words, 0.9)
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
        "far": _overlap(_parted(halves)),
        "domain_bits": None,
        "domains": None,
    }
    order = corpus.notes.get("order")
    if isinstance(order, dict) and len(str(order.get("train"))) == len(train.documents):
        lengths = _document_bytes(corpus, train)
        found["domain_bits"], found["domains"] = domain_information(str(order["train"]), lengths, window)
    return found


def _stretches(corpus: Prepared) -> list[bytes]:
    """Return the text of stretches of the train split, spread evenly over it."""
    train, tokenizer = corpus.splits["train"], corpus.tokenizer
    count = len(train.tokens)
    length = min(count // _STRETCHES, int(_MAX_BYTES / _STRETCHES * count / max(1, train.bytes))) or count
    texts = []
    for start in np.linspace(0, count - length, _STRETCHES if length < count else 1).astype(int):
        tokens = np.asarray(train.tokens[start : start + length])
        if tokenizer.vocabulary <= 256:
            texts.append(tokens.astype(np.uint8).tobytes().replace(bytes([tokenizer.separator]), b" "))
        else:
            parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.separator) + 1)
            texts.append(" ".join(tokenizer.decode(part.tolist()) for part in parts).encode())
    return texts


def _entropies(texts: list[bytes]) -> tuple[float, float]:
    """Return the entropy of a byte, and of a byte given the one before it."""
    pairs: np.ndarray[Any, Any] = np.zeros(2**16)
    for text in texts:
        codes = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        pairs += np.bincount(codes[:-1] * 256 + codes[1:], minlength=2**16)
    both, first = _bits(pairs), _bits(pairs.reshape(256, 256).sum(1))
    return first, both - first


def _bits(counts: np.ndarray[Any, Any]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _types(texts: list[bytes]) -> float | None:
    words = [word for text in texts for word in _WORD.findall(text)]
    shares = [
        len(set(words[start : start + _TYPED])) / _TYPED
        for start in range(0, len(words) - _TYPED + 1, _TYPED)
    ]
    return statistics.fmean(shares) if shares else None


_Halves = list[tuple[list[bytes], list[bytes]]]


def _repetition(halves: _Halves) -> float | None:
    total = sum(len(a) + len(b) for a, b in halves)
    return 1 - sum(len({*a, *b}) for a, b in halves) / total if total else None


def _overlap(halves: _Halves) -> float | None:
    """Return the words that two halves share over those in either, mean over windows that have words in both."""
    shares = [len({*a} & {*b}) / len({*a, *b}) for a, b in halves if a and b]
    return statistics.fmean(shares) if shares else None


def _parted(halves: _Halves) -> _Halves:
    """Return first halves with the second halves of other windows, drawn at random and the same every time."""
    draw = random.Random("far").random
    places = [(draw(), place) for place in range(len(halves))]
    others = [place for _, place in sorted(places)]
    # Each goes to the next of a random ring, so that none meets its own.
    partner = dict(zip(others, [*others[1:], *others[:1]], strict=True))
    return [(a, halves[partner[place]][1]) for place, (a, _) in enumerate(halves)] if len(halves) > 1 else []


def _document_bytes(corpus: Prepared, split: Split) -> list[int]:
    """Return the bytes of each document of a split, its separator counted as one."""
    lengths = split.token_lengths(corpus.tokenizer.token_bytes())
    return [round(float(length)) for length in np.add.reduceat(lengths, split.documents.astype(np.int64))]
