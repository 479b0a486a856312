"""Bits per byte divides by the bytes of the text, for any tokenizer."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library
from tokenizers import models, normalizers, pre_tokenizers, trainers

from headtohead.common.errors import UserError
from headtohead.data.shards import Prepared, Split, prepare, tokens_of
from headtohead.data.tasks.base import Material, Text, encoded
from headtohead.evaluation.loss import score_split
from headtohead.evaluation.references import reference_lines
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

SEPARATOR = "<|end|>"


def foreign(kind: str, text: str) -> str:
    """Return a lossy tokenizer in the library's file format."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    given = {"vocab_size": 400, "special_tokens": ["[UNK]", SEPARATOR], "show_progress": False}
    if kind == "wordpiece":  # lowercases, drops accents and spaces, writes ## before the rest of a word
        made = library.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.train_from_iterator([text], trainers.WordPieceTrainer(**given))
    elif kind == "unigram":  # a character of three bytes for each space
        made = library.Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.train_from_iterator([text], trainers.UnigramTrainer(**given, unk_token="[UNK]"))
    else:  # a space before each piece
        made = library.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.train_from_iterator([text], trainers.BpeTrainer(**given, initial_alphabet=alphabet))
    return str(made.to_str())


def corpus(tmp_path: Path, kind: str, story: Path) -> tuple[Prepared, Path]:
    """Return a tokenized corpus of a kind, and its file."""
    path, words = tmp_path / "text.txt", story.read_text()
    if kind == "not utf-8":
        content = words.replace("cat", "caf\xe9").replace("dog", "\xffd\xf6g").encode("latin-1")
    elif kind == "holds separators":
        content = words.replace(".\n", f".{SEPARATOR}\n").encode()
    else:
        content = words.replace("cat", "Käse").encode()
    path.write_bytes(content)
    if kind in ("not utf-8", "holds separators"):
        return prepare(f"file:{path}", "bpe:300"), path
    (tmp_path / "tokenizer.json").write_text(foreign(kind, content.decode()))
    return prepare(f"file:{path}", f"file:{tmp_path / 'tokenizer.json'}"), path


KINDS = ["not utf-8", "holds separators", "wordpiece", "unigram", "prefix space"]


def text_bytes(path: Path, split: str) -> int:
    return prepare(f"file:{path}", "bytes").splits[split].bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_divides_by_the_bytes_of_the_text(tmp_path: Path, story: Path, kind: str) -> None:
    found, path = corpus(tmp_path, kind, story)
    table = found.tokenizer.token_bytes()
    for split, part in found.splits.items():
        lengths = part.token_lengths(table)
        assert part.bytes == text_bytes(path, split)
        assert float(lengths.sum()) == pytest.approx(part.bytes, abs=1e-6)
    size = dataclasses.replace(
        SIZES["nano"], width=16, ffn=24, context=32, vocabulary=found.tokenizer.vocabulary
    )
    decoder = Decoder(size, parse_layout("standard").layers(2), seed=1)
    test = found.splits["test"]
    score = score_split(decoder, test, table)
    assert score.bytes == round(test.bytes - float(test.token_lengths(table)[0]))
    assert score.bits_per_byte == pytest.approx(
        score.nats * score.tokens / math.log(2) / score.bytes, rel=1e-3
    )
    assert sum(block[1] for block in score.blocks) == pytest.approx(score.bytes, abs=len(score.blocks))
    lines = reference_lines(found)
    uniform = math.log2(found.tokenizer.vocabulary) * score.tokens / score.bytes
    assert lines["uniform"] == pytest.approx(uniform, rel=1e-3)
    if kind in ("not utf-8", "holds separators"):
        assert test.scales is None, "trained tokenizers are lossless"
        spelled = found.tokenizer.decode_bytes(np.asarray(test.tokens).tolist())
        assert path.read_bytes().endswith(spelled)
    else:
        assert test.scales is not None
        assert int(table[np.asarray(test.tokens)].sum()) != test.bytes, "the tokenizer is lossy"


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_on_another_corpus_divides_by_its_bytes(tmp_path: Path, story: Path, kind: str) -> None:
    """`h2h evaluate` and the probe `corpora` encode another corpus with a run's tokenizer."""
    found, path = corpus(tmp_path, kind, story)
    other = tokens_of(f"file:{path}", "valid", found.tokenizer)
    lengths = other.token_lengths(found.tokenizer.token_bytes())
    assert float(lengths.sum()) == pytest.approx(text_bytes(path, "valid"), abs=1e-6)
    assert np.array_equal(other.tokens, found.splits["valid"].tokens)


def test_every_document_has_its_own_byte_scale_also_in_a_part_of_the_split(tmp_path: Path) -> None:
    rows = [{"text": f"{'Ä' * (number % 7)} words of document {number}. " * 5} for number in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "t.json").write_text(foreign("wordpiece", " ".join(row["text"] for row in rows)))
    split = prepare(f"file:{tmp_path / 'rows.jsonl'}", f"file:{tmp_path / 't.json'}").splits["train"]
    exact = prepare(f"file:{tmp_path / 'rows.jsonl'}", "bytes").splits["train"]
    table = prepare(f"file:{tmp_path / 'rows.jsonl'}", f"file:{tmp_path / 't.json'}").tokenizer.token_bytes()

    def sums(part: Split, lengths: np.ndarray) -> np.ndarray:
        return np.add.reduceat(lengths, part.documents.astype(np.int64))

    whole = sums(split, split.token_lengths(table))
    assert whole == pytest.approx(sums(exact, np.ones(len(exact.tokens))))
    cut = int(split.documents[5]) + 3  # as the probe `skip` takes a part
    part = dataclasses.replace(split, tokens=split.tokens[:cut], documents=split.documents[:6])
    assert sums(part, part.token_lengths(table))[:5] == pytest.approx(whole[:5])


def test_damaged_scales_are_made_again(tmp_path: Path, story: Path) -> None:
    found, path = corpus(tmp_path, "wordpiece", story)
    name = f"file:{tmp_path / 'tokenizer.json'}"
    for content in (b"", (found.folder / "test.scales").read_bytes()[:-1] + b"\0"):
        (found.folder / "test.scales").write_bytes(content)
        again = prepare(f"file:{path}", name)
        assert np.array_equal(again.splits["test"].scales, found.splits["test"].scales)


def test_a_lossy_tokenizer_cannot_mark_relevant_tokens(tmp_path: Path, story: Path) -> None:
    found, _ = corpus(tmp_path, "wordpiece", story)
    rows = [Text("The cat sat on a mat", relevant=(((4, 7),),), label=0)]
    material = Material(dict.fromkeys(("train", "valid", "test"), rows))
    with pytest.raises(UserError, match="is lossy"):
        encoded(material, found.tokenizer, 128, lambda *_: None)


def test_a_lone_surrogate_in_json_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a \\ud800 b"}')
    with pytest.raises(UserError, match=r"document 1: .* is a lone surrogate"):
        prepare(f"file:{tmp_path / 'rows.jsonl'}")
