from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from headtohead.data.shards import Split, prepare, tokens_of
from headtohead.evaluation import loss
from headtohead.evaluation.cost import arm_cost
from headtohead.evaluation.loss import MAX_BLOCKS, score_split
from headtohead.evaluation.references import reference_lines
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=16)


def model() -> Decoder:
    return Decoder(TINY.with_settings(init_std=0.3), parse_layout("standard").layers(2), seed=1)


def text_split(text: bytes, starts: list[int]) -> Split:
    return Split(np.frombuffer(text, dtype=np.uint8), np.array(starts, dtype=np.uint64), len(text))


def test_the_score_is_the_mean_over_every_token_predicted_in_its_window() -> None:
    decoder, text = model(), b"a text of fifty-odd characters, cut into windows. ok"
    score = score_split(decoder, text_split(text, [0]), np.ones(256, dtype=np.int64))
    tokens, total = list(text), 0.0
    for start in range(0, len(tokens) - 1, 16):
        window = tokens[start : start + 17]
        logits = decoder.logits(torch.tensor([window[:-1]]))[0].double()
        total -= float(torch.log_softmax(logits, -1).detach()[range(len(window) - 1), window[1:]].sum())
    assert score.tokens == score.bytes == len(text) - 1
    assert score.nats == pytest.approx(total / (len(text) - 1), rel=1e-5)
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2), rel=1e-12)
    assert score.perplexity == pytest.approx(math.exp(score.nats), rel=1e-12)


def test_the_score_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, split = model(), text_split(bytes(range(32, 126)) * 9, [0])
    scores = []
    for batch in (1, 3, 50):
        monkeypatch.setattr(loss, "windows_per_pass", lambda device, context, batch=batch: batch)
        scores.append(score_split(decoder, split, np.ones(256, dtype=np.int64)).nats)
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("documents", [1, 5, 20, 900])
def test_blocks_contain_every_token_once_and_follow_documents(documents: int) -> None:
    text = bytes(np.random.default_rng(0).integers(32, 120, 4000, dtype=np.uint8))
    starts = sorted({0, *np.linspace(0, 4000, documents, endpoint=False).astype(int).tolist()})
    score = score_split(model(), text_split(text, starts), np.ones(256, dtype=np.int64))
    assert sum(size for _, size in score.blocks) == score.bytes
    assert sum(nats for nats, _ in score.blocks) == pytest.approx(score.nats * score.tokens, rel=1e-9)
    assert len(score.blocks) <= MAX_BLOCKS
    if documents == 20:
        assert len(score.blocks) == 20
    if documents < 8:
        assert len(score.blocks) == 64, "few documents: cut into equal parts"


def test_bits_per_byte_count_bytes_not_tokens(story: Path) -> None:
    corpus = prepare(f"file:{story}", "bpe:300")
    size = dataclasses.replace(TINY, vocabulary=300)
    decoder = Decoder(size, parse_layout("standard").layers(2), seed=1)
    score = score_split(decoder, corpus.splits["test"], corpus.tokenizer.token_bytes())
    first = int(corpus.tokenizer.token_bytes()[corpus.splits["test"].tokens[0]])
    assert score.bytes == corpus.splits["test"].bytes - first
    assert score.bits_per_byte == pytest.approx(score.nats * score.tokens / math.log(2) / score.bytes)


def test_reference_lines_are_ordered_and_cached(story: Path) -> None:
    corpus = prepare(f"file:{story}")
    lines = reference_lines(corpus)
    assert lines["uniform"] == 8.0
    assert lines["uniform"] > lines["unigram"] > lines["bigram"] > 0
    assert 0 < lines["xz"] < 8
    other = dict.fromkeys(lines, 3.0)
    (corpus.folder / "references.json").write_text(json.dumps({"version": 1, "bits_per_byte": other}))
    assert reference_lines(corpus) == other, "read back, not computed again"
    (corpus.folder / "references.json").unlink()


def test_the_bigram_line_matches_the_formula(story: Path) -> None:
    corpus = prepare(f"file:{story}")
    train, test = (np.asarray(corpus.splits[split].tokens).astype(int) for split in ("train", "test"))
    unigram = {token: (np.sum(train == token) + 1) / (len(train) + 256) for token in set(test.tolist())}
    pairs: dict[tuple[int, int], int] = {}
    for a, b in itertools.pairwise(train):
        pairs[a, b] = pairs.get((a, b), 0) + 1
    bits = 0.0
    for a, b in itertools.pairwise(test):
        seen = sum(count for (first, _), count in pairs.items() if first == a)
        kinds = max(1, sum(first == a for first, _ in pairs))
        bits -= math.log2((pairs.get((a, b), 0) + kinds * unigram[b]) / (seen + kinds))
    assert reference_lines(corpus)["bigram"] == pytest.approx(bits / (len(test) - 1), rel=1e-9)


def test_another_corpus_is_encoded_with_the_models_tokenizer(story: Path, tmp_path: Path) -> None:
    corpus = prepare(f"file:{story}", "bpe:300")
    other = tmp_path / "other.txt"
    other.write_text("kings and dogs and cats in the house of tales\n" * 200)
    split = tokens_of(f"file:{other}", "test", corpus.tokenizer)
    assert corpus.tokenizer.token_bytes()[split.tokens].sum() == split.bytes


def test_cost_matches_the_formulas() -> None:
    size = SIZES["60m"]
    facts = arm_cost(size, parse_layout("standard").layers(8), 512)
    d, f, layers, keys = 512, 2048, 8, 513 / 2
    assert facts["parameters"] == 59_294_720
    assert (
        facts["flops_per_token"]["causal"] == layers * (8 * d * d + 4 * d * keys + 6 * d * f) + 2 * d * 50_257
    )
    assert facts["flops_per_token"]["causal"] / 1e6 == pytest.approx(122.8, abs=0.05), (
        "as published for coupled dynamics"
    )
    assert facts["cache_bytes_per_token"] == 2 * layers * 2 * d
    assert arm_cost(size, parse_layout("sharing:tie=kv").layers(8))["cache_bytes_per_token"] == layers * 2 * d
