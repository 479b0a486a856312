from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from headtohead.common.errors import UserError
from headtohead.data import text
from headtohead.data.shards import cache_dir, prepare
from tests import processes


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


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_large_file_is_read_in_parts_with_the_same_tokens(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    path = tmp_path / "s.txt"
    path.write_bytes(story.read_bytes() * 4)
    whole = prepare(f"file:{path}", tokenizer, cache=tmp_path / "a")
    monkeypatch.setattr(text, "_IN_MEMORY", 0)
    monkeypatch.setattr(text, "_CHUNK", 1000)
    parts = prepare(f"file:{path}", tokenizer, cache=tmp_path / "b")
    assert (parts.folder / "meta.json").read_bytes() == (whole.folder / "meta.json").read_bytes()


def test_a_large_file_without_text_or_that_becomes_shorter_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_IN_MEMORY", 0)
    path = tmp_path / "s.txt"
    for content, message in (
        (b" \n" * 2000, "contains no text"),
        (b"x\0" * 2000, "looks like a binary file"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            prepare(f"file:{path}", cache=tmp_path)
    path.write_bytes(b"abcdefgh\n" * 100)
    large = text.large_text(path)
    assert large is not None
    path.write_bytes(b"abcdefgh\n" * 10)
    with pytest.raises(UserError, match="became shorter"):
        large[200:300]


@pytest.mark.parametrize("name", ["s.txt.gz", "s.txt.xz", "s.jsonl", "folder"])
def test_text_that_is_too_large_for_memory_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(text, "MAX_TEXT", 2**16)
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        for number in range(3):
            (path / f"{number}.txt").write_bytes(b"some text\n" * 3000)
    elif name == "s.jsonl":
        path.write_bytes(b'{"text": "some text of a document"}\n' * 3000)
    else:
        path.write_bytes(
            {".gz": gzip.compress, ".xz": lzma.compress}[path.suffix](bytes(b"some text\n" * 10**5))
        )
    with pytest.raises(
        UserError, match=r"more than 65,536 bytes of text; give it as one plain \.txt or \.jsonl file"
    ):
        prepare(f"file:{path}", cache=tmp_path / "cache")


def test_pipes_and_devices_of_the_user_are_rejected(tmp_path: Path, story: Path) -> None:
    child = processes.start(processes.read_irregular_user_files, tmp_path, story)
    assert processes.ended(child) == 0


def test_a_corpus_and_a_tokenizer_may_be_links(tmp_path: Path, story: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(prepare(f"file:{story}", "bpe:300").folder / "tokenizer.json")
    (tmp_path / "s.txt").symlink_to(story)
    found = prepare(f"file:{tmp_path / 's.txt'}", f"file:{tmp_path / 'tokenizer.json'}")
    assert found.tokenizer.vocabulary == 300


@pytest.mark.slow
@pytest.mark.parametrize(("tokenizer", "size", "memory"), [("bytes", 300, 100), ("bpe:300", 120, 900)])
@pytest.mark.parametrize("line_end", [b"\n", b""])
def test_a_large_file_is_prepared_in_constant_memory(
    tmp_path: Path, tokenizer: str, size: int, memory: int, line_end: bytes
) -> None:
    varied = b"".join(b"%d " % (number * number) for number in range(300)) + line_end
    with open(tmp_path / "big.txt", "wb") as stream:
        for number in range(size * 10**6 // (1000 * len(varied)) + 1):
            stream.write(b"%d " % number + varied * 1000)
    child = processes.start(
        *(processes.prepare_in_little_memory, tmp_path / "big.txt", tokenizer, tmp_path / "cache"),
        memory * 10**6,
    )
    assert processes.ended(child) == 0


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
