from __future__ import annotations

import json
import lzma
import re
from hashlib import sha256
from pathlib import Path

import pytest

from headtohead.api import Study
from headtohead.common.errors import MissingFile, UserError
from headtohead.common.files import digest_file
from headtohead.data.available import (
    check_available,
    downloadable,
    is_present,
    layout,
    named_sets,
    set_files,
    set_sources,
)
from headtohead.data.corpora import corpus_names
from headtohead.data.get.fetch import fetch
from headtohead.data.get.recorded import RECORDED, identity, same_as_recorded
from headtohead.data.get.sources import SOURCES, Remote, find_source
from headtohead.data.locate import data_folder
from headtohead.data.tasks.registry import task_names, zeroshot_names
from headtohead.data.text import silent
from headtohead.study.claims.paper import find_paper, read_paper
from headtohead.study.config.spec import read_study
from headtohead.study.plan.planner import study_data
from tests.web_server import web_server

PAPERS = ("coupled", "sharing", "deconstructed", "faster_qk", "kuramoto")
BY_HAND = {"agreement-pairs", "marvin_linzen"}
DOCUMENT = Path(__file__).parents[3] / "docs" / "data.md"


def shipped_data() -> set[str]:
    """Return the corpora and tasks that shipped studies and papers name, at every scale."""
    found: set[str] = set()
    for path in find_paper("coupled").parent.glob("*.toml"):
        values = read_study(path)
        if "arms" in values:
            found |= set(study_data(Study(**values).spec))
    for name in PAPERS:
        paper = read_paper(find_paper(name))
        for scale in paper.scales:
            for settings in paper.studies(scale).values():
                found |= set(study_data(Study(**settings).spec))
    return found


def test_everything_that_a_shipped_study_names_can_be_downloaded() -> None:
    needed = {part for name in shipped_data() for part in named_sets(name)}
    assert {"enwik8", "wiki-prose", "openwebtext", "hatexplain", "agreement", "squad", "lambada"} <= needed
    assert needed <= set(downloadable())


def test_only_the_sets_without_a_plain_source_must_be_got_by_hand() -> None:
    named = [name for name in (*corpus_names(), *task_names(), *zeroshot_names()) if set_files(name)]
    assert set(named) - set(downloadable()) == BY_HAND


def test_sources_are_complete_and_do_not_overlap() -> None:
    files = [file for source in SOURCES for file in source.files]
    assert len(files) == len(set(files))
    for source in SOURCES:
        assert source.license
        assert source.compared
        assert 0 <= source.default_parts <= len(source.parts)
        names = [part.name for part in source.parts]
        assert len(names) == len(set(names))
        for part in source.parts:
            assert all(url.startswith(("https://", "http://")) for url in part.urls)
            assert re.fullmatch(r"[\w.-]+", part.name), "a file name, not a path"
            assert part.sha256 == "" or re.fullmatch("[0-9a-f]{64}", part.sha256)
    downloads = [part.name for source in SOURCES for part in source.parts]
    assert len(downloads) == len(set(downloads)), "they share a folder"


def test_addresses_on_the_hub_begin_with_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Remote(("hub://owner/name/folder/file.jsonl",))
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert part.urls == ["https://huggingface.co/datasets/owner/name/resolve/main/folder/file.jsonl"]
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror/")
    assert part.urls == ["http://mirror/datasets/owner/name/resolve/main/folder/file.jsonl"]


def test_a_source_is_found_by_any_spelling_of_its_file() -> None:
    assert find_source("enwik8/enwik8.xz") is find_source("enwik8/enwik8") is SOURCES[0]
    squad = find_source("squad/train-subset-v1.1.json.xz|squad/train-v1.1.json")
    assert squad is find_source("squad/dev-v1.1.json.xz")
    assert find_source("nowhere/file") is None
    assert [source.files[0] for source in set_sources("wiki-prose")] == [
        "enwik8/enwik8",
        "wikitext/wikitext103.train.txt",
    ]


def test_the_layout_in_the_documents_is_that_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in text.splitlines()]
    for name, files, address, license, compared in layout():
        assert (f"`{name}`", files, address, license, compared) in rows, name
    listed = {row[0].strip("`") for row in rows if len(row) == 5} - {"name", "---"}
    assert listed - {"---|---|---|---|---"} == {row[0] for row in layout()}


