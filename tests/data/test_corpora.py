from __future__ import annotations

import gzip
import json
import lzma
import sys
import tracemalloc
from array import array
from pathlib import Path

import numpy as np
import pytest

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json, digest, digest_file
from headtohead.data import text, wiki
from headtohead.data.corpora import (
    SPLITS,
    by_hash,
    check_known,
    corpus_names,
    find_corpus,
    in_order,
    stable_name,
    wikitext_articles,
)
from headtohead.data.get import recorded
from headtohead.data.lines import StoredLines, text_lengths
from headtohead.data.shards import prepare, split_note


def quiet(message: str, share: float) -> None:
    pass


def test_stdlib_is_the_running_pythons_source_without_tests() -> None:
    corpus = find_corpus("stdlib")
    assert corpus.label == "stdlib@" + ".".join(map(str, sys.version_info[:3]))
    documents = corpus.read(quiet)
    names = {split: [name for name, _ in documents.splits[split]] for split in SPLITS}
    everything = [name for split in SPLITS for name in names[split]]
    assert len(everything) == len(set(everything)) > 300
    assert not any(part in ("test", "tests", "idle_test") for name in everything for part in name.split("/"))
    for split in ("valid", "test"):
        size = sum(len(text) for _, text in documents.splits[split])
        assert 110_000 < size < 160_000
        assert len(names[split]) >= 8, "split by file"
    assert documents.splits == find_corpus("stdlib").read(quiet).splits, "the order is deterministic"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


LONG = "".join(f"line {i} of a text that is long enough to be cut in three\n" for i in range(400))


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
def test_a_text_file_is_cut_in_order_at_line_ends(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"a.txt{packing}"
    opener = {"": open, ".gz": gzip.open, ".xz": lzma.open}[packing]
    with opener(path, "wb") as stream:  # type: ignore[operator]
        stream.write(LONG.encode())
    splits = find_corpus(f"file:{path}").read(quiet).splits
    joined = b"".join(splits[split][0][1] for split in SPLITS)
    assert joined == LONG.encode()
    assert all(splits[split][0][1].endswith(b"\n") for split in SPLITS)
    assert 0.04 < len(splits["test"][0][1]) / len(joined) < 0.06


def test_json_lines_and_directories_are_split_by_document(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"text": f"document {i} says something about {i * i}"}) for i in range(300))
    write(tmp_path / "d" / "a.jsonl", rows)
    write(tmp_path / "d" / "deep" / "b.md", "a page of its own")
    write(tmp_path / "d" / "picture.png", "not text")
    splits = find_corpus(f"file:{tmp_path / 'd'}").read(quiet).splits
    texts = [text for split in SPLITS for _, text in splits[split]]
    assert len(texts) == 301
    assert len(set(texts)) == 301
    assert all(splits[split] for split in SPLITS)


def test_equal_documents_share_a_split() -> None:
    splits = by_hash([(str(i), b"the same text again") for i in range(50)])
    assert sorted(len(rows) for rows in splits.values()) == [0, 0, 50]


def test_in_order_loses_nothing_without_line_ends() -> None:
    parts = in_order("x", b"a" * 1000)
    assert [len(parts[split][0][1]) for split in SPLITS] == [900, 50, 50]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "contains no text"),
        (b"   \n\n ", "contains no text"),
        (b"abc\0def" * 100, "binary file"),
    ],
)
def test_errors_name_a_bad_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(f"file:{tmp_path / 'bad.txt'}")


