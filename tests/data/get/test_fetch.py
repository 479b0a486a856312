from __future__ import annotations

import dataclasses
import gzip
import io
import json
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO

import pytest

from headtohead.common.errors import UserError
from headtohead.data.get import download as downloading
from headtohead.data.get import fetch as module
from headtohead.data.get import unpack
from headtohead.data.get.fetch import DOWNLOADS, fetch
from headtohead.data.get.sources import Remote, Source
from headtohead.data.text import SPLITS, silent
from tests.web_server import WebServer, web_server


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(downloading, "_PAUSE", 0.0)
    with web_server() as found:
        yield found


def zipped(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def tarred(mode: str, **members: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def source(site: WebServer, make: unpack.Unpack, files: tuple[str, ...], **contents: bytes) -> Source:
    site.files |= {f"/d/{name}": content for name, content in contents.items()}
    parts = tuple(Remote((f"{site.url}/d/{name}",)) for name in contents)
    return Source(files, parts, make, "some license")


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_only_the_named_member_of_an_archive_is_read(site: WebServer, tmp_path: Path) -> None:
    archive = zipped(**{"in/a": b"first\nsecond\n", "../outside": b"x", "b": b"not asked for"})
    made = source(site, unpack.zipped({"set/a.txt": "in/a"}), ("set/a.txt",), archive=archive)
    (found,) = fetch(made, tmp_path, 0, silent)
    assert (found.path, found.size, found.same) == (tmp_path / "set/a.txt", 13, None)
    assert found.path.read_bytes() == b"first\nsecond\n"
    assert files(tmp_path) == {"set/a.txt"}, "the download is removed"
    assert not (tmp_path.parent / "outside").exists()


@pytest.mark.parametrize("damage", ["not a zip", "cut", "no member", "changed"])
def test_a_damaged_archive_is_deleted_and_nothing_is_written(
    site: WebServer, tmp_path: Path, damage: str
) -> None:
    archive = zipped(a=b"some text " * 1000)
    broken = {
        "not a zip": b"<html>sign in</html>",
        "cut": archive[:-30],
        "no member": zipped(b=b"x"),
        "changed": archive[:60] + bytes([archive[60] ^ 255]) + archive[61:],
    }[damage]
    made = source(site, unpack.zipped({"set/a": "a"}), ("set/a",), archive=broken)
    with pytest.raises(UserError, match=r"damaged download d-archive: .*; it was deleted") as raised:
        fetch(made, tmp_path, 0, silent)
    assert "\n" not in str(raised.value)
    assert files(tmp_path) == {f"{DOWNLOADS}/.lock"}
    site.files["/d/archive"] = archive
    fetch(made, tmp_path, 0, silent)
    assert files(tmp_path) == {"set/a"}


def test_content_other_than_the_recorded_one_is_an_error_where_it_must_be_exact(
    site: WebServer, tmp_path: Path
) -> None:
    made = source(site, unpack.zipped({"enwik8/enwik8": "e"}), ("enwik8/enwik8",), archive=zipped(e=b"other"))
    (found,) = fetch(made, tmp_path, 0, silent)
    assert found.same is False
    found.path.unlink()
    with pytest.raises(UserError, match=r"enwik8 has the checksum .* not the expected one; it was deleted"):
        fetch(dataclasses.replace(made, exact=True), tmp_path, 0, silent)
    assert not found.path.exists()


def test_an_archive_that_unpacks_to_too_much_is_rejected(
    site: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROGRESS_EVERY", 2**16)
    monkeypatch.setattr(module, "_MAX_EXPANSION", -(2**30))
    made = source(site, unpack.zipped({"a": "a"}), ("a",), archive=zipped(a=b"a" * 2**21))
    with pytest.raises(UserError, match="unpacks to more than"):
        fetch(made, tmp_path, 0, silent)
    assert not (tmp_path / "a").exists()


def test_without_a_network_the_place_for_the_file_is_named(tmp_path: Path) -> None:
    made = Source(("set/a",), (Remote(("http://127.0.0.1:1/d/a",)),), unpack.verbatim("set/a"), "free")
    place = tmp_path / DOWNLOADS / "d-a"
    with pytest.raises(UserError) as raised:
        fetch(made, tmp_path, 0, silent)
    assert f"download http://127.0.0.1:1/d/a by hand to {place}" in str(raised.value)
    assert "\n" not in str(raised.value)
    place.write_bytes(b"by hand")
    fetch(made, tmp_path, 0, silent)
    assert (tmp_path / "set/a").read_bytes() == b"by hand"


WEB = "webtext/openwebtext.{}.jsonl"


def rows(folder: Path, pattern: str) -> dict[str, list[str]]:
    return {
        split: [
            json.loads(line)["text"] for line in (folder / pattern.format(split)).read_text().splitlines()
        ]
        for split in SPLITS
    }


def test_documents_of_archives_in_archives_are_divided_by_hash(site: WebServer, tmp_path: Path) -> None:
    pages = {f"page{number}.txt": f" page {number} ".encode() for number in range(1600)}
    inner = tarred("w:xz", **pages, **{"notes.md": b"not a page", "blank.txt": b" \n"})
    outer = tarred("w", **{"openwebtext/1_data.xz": inner, "README": b"x"})
    made = source(site, unpack.text_archives(WEB), unpack.split_files(WEB), one=outer)
    fetch(made, tmp_path, 0, silent)
    found = rows(tmp_path, WEB)
    assert sorted(text for split in SPLITS for text in found[split]) == sorted(
        f"page {i}" for i in range(1600)
    )
    assert len(found["train"]) > 1500
    assert min(map(len, found.values())) > 0


def test_json_rows_may_be_packed_and_in_several_parts(site: WebServer, tmp_path: Path) -> None:
    def lines(first: int) -> bytes:
        found = [json.dumps({"title": f"t{i}", "content": f"c{i} ü"}) for i in range(first, first + 600)]
        return "\n".join(found).encode()

    made = source(
        site,
        unpack.json_rows("pubmed/{}.jsonl", "title", "content"),
        unpack.split_files("pubmed/{}.jsonl"),
        plain=lines(0),
        packed=gzip.compress(lines(600)),
        unused=b"[]",
    )
    fetch(dataclasses.replace(made, default_parts=1), tmp_path, 2, silent)
    found = rows(tmp_path, "pubmed/{}.jsonl")
    assert sum(map(len, found.values())) == 1200
    assert "t7\nc7 ü" in found["train"]
    assert [path for path, _ in site.requests] == ["/d/plain", "/d/packed"]


def test_documents_are_written_as_they_come(tmp_path: Path) -> None:
    """More text passes through than may be held: every piece is on disk, or in a small buffer, before the next one."""
    pattern, size = "big/{}.jsonl", 2**20
    seen: list[int] = []

    def many(downloads: Iterator[IO[bytes]]) -> Iterator[unpack.Piece]:
        next(downloads)
        for number in range(48):
            yield from unpack.stored(pattern, f"{number} " + "x" * size)
            seen.append(sum(path.stat().st_size for path in (tmp_path / "big").iterdir()))
        for split in SPLITS:
            yield pattern.format(split), b'{"text": "end"}\n'

    (tmp_path / DOWNLOADS).mkdir()
    (tmp_path / DOWNLOADS / "d-one").write_bytes(b"x")
    made = Source(unpack.split_files(pattern), (Remote(("http://127.0.0.1:1/d/one",)),), many, "free")
    tracemalloc.start()
    fetch(made, tmp_path, 0, silent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * size, "a fourth of the text"
    assert all(after - before >= size // 2 for before, after in pairwise(seen[1:]))
    assert sum((tmp_path / file).stat().st_size for file in made.files) > 48 * size


def test_hatexplain_posts_get_their_split(site: WebServer, tmp_path: Path) -> None:
    post = {
        "post_id": "1",
        "annotators": [{"label": "normal", "annotator_id": 3, "target": ["None"]}],
        "rationales": [[0, 1]],
        "post_tokens": ["a", "ü"],
    }
    made = source(
        site,
        unpack.hatexplain("h.jsonl"),
        ("h.jsonl",),
        posts=json.dumps({"1": post, "2": post}).encode(),
        divisions=json.dumps({"train": [], "val": ["1"]}).encode(),
    )
    fetch(made, tmp_path, 0, silent)
    first, second = map(json.loads, (tmp_path / "h.jsonl").read_text().splitlines())
    assert list(first) == ["post_id", "split", "labels", "targets", "tokens", "rationales"]
    assert (first["split"], second["split"]) == ("val", "none")
    assert (first["labels"], first["targets"], first["tokens"]) == (["normal"], [["None"]], ["a", "ü"])


def test_columns_are_joined_and_the_first_lines_are_a_file_of_their_own(
    site: WebServer, tmp_path: Path
) -> None:
    made = source(
        site, unpack.side_by_side("t.tsv", "a\tb\tc"), ("t.tsv",), gold=b"1\tx\n2\ty\n", text=b"one\ntwo\n"
    )
    fetch(made, tmp_path, 0, silent)
    assert (tmp_path / "t.tsv").read_text() == "a\tb\tc\n1\tx\tone\n2\ty\ttwo\n"
    head = unpack.first_lines(unpack.verbatim("w.txt"), "w.txt", "head.txt", 9)
    fetch(source(site, head, ("w.txt", "head.txt"), whole=b"one\ntwo\nthree\n"), tmp_path, 0, silent)
    assert (tmp_path / "head.txt").read_bytes() == b"one\ntwo\n"
