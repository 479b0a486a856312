"""A split of any corpus under a given tokenizer: how a model trained on one text is scored on another."""

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
    """Return one split of a corpus in the tokens of `tokenizer`, documents packed with separators.

    The text is that of the corpus prepared in bytes, made once: reading a large one again takes a minute.
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
        spelling.add(tokens, last - 1 - first)
        parts += [tokens.astype(np.int64), np.array([tokenizer.separator])]
        count += len(tokens) + 1
    return Split(np.concatenate(parts), np.array(starts, dtype=np.uint64), text.bytes, spelling.scales())
