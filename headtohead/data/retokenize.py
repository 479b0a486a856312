"""Encode a split of any corpus with a given tokenizer, to score a model on a corpus other than its own."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from headtohead.common.errors import unknown
from headtohead.data.corpora import SPLITS, Progress, _silent
from headtohead.data.shards import Spelling, Split, prepare
from headtohead.data.tokenizers import Bytes, Tokenizer


def tokens_of(
    corpus: str,
    split: str,
    tokenizer: Tokenizer,
    *,
    data_dir: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress = _silent,
) -> Split:
    """Return one split of a corpus encoded with `tokenizer`, documents packed with separators.

    The text is read from the cached corpus in bytes, because reading a large corpus again takes a minute.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    text = prepare(corpus, "bytes", data_dir=data_dir, cache=cache, progress=progress).splits[split]
    if isinstance(tokenizer, Bytes):
        return text
    edges = [*map(int, text.documents), len(text.tokens)]
    starts, parts, count, spelling = [], [], 0, Spelling(tokenizer)
    documents = tokenizer.encode_all(text.tokens[a : b - 1].tobytes() for a, b in pairwise(edges))
    for tokens, (first, last) in zip(documents, pairwise(edges), strict=True):
        starts.append(count)
        spelling.add(tokens)
        spelling.end(last - 1 - first)
        parts += [tokens.astype(np.int64), np.array([tokenizer.separator])]
        count += len(tokens) + 1
    return Split(np.concatenate(parts), np.array(starts, dtype=np.uint64), text.bytes, spelling.scales())
