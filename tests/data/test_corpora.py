from __future__ import annotations

import gzip
import json
import lzma
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from headtohead.common.errors import UserError
from headtohead.data import hub, wiki
from headtohead.data.corpora import SPLITS, by_hash, corpus_names, find_corpus, in_order, wikitext_articles
from headtohead.data.shards import prepare


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
    with pytest.raises(UserError, match="no data directory is given"):
        find_corpus("enwik8")
    with pytest.raises(UserError, match=r"enwik8\.xz is missing"):
        find_corpus("enwik8", tmp_path)
    assert {"stdlib", "file:PATH", "enwik8", "wiki-prose", "wikitext-2", "wikitext-103"} <= set(
        corpus_names()
    )


def test_without_a_local_copy_the_hub_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"headtohead\[hub\]"):
        find_corpus("wikitext-2", tmp_path, tmp_path / "cache")
    requests = []

    def load_dataset(path: str, config: str, split: str, streaming: bool) -> list[dict[str, str]]:
        requests.append((path, config, split))
        return [{"text": f"{split} row {i} with words in it"} for i in range(5)] + [{"text": " "}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    corpus = find_corpus("wikitext-2", tmp_path, tmp_path / "cache")
    assert corpus.label == "wikitext-2 (hub)"
    assert [split for _, _, split in requests] == ["train", "validation", "test"]
    assert len(corpus.read(quiet).splits["valid"]) == 5
    find_corpus("wikitext-2", tmp_path, tmp_path / "cache")
    assert len(requests) == 3, "cached"


def test_a_hub_corpus_with_one_split_is_divided_by_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"page {i} of the web"} for i in range(2000)]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: rows))  # type: ignore[arg-type]
    files = hub.fetch("corpus", "openwebtext", tmp_path, "")
    counts = [len(file.read_text().splitlines()) for file in files.values()]
    assert sum(counts) == 2000
    assert counts[0] > 1900
    assert min(counts) > 0


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


def test_wikitext_103_without_its_training_file_suggests_wiki_prose(shared_data: Path) -> None:
    with pytest.raises(UserError, match="use wiki-prose instead"):
        find_corpus("wikitext-103", shared_data)
