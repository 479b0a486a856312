from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headtohead.common.errors import UserError
from headtohead.data.shards import cache_dir, prepare


def test_documents_are_packed_with_separators(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"text number {i} " * (i + 1))
    corpus = prepare(f"file:{folder}")
    for split in corpus.splits.values():
        tokens = np.asarray(split.tokens)
        starts = split.documents.astype(int)
        assert tokens[-1] == 0
        assert list(np.flatnonzero(tokens == 0)[:-1] + 1) == list(starts[1:])
        assert split.bytes == len(tokens)
    total = sum(len(split.documents) for split in corpus.splits.values())
    assert total == 60


def test_prepared_data_is_cached_and_follows_its_source(story: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.txt"
    path.write_text(story.read_text())
    first = prepare(f"file:{path}")
    assert prepare(f"file:{path}").folder == first.folder
    path.write_text(story.read_text().replace("cat", "cow"))
    second = prepare(f"file:{path}")
    assert second.folder != first.folder
    assert second.content != first.content


def test_prepared_data_is_written_only_to_the_cache(story: Path) -> None:
    before = sorted(story.parent.iterdir())
    assert prepare(f"file:{story}").folder.is_relative_to(cache_dir())
    assert sorted(story.parent.iterdir()) == before


@pytest.mark.parametrize("name", ["train.bin", "test.bin", "valid.documents", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["flipped", "missing", "cut"])
def test_a_missing_or_changed_shard_is_reported_and_prepared_again(
    story: Path, tmp_path: Path, name: str, damage: str
) -> None:
    folder = prepare(f"file:{story}", "bpe:300", cache=tmp_path).folder
    path = folder / name
    good = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(good[:1] + bytes([good[1] ^ 1]) + good[2:])
    elif damage == "cut":
        path.write_bytes(good[:-1] if name != "meta.json" else good[:-3])
    else:
        path.unlink()
    messages: list[str] = []
    again = prepare(
        f"file:{story}", "bpe:300", cache=tmp_path, progress=lambda message, share: messages.append(message)
    )
    assert path.read_bytes() == good
    assert again.folder == folder
    if (name, damage) != ("meta.json", "missing"):
        assert any(str(folder) in message and "preparing it again" in message for message in messages)


def test_a_document_in_two_splits_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headtohead.data import corpora

    shared = b"a document long enough to be distinguished from a common phrase, and longer"
    splits = {split: [("same", shared)] for split in corpora.SPLITS}
    monkeypatch.setattr(corpora, "_read_path", lambda path: corpora.Documents(splits))
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UserError, match="is in both train and valid"):
        prepare(f"file:{tmp_path / 'x.txt'}", cache=tmp_path / "cache")


def test_an_interrupted_preparation_leaves_nothing_behind(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headtohead.data import shards

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "write_json", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare(f"file:{story}", cache=tmp_path)
    assert list((tmp_path / "corpora").iterdir()) == []


@pytest.mark.slow
def test_enwik8_to_bytes_and_to_a_bpe(shared_data: Path, tmp_path: Path) -> None:
    corpus = prepare("enwik8", data_dir=shared_data, cache=tmp_path)
    assert [len(corpus.splits[split].tokens) - 1 for split in ("train", "valid", "test")] == [
        90_000_000,
        5_000_000,
        5_000_000,
    ]
    pairs = prepare("enwik8", "bpe:16384", data_dir=shared_data, cache=tmp_path)
    test = pairs.splits["test"]
    assert int(pairs.tokenizer.token_bytes()[np.asarray(test.tokens)].sum()) == 5_000_001


@pytest.mark.slow
def test_wiki_prose_has_almost_no_markup(shared_data: Path, tmp_path: Path) -> None:
    corpus = prepare("wiki-prose", data_dir=shared_data, cache=tmp_path)
    text = bytes(np.asarray(corpus.splits["train"].tokens))
    assert len(text) > 60_000_000
    for mark in (b"{{", b"[[", b"&lt;", b"'''"):
        assert text.count(mark) < 200, mark
    assert corpus.notes["articles"] > 8000


def test_a_full_disk_is_named_with_the_folder_of_the_shards(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left") as found:
        prepare(f"file:{story}", "bytes", cache=tmp_path)
    assert str(found.value.filename).startswith(str(tmp_path))
    assert ".tmp" not in str(found.value.filename)
    assert not list(tmp_path.rglob("*.tmp"))
