"""Encoding a corpus with the tokenizer of another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headtohead.common.errors import UserError
from headtohead.data.corpora import find_corpus
from headtohead.data.shards import prepare, tokens_of
from headtohead.data.tokenizers import Bytes


def test_the_text_of_a_split_is_encoded_document_by_document(story: Path) -> None:
    tokenizer = prepare(f"file:{story}", "bpe:300").tokenizer
    split = tokens_of("stdlib", "test", tokenizer)
    texts = [text for _, text in find_corpus("stdlib").read(lambda message, share: None).splits["test"]]
    parts = [[*tokenizer.encode(text), tokenizer.separator] for text in texts]
    assert split.tokens.tolist() == [token for part in parts for token in part]
    assert split.documents.tolist() == [0, *np.cumsum([len(part) for part in parts])[:-1]]
    assert split.bytes == sum(len(text) + 1 for text in texts)


def test_in_bytes_the_result_equals_the_prepared_split() -> None:
    split = tokens_of("stdlib", "valid", Bytes())
    assert split.tokens.tolist() == prepare("stdlib").splits["valid"].tokens.tolist()


def test_an_unknown_split_is_rejected() -> None:
    with pytest.raises(UserError, match="unknown split 'tets'"):
        tokens_of("stdlib", "tets", Bytes())
