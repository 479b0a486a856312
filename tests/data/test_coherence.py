"""The coherence dial: the same pieces at every setting, in the order that the setting defines."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from headtohead.common.errors import UserError
from headtohead.data.coherence import cut, domain_information, parse_dial
from headtohead.data.corpora import SPLITS, Documents, find_corpus, stable_name
from headtohead.data.shards import prepare

SETTINGS = (0, 0.25, 0.5, 1)


def read(name: str) -> Documents:
    return find_corpus(name).read(lambda message, share: None)


@pytest.fixture(scope="module")
def dials() -> dict[float, Documents]:
    return {setting: read(f"coherence:{setting}/64(stdlib)") for setting in SETTINGS}


def order(documents: Documents, split: str = "train") -> str:
    found = documents.notes["order"]
    assert isinstance(found, dict)
    return str(found[split])


@pytest.mark.parametrize("split", SPLITS)
def test_every_setting_has_the_same_pieces(dials: dict[float, Documents], split: str) -> None:
    first = Counter(dials[0].splits[split])
    assert all(Counter(documents.splits[split]) == first for documents in dials.values())
    assert dials[0].splits[split] != dials[1].splits[split]


def test_the_dial_is_the_fraction_of_joins_that_are_kept(dials: dict[float, Documents]) -> None:
    coherent = [name for name, _ in dials[1].splits["train"]]
    after = dict(pairwise(coherent))
    for setting, documents in dials.items():
        names = [name for name, _ in documents.splits["train"]]
        kept = sum(after.get(a) == b for a, b in pairwise(names)) / (len(names) - 1)
        assert kept == pytest.approx(setting, abs=0.001)


def test_neighbors_are_of_different_domains_when_mixed_and_of_one_when_coherent(
    dials: dict[float, Documents],
) -> None:
    mixed, coherent = order(dials[0]), order(dials[1])
    assert all(a != b for a, b in pairwise(mixed))
    assert sum(a != b for a, b in pairwise(coherent)) == len(set(coherent)) - 1 == 2


def test_domains_have_equal_bytes_in_every_split(dials: dict[float, Documents]) -> None:
    for split in SPLITS:
        sizes: Counter[str] = Counter()
        for letter, (_, text) in zip(order(dials[0.5], split), dials[0.5].splits[split], strict=True):
            sizes[letter] += len(text)
        assert max(sizes.values()) - min(sizes.values()) < 2 * 64
        assert min(sizes.values()) > 10_000


def test_splits_are_those_of_the_corpora_and_share_no_document(dials: dict[float, Documents]) -> None:
    whole = dials[0].whole
    assert whole is not None
    source = read("stdlib")
    for split in SPLITS:
        known = {text for _, text in source.splits[split]}
        assert {text for _, text in whole[split]} <= known
        joined = {name.rpartition("#")[0] for name, _ in dials[0].splits[split]}
        assert joined == {name for name, _ in whole[split]}


def test_reading_a_setting_is_deterministic(dials: dict[float, Documents]) -> None:
    assert read("coherence:0.5/64(stdlib)").splits == dials[0.5].splits


def test_pieces_are_whole_characters_and_lose_nothing() -> None:
    choose = random.Random(3)
    for size in (16, 40, 300):
        text = "".join(choose.choice("aé漢😀 \n") for _ in range(2000)).encode()
        pieces = cut(text, size)
        assert b"".join(pieces) == text
        assert all(piece.decode("utf-8") for piece in pieces)
        assert max(map(len, pieces)) <= 2 * size
    assert cut(b"short", 64) == [b"short"]
    assert cut(b"x" * 130, 64) == [b"x" * 65, b"x" * 65]


def lines(path: Path, words: list[str]) -> Path:
    """Write 120 distinct documents of those words."""
    choose = random.Random(path.name)
    rows = [" ".join(choose.choice(words) for _ in range(60)) for _ in range(120)]
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    return path


def test_corpora_are_domains_and_all_settings_share_a_tokenizer(tmp_path: Path) -> None:
    a = lines(tmp_path / "a.jsonl", ["elephant", "crocodile", "hippopotamus", "mouse"])
    b = lines(tmp_path / "b.jsonl", ["thunderstorm", "drizzle", "hurricane", "fog"])
    made = [prepare(f"coherence:{dial}/32(file:{a},file:{b})", "bpe:300") for dial in (0, 1)]
    assert made[0].tokenizer.digest == made[1].tokenizer.digest
    assert made[0].content != made[1].content
    assert made[0].label == "coherence:0/32(a.jsonl,b.jsonl)"
    assert made[0].splits["train"].bytes == made[1].splits["train"].bytes
    separators = [
        int((np.asarray(corpus.splits["train"].tokens) == corpus.tokenizer.separator).sum())
        for corpus in made
    ]
    assert separators[0] == separators[1] == len(made[0].splits["train"].documents)


def test_domain_information_of_a_window() -> None:
    assert domain_information("AAAABBBB", [10] * 8, 40) == (1.0, 1.0)
    assert domain_information("ABABABAB", [10] * 8, 40) == (0.0, 1.0)
    near, whole = domain_information("AABBAABB", [10] * 8, 30)
    assert 0 < near < whole == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("coherence:2(stdlib)", "between 0 .* and 1"),
        ("coherence:(stdlib)", "is not of the form"),
        ("coherence:0.5/4(stdlib)", "16 to"),
        ("coherence:0.5(stdlib,stdlib)", "exactly once"),
        ("coherence:0.5(coherence:0(stdlib),code)", "may not be a coherence corpus"),
        ("coherence:0.5(stdlip)", "unknown corpus 'stdlip'; did you mean 'stdlib'"),
    ],
)
def test_bad_names_are_rejected(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_corpus(name)


def test_one_domain_is_rejected(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ["cat", "dog"])
    with pytest.raises(UserError, match="one domain cannot be mixed"):
        find_corpus(f"coherence:0(file:{path})")


def test_a_stable_name_has_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert stable_name("file:a.txt") == f"file:{tmp_path}/a.txt"
    name = stable_name("coherence:0.50(file:a.txt,stdlib)")
    assert name == f"coherence:0.5/64(file:{tmp_path}/a.txt,stdlib)"
    assert parse_dial(name).sources == (f"file:{tmp_path}/a.txt", "stdlib")