def test_errors_name_a_bad_path_or_row(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or directory"):
        find_corpus(f"file:{tmp_path / 'nothing'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no text files"):
        prepare(f"file:{tmp_path / 'empty'}")
    write(tmp_path / "x.jsonl", '{"title": "no text here"}\n')
    with pytest.raises(UserError, match=r"no text field \(fields: title\)"):
        prepare(f"file:{tmp_path / 'x.jsonl'}")
    write(tmp_path / "y.jsonl", '{"text": ')
    with pytest.raises(UserError, match="line 1: not JSON"):
        prepare(f"file:{tmp_path / 'y.jsonl'}")
    (tmp_path / "z.txt.xz").write_bytes(b"not xz at all")
    with pytest.raises(UserError, match="damaged file"):
        prepare(f"file:{tmp_path / 'z.txt.xz'}")


def test_errors_name_unknown_and_missing_corpora(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown corpus 'enwik9'; did you mean 'enwik8'"):
        find_corpus("enwik9")
    with pytest.raises(
        UserError, match=r"^corpus 'enwik8' not found; download it with: h2h data get enwik8$"
    ):
        find_corpus("enwik8")
    with pytest.raises(UserError, match=rf"h2h data get enwik8 --data-dir {tmp_path}$"):
        find_corpus("enwik8", tmp_path)
    assert {"stdlib", "file:PATH", "enwik8", "wiki-prose", "wikitext-2", "wikitext-103"} <= set(
        corpus_names()
    )


def test_what_an_earlier_version_stored_from_the_hub_is_still_read(tmp_path: Path) -> None:
    for split in SPLITS:
        row = json.dumps({"text": f"{split} row with words in it"})
        write(tmp_path / "cache/hub/wikitext-2" / f"{split}.jsonl", row)
    corpus = find_corpus("wikitext-2", tmp_path, tmp_path / "cache")
    assert corpus.label == "wikitext-2 (hub)"
    assert corpus.rule == "hub1"
    assert len(corpus.read(quiet).splits["valid"]) == 1


def test_a_path_needs_no_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "my.txt", LONG)
    write(tmp_path / "notes", LONG)
    write(tmp_path / "enwik8", "a file with the name of a corpus")
    expected = find_corpus(f"file:{tmp_path / 'my.txt'}").fingerprint()
    for name in ("my.txt", "./my.txt", str(tmp_path / "my.txt"), "file:my.txt"):
        assert find_corpus(name).fingerprint() == expected
        assert stable_name(name) == f"file:{tmp_path / 'my.txt'}"
        check_known(name)
    assert find_corpus("notes").label == "notes"
    assert find_corpus(".").name == "file:."
    with pytest.raises(UserError, match="h2h data get enwik8"):
        find_corpus("enwik8")
    with pytest.raises(UserError, match=r"no such file or directory: other\.jsonl"):
        find_corpus("other.jsonl")
    with pytest.raises(UserError, match="unknown corpus 'other'"):
        find_corpus("other")


def test_large_json_lines_are_read_when_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"text": f"document {i} says something about {i * i} ü"}) for i in range(300)]
    rows[3:3] = ["", json.dumps({"text": " "})]
    path = write(tmp_path / "d.jsonl", "\n".join(rows))
    small = find_corpus(str(path)).read(quiet).splits
    monkeypatch.setattr(text, "_IN_MEMORY", 0)
    monkeypatch.setattr(text, "MAX_TEXT", 1000)  # the limit of texts that are held in memory
    large = find_corpus(str(path)).read(quiet).splits
    assert all(isinstance(large[split], StoredLines) for split in SPLITS)
    assert {split: list(large[split]) for split in SPLITS} == small
    assert large["train"][5] == small["train"][5]
    assert large["train"][-3:] == small["train"][-3:]
    assert text_lengths(large["train"]) == array("Q", text_lengths(small["train"]))
    shards = prepare(str(path), cache=tmp_path / "a")
    monkeypatch.undo()
    assert prepare(str(path), cache=tmp_path / "b").content == shards.content
    for split in SPLITS:
        assert (tmp_path / "a/corpora").is_dir()
        files = [next(tmp_path.glob(f"{one}/corpora/*/{split}.bin")).read_bytes() for one in "ab"]
        assert files[0] == files[1]


def test_a_named_corpus_of_any_size_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_IN_MEMORY", 0)
    monkeypatch.setattr(text, "MAX_TEXT", 1000)
    for split in SPLITS:
        rows = (json.dumps({"text": f"{split} document {i} of many, with more text"}) for i in range(100))
        write(tmp_path / f"webtext/openwebtext.{split}.jsonl", "\n".join(rows))
    rows = (json.dumps({"text": f"document {i} of many, with more text"}) for i in range(400))
    write(tmp_path / "webtext/c4.jsonl", "\n".join(rows))
    web = prepare("openwebtext", data_dir=tmp_path)
    assert [len(part.documents) for part in web.splits.values()] == [100, 100, 100]
    c4 = prepare("c4", data_dir=tmp_path)
    assert sum(len(part.documents) for part in c4.splits.values()) == 400
    assert (web.label, split_note(web)) == ("openwebtext", "")


