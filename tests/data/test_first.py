"""The first bytes of a corpus: how much is taken, where it is cut, and what stays whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headtohead.common.errors import UserError
from headtohead.data.available import named_sets
from headtohead.data.corpora import check_known, find_corpus, stable_name
from headtohead.data.text import silent


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of 200 documents of about 100 bytes."""
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{index:03} " + "word " * 20}) + "\n" for index in range(200))
    )
    return path


def size(name: str, split: str = "train") -> int:
    return sum(len(text) for _, text in find_corpus(name).read(silent).splits[split])


def test_only_the_train_split_is_cut(lines: Path) -> None:
    whole, first = f"file:{lines}", f"first:5k(file:{lines})"
    assert 4900 < size(first) <= 5000 < size(whole)
    assert {split: size(first, split) for split in ("valid", "test")} == {
        split: size(whole, split) for split in ("valid", "test")
    }
    train = find_corpus(first).read(silent).splits["train"]
    assert [name for name, _ in train] == [
        name for name, _ in find_corpus(whole).read(silent).splits["train"][: len(train)]
    ]
    assert train[-1][1][:].endswith(b" ")


def test_held_out_splits_are_cut_on_request(lines: Path) -> None:
    name = f"first:5k/500(file:{lines})"
    assert 4900 < size(name) <= 5000
    assert all(400 < size(name, split) <= 500 < size(f"file:{lines}", split) for split in ("valid", "test"))


@pytest.mark.parametrize(("held", "bytes_"), [("9M", "9,000,000"), ("4k", "4,000")])
def test_held_out_splits_that_are_too_small_are_named(lines: Path, held: str, bytes_: str) -> None:
    with pytest.raises(UserError, match=rf"a\.jsonl has [\d,]+ bytes in valid, fewer than {bytes_}"):
        find_corpus(f"first:5k/{held}(file:{lines})").read(silent)


def test_the_train_split_may_be_short_by_less_than_a_cut(lines: Path) -> None:
    whole = size(f"file:{lines}")
    assert size(f"first:{whole + 4000}(file:{lines})") == whole
    with pytest.raises(UserError, match="bytes to train on, fewer than"):
        find_corpus(f"first:{whole + 5000}(file:{lines})").read(silent)


def test_another_amount_is_another_corpus(lines: Path) -> None:
    prints = {
        find_corpus(f"{cut}file:{lines}{end}").fingerprint()
        for cut, end in (("", ""), ("first:5k(", ")"), ("first:6k(", ")"), ("first:5k/500(", ")"))
    }
    assert len(prints) == 4


def test_a_corpus_that_is_too_small_is_named(lines: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl has [\d,]+ bytes to train on, fewer than 9,000,000"):
        find_corpus(f"first:9M(file:{lines})").read(silent)


def test_names_are_made_stable_and_need_the_data_of_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert stable_name("first:9000k(file:a.txt)") == f"first:9M(file:{tmp_path}/a.txt)"
    assert stable_name("first:9000k/1000k(file:a.txt)") == f"first:9M/1M(file:{tmp_path}/a.txt)"
    assert named_sets("coherence:0/256(first:3M(pubmed),first:3M(openwebtext))") == ["pubmed", "openwebtext"]


def test_counts_are_written_as_everywhere() -> None:
    assert stable_name("first:1m(stdlib)") == stable_name("first:1,000k(stdlib)") == "first:1M(stdlib)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("first:1x(stdlib)", "expected a count such as 120000, 120k or 65M, got '1x'"),
        ("first:9M", "is not of the form first:BYTES"),
        ("first:0(stdlib)", "takes counts above 0"),
        ("first:9M/0(stdlib)", "takes counts above 0"),
        ("first:9M/(stdlib)", "is not of the form first:BYTES"),
        ("first:9M(coherence:0(stdlib))", "takes a plain corpus"),
        ("first:9M(stdlip)", "unknown corpus 'stdlip'; did you mean 'stdlib'"),
    ],
)
def test_invalid_names_are_rejected(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_known(name)
