"""A split of any corpus under a given tokenizer: how a model trained on one text is scored on another."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headtohead.common.errors import UserError, unknown
from headtohead.data.corpora import SPLITS, Progress, _silent, find_corpus
from headtohead.data.shards import Split, cache_dir
from headtohead.data.tokenizers import Tokenizer


def tokens_of(
    corpus: str,
    split: str,
    tokenizer: Tokenizer,
    *,
    data_dir: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress = _silent,
) -> Split:
    """Return one split of a corpus in the tokens of `tokenizer`, documents packed with separators."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    found = find_corpus(corpus, data_dir, cache_dir(cache))
    texts = [text for _, text in found.read(progress).splits[split]]
    starts, parts, count = [], [], 0
    for tokens in tokenizer.encode_all(texts):
        starts.append(count)
        parts += [tokens.astype(np.int64), np.array([tokenizer.separator])]
        count += len(tokens) + 1
    if count < 3:
        raise UserError(f"corpus {found.label}: the {split} split is empty")
    return Split(np.concatenate(parts), np.array(starts, dtype=np.uint64), sum(map(len, texts)) + len(texts))