def test_preparing_a_large_file_does_not_hold_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_IN_MEMORY", 0)
    size = 2**18
    rows = (json.dumps({"text": f"{number} " + "words " * (size // 6)}) for number in range(80))
    path = write(tmp_path / "large.jsonl", "\n".join(rows))
    tracemalloc.start()
    corpus = prepare(str(path), cache=tmp_path / "cache")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(part.bytes for part in corpus.splits.values()) > 75 * size
    assert peak < 20 * size, "a fourth of the text"


def test_errors_name_a_bad_line_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_IN_MEMORY", 0)
    path = write(tmp_path / "x.jsonl", '{"text": "a"}\n{"title": "b"}\n')
    with pytest.raises(UserError, match=r"document 2: no text field \(fields: title\)"):
        prepare(str(path))
    write(path, '{"text": "a"}\n{"text": ')
    with pytest.raises(UserError, match="line 2: not JSON"):
        prepare(str(path))


ROWS = "\n".join(json.dumps({"text": f"text {i}"}) for i in range(200))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.txt": LONG}, "d: 1 document, cut in order: 90% train, 5% valid, 5% test"),
        (
            {"a.txt": LONG, "b.txt": LONG},
            "d: 2 documents, joined, cut in order: 90% train, 5% valid, 5% test",
        ),
        (
            {"a.jsonl": ROWS},
            "d: 200 documents, assigned by a hash of their text: 178 train, 11 valid, 11 test",
        ),
    ],
    ids=("file", "files", "rows"),
)
def test_the_way_documents_are_split_is_stated(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for name, content in files.items():
        write(tmp_path / "d" / name, content)
    assert split_note(prepare(str(tmp_path / "d"))) == expected


def test_the_same_text_has_the_same_fingerprint_packed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, packed in (("a", True), ("b", False)):
        for split in SPLITS:
            content = f"text of {split}\n".encode()
            path = tmp_path / folder / f"pubmed/{split}.jsonl{'.xz' * packed}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(lzma.compress(content) if packed else content)
    known = {
        digest_file(tmp_path / f"b/pubmed/{split}.jsonl"): (
            f"{split}.jsonl.xz",
            digest_file(tmp_path / f"a/pubmed/{split}.jsonl.xz"),
        )
        for split in SPLITS
    }
    prints = lambda: [find_corpus("pubmed", tmp_path / one).fingerprint() for one in "ab"]  # noqa: E731
    first, second = prints()
    assert first != second
    monkeypatch.setattr(recorded, "_PACKED", known)
    assert prints() == [first, first]
    user = find_corpus(f"file:{tmp_path / 'b'}")
    expected = [[path.name, digest_file(path)] for path in user.files]
    assert user.fingerprint() == digest(canonical_json(["file", "1", expected])), (
        "as before for a user's files"
    )


ARTICLE = b" = Du Fu = \n \n A poet . \n where x = 3 = y \n = = Life = = \n \n born . \n \n = Nero = \n \n An emperor . \n"


def test_wikitext_articles_are_found_and_nothing_is_lost() -> None:
    articles = wikitext_articles(b" \n" + ARTICLE)
    assert [title for title, _ in articles] == ["Du Fu", "Nero"]
    assert b"".join(text for _, text in articles) == b" \n" + ARTICLE


MARKUP = """{{Infobox|a={{nested|b}}}}'''Abac''' is a [[plant|green plant]] of [[Asia]].<ref>someone</ref> <!-- note -->
[[Image:leaf.jpg|thumb|a [[leaf]] of it]]
== Use ==
* rope &amp; paper [http://x.org see here]
{| class="t"
| cell
|}
[[Category:Plants]]
[[fr:Abaca]]
== External links ==
* http://gone.org
"""


def test_prose_keeps_words_and_drops_markup() -> None:
    assert wiki.clean(MARKUP) == "Abac is a green plant of Asia.\nUse\nrope & paper see here\n"


def test_prose_counts_skipped_pages(tmp_path: Path) -> None:
    body = "A long enough sentence about the given subject. " * 12

    def page(title: str, text: str) -> str:
        return f"<page><title>{title}</title><text>{text}</text></page>"

    dump = (
        page("Kept", body)
        + page("Nero", body)
        + page("Talk:Kept", body)
        + page("Old", "#REDIRECT [[Kept]]")
        + page("Stub", "short")
    )
    articles, counts = wiki.prose(dump.encode(), {wiki.plain_title(" Nero ")}, quiet)
    assert [title for title, _ in articles] == ["Kept"]
    assert counts == {
        "articles": 1,
        "redirects": 1,
        "namespaces": 1,
        "in WikiText valid or test": 1,
        "too short": 1,
    }


def test_titles_compare_without_wikitexts_spacing() -> None:
    assert wiki.plain_title("M @-@ 82 ( Michigan highway )") == wiki.plain_title("M-82 (Michigan highway)")


NAMED = ["wikitext-2", "wikitext-103-head", "pubmed", "openwebtext", "c4", "tinyshakespeare", "code"]


@pytest.mark.parametrize("name", NAMED)
def test_shared_corpora_are_read_completely(shared_data: Path, name: str) -> None:
    corpus = prepare(name, data_dir=shared_data)
    assert all(len(corpus.splits[split].tokens) > 20_000 for split in SPLITS)
    assert all(int(np.max(corpus.splits[split].tokens)) < 256 for split in SPLITS)


def test_wikitext_103_without_its_training_file_is_missing(shared_data: Path) -> None:
    with pytest.raises(UserError, match="h2h data get wikitext-103 "):
        find_corpus("wikitext-103", shared_data)
