from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headtohead.common.errors import UserError
from headtohead.data import tokenizers
from headtohead.data.shards import prepare
from headtohead.data.tokenizers import BytePairs, Bytes, make_tokenizer, parse_tokenizer

TEXT = Path(textwrap.__file__).read_bytes()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> BytePairs:
    tokenizer = make_tokenizer("bpe:300", "x", tmp_path_factory.mktemp("t"), lambda: [TEXT], lambda *_: None)
    assert isinstance(tokenizer, BytePairs)
    return tokenizer


def test_bytes_are_tokens() -> None:
    assert Bytes().encode("aé".encode()).tolist() == [97, 195, 169]
    assert Bytes().decode([97, 195, 169]) == "aé"
    assert Bytes().token_bytes().tolist() == [1] * 256


def test_a_bpe_has_the_requested_vocabulary_and_is_cached(tmp_path: Path) -> None:
    calls = []

    def train() -> list[bytes]:
        calls.append(1)
        return [TEXT]

    first = make_tokenizer("bpe:300", "corpus", tmp_path, train, lambda *_: None)
    again = make_tokenizer("bpe:300", "corpus", tmp_path, train, lambda *_: None)
    other = make_tokenizer("bpe:300", "another", tmp_path, train, lambda *_: None)
    assert first.vocabulary == 300
    assert first.digest == again.digest == other.digest
    assert len(calls) == 2, "cached by the corpus' hash"


@given(st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_every_text_round_trips(pairs: BytePairs, text: str) -> None:
    tokens = pairs.encode(text.encode("utf-8"))
    assert pairs.decode(tokens.tolist()) == text
    assert int(pairs.token_bytes()[tokens].sum()) == len(text.encode("utf-8")) if len(tokens) else True


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30), st.sampled_from([b"<|end|>", b"<|endoftext|>", b"\xed\xa0\x80", b"\n"])
        )
    )
)
@settings(max_examples=100, deadline=None)
def test_any_bytes_round_trip_and_are_counted(pairs: BytePairs, parts: list[bytes]) -> None:
    """Invalid UTF-8 and the spelling of a special token are plain text."""
    text = b"".join(parts)
    tokens = pairs.encode(text)
    assert pairs.decode_bytes(tokens.tolist()) == text
    assert int(pairs.token_bytes()[tokens].sum()) == len(text)
    assert pairs.separator not in tokens


def test_bytes_that_are_not_utf8_do_not_change_the_tokens_around_them(pairs: BytePairs) -> None:
    one, other = b"def wrap(text", b"return lines\n"
    both = pairs.encode(one + b"\xff\xfe" + other)
    assert np.array_equal(
        both, [*pairs.encode(one), *both[len(pairs.encode(one)) :][:2], *pairs.encode(other)]
    )
    assert Bytes().decode_bytes([*Bytes().encode(b"\xffa"), 0, 98]) == b"\xffab"


def test_documents_of_any_length_are_encoded_in_order(pairs: BytePairs) -> None:
    documents = [TEXT * 30, b"", b"short", TEXT * 5, b"x" * 70_000, b"end"]
    together = list(pairs.encode_all(documents))
    assert [pairs.decode(tokens.tolist()).encode() for tokens in together] == documents
    assert all(
        np.array_equal(tokens, pairs.encode(text)) for tokens, text in zip(together, documents, strict=True)
    )


@pytest.mark.parametrize("text", ["byts", "bpe", "bpe:12", "bpe:x", "file:", "bytes:3", ""])
def test_unknown_tokenizers_are_rejected(text: str) -> None:
    with pytest.raises(UserError):
        parse_tokenizer(text)


def test_too_little_text_for_a_vocabulary_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="yields only"):
        make_tokenizer("bpe:5000", "x", tmp_path, lambda: [b"abc " * 10], lambda *_: None)


def test_a_tokenizer_is_read_from_a_file(pairs: BytePairs, tmp_path: Path, story: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(pairs.content)
    corpus = prepare(f"file:{story}", f"file:{path}")
    assert corpus.tokenizer.vocabulary == 300
    path.write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        prepare(f"file:{story}", f"file:{path}")


def test_a_long_line_is_cut_for_training_without_changing_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = TEXT.replace(b"\n", b" ") + " it's  two   spaces\u2028and\t ünïcode 12 3.4 ".encode()
    parts = list(tokenizers._cut_at_spaces(line.decode(), 50))
    assert "".join(parts) == line.decode()
    assert len(parts) > len(line) // 200
    found = []
    for size in (50, 10**9):
        cut = tokenizers._cut_at_spaces
        with monkeypatch.context() as patch:
            patch.setattr(tokenizers, "_cut_at_spaces", lambda text, size=size, cut=cut: cut(text, size))
            made = make_tokenizer("bpe:400", "x", tmp_path / str(size), lambda: [line], lambda *_: None)
        found.append(made.digest)
    assert found[0] == found[1]