@pytest.mark.parametrize(
    "name", ["tinyshakespeare/input.txt.xz", "glue/RTE.dev.tsv.xz", "zeroshot/copa.jsonl.xz"]
)
def test_the_recorded_checksums_are_those_of_the_files(shared_data: Path, tmp_path: Path, name: str) -> None:
    packed = (shared_data / name).read_bytes()
    plain = lzma.decompress(packed)
    assert RECORDED[name] == (sha256(plain).hexdigest(), digest_file(shared_data / name))
    path = tmp_path / Path(name).stem
    path.write_bytes(plain)
    assert identity(path) == identity(shared_data / name) == (Path(name).name, RECORDED[name][1])
    assert same_as_recorded(name, RECORDED[name][0])
    assert same_as_recorded(name.removesuffix(".xz"), RECORDED[name][0])
    assert same_as_recorded(name, "0") is False
    assert same_as_recorded("other", "0") is None


@pytest.mark.parametrize(
    "name", ["tinyshakespeare", "gulordava", pytest.param("hatexplain", marks=pytest.mark.slow)]
)
def test_the_published_files_give_the_recorded_content(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The parts are taken from the recorded files, in the format of their publishers."""
    (source,) = set_sources(name)
    (file,) = source.files
    content = lzma.decompress((shared_data / f"{file}.xz").read_bytes())
    parts = {"hatexplain": _as_hatexplain, "gulordava": _as_columns}.get(name, lambda content: [content])
    with web_server() as site:
        monkeypatch.setattr(Remote, "urls", property(lambda part: [f"{site.url}/{part.name}"]))
        site.files = {f"/{part.name}": one for part, one in zip(source.parts, parts(content), strict=True)}
        (found,) = fetch(source, tmp_path, 0, silent)
    assert found.same
    assert found.path.read_bytes() == content


def _as_hatexplain(content: bytes) -> list[bytes]:
    posts, splits = {}, dict[str, list[str]]()
    for line in content.splitlines():
        row = json.loads(line)
        given = zip(row["labels"], row["targets"], strict=True)
        posts[row["post_id"]] = {
            "post_id": row["post_id"],
            "annotators": [{"label": label, "annotator_id": 1, "target": target} for label, target in given],
            "rationales": row["rationales"],
            "post_tokens": row["tokens"],
        }
        if row["split"] != "none":
            splits.setdefault(row["split"], []).append(row["post_id"])
    return [json.dumps(posts).encode(), json.dumps(splits).encode()]


def _as_columns(content: bytes) -> list[bytes]:
    rows = [line.rsplit(b"\t", 1) for line in content.splitlines()[1:]]
    return [b"\n".join(column) for column in zip(*rows, strict=True)]


@pytest.mark.slow
def test_all_recorded_checksums_are_those_of_the_files(shared_data: Path) -> None:
    for name, (_, packed) in RECORDED.items():
        assert digest_file(shared_data / name) == packed, name


def test_missing_sets_are_named_in_one_command(tmp_path: Path) -> None:
    where = f" --data-dir {tmp_path}"
    with pytest.raises(MissingFile) as raised:
        check_available(["stdlib", "recall:pairs=4", "enwik8"], tmp_path)
    assert str(raised.value) == f"corpus 'enwik8' not found; download it with: h2h data get enwik8{where}"
    with pytest.raises(MissingFile) as raised:
        check_available(["coherence:0/64(wiki-prose,pubmed)", "copa", "pubmed"], tmp_path)
    names = "wiki-prose pubmed copa"
    expected = f"{names.replace(' ', ', ')} not found; download them with: h2h data get {names}{where}"
    assert str(raised.value) == expected
    with pytest.raises(
        MissingFile, match=r"marvin_linzen\.tsv\.xz is missing, and h2h data get has no source"
    ):
        check_available(["enwik8", "marvin_linzen"], tmp_path)
    with pytest.raises(UserError, match=r"no such file or directory: .*gone\.txt"):
        check_available([str(tmp_path / "gone.txt")], tmp_path)
    check_available(["stdlib"], tmp_path)


def test_the_data_directory_has_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H2H_CACHE", str(tmp_path))
    assert data_folder() == tmp_path / "data"
    (tmp_path / "data/tinyshakespeare").mkdir(parents=True)
    assert not is_present("tinyshakespeare")
    (tmp_path / "data/tinyshakespeare/input.txt").write_text("To be")
    assert is_present("tinyshakespeare")
    monkeypatch.setenv("H2H_DATA", str(tmp_path / "other"))
    assert data_folder() == tmp_path / "other"
    assert data_folder(tmp_path / "given") == tmp_path / "given"
