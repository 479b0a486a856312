from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from headtohead.cli.main import main
from headtohead.data.available import downloadable
from headtohead.data.get import download as downloading
from headtohead.data.get import sources
from headtohead.data.get.sources import SOURCES, Remote
from tests.web_server import WebServer, web_server

PLAYS = "".join(f"line {number} of a play\n" for number in range(2000)).encode()


def run(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == code


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WebServer]:
    """A server in place of every address: /NAME is the download of that name."""
    monkeypatch.setattr(downloading, "_PAUSE", 0.0)
    monkeypatch.setenv("H2H_DATA", str(tmp_path / "data"))
    with web_server() as found:
        local = [
            dataclasses.replace(
                source,
                parts=tuple(Remote((f"{found.url}/d/{part.name}",)) for part in source.parts),
                exact=False,
            )
            for source in SOURCES
        ]
        monkeypatch.setattr(sources, "SOURCES", tuple(local))
        yield found


def test_a_corpus_is_downloaded_and_then_used(
    site: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("data", "prepare", "tinyshakespeare", code=2)
    assert capsys.readouterr().err == (
        "h2h: corpus 'tinyshakespeare' not found; download it with: h2h data get tinyshakespeare\n"
    )
    site.files["/d/tinyshakespeare-input.txt"] = PLAYS
    run("data", "get", "tinyshakespeare")
    out = capsys.readouterr().out
    assert "license: public domain" in out
    assert f"{tmp_path / 'data/tinyshakespeare/input.txt'}: {len(PLAYS):,} bytes" in out
    assert "not as in the recorded results" in out
    run("data", "get", "tinyshakespeare")
    assert "already in" in capsys.readouterr().out
    assert len(site.requests) == 1
    run("data", "prepare", "tinyshakespeare")
    assert "tinyshakespeare" in capsys.readouterr().out
    run("data", "list")
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["tinyshakespeare"].rstrip().endswith(" present")
    assert lines["enwik8"].rstrip().endswith("missing: h2h data get enwik8")
    assert lines["marvin_linzen"].rstrip().endswith("missing: put it in by hand")
    run("data", "get")
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "present" in lines["tinyshakespeare"]
    assert "h2h data get squad " in lines["squad"]


def test_a_set_of_several_sources_gets_only_what_it_lacks(site: WebServer, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103/wiki.{split}.tokens", " = A = \n \n text \n")
    site.files["/d/wikitext.smerity.com-wikitext-103-v1.zip"] = stream.getvalue()
    (tmp_path / "data/enwik8").mkdir(parents=True)
    (tmp_path / "data/enwik8/enwik8.xz").write_bytes(b"there")
    run("data", "get", "wiki-prose", "coherence:0(wiki-prose,stdlib)", "stdlib")
    assert [path for path, _ in site.requests] == ["/d/wikitext.smerity.com-wikitext-103-v1.zip"]
    assert (tmp_path / "data/wikitext/wikitext103.valid.txt").is_file()


def test_all_is_everything_that_can_be_downloaded(
    site: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in SOURCES:
        for file in source.files:
            path = tmp_path / "data" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    run("data", "get", "--all")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == downloadable()
    assert all("already in" in line for line in lines)
    assert site.requests == []


def test_parts_of_a_large_corpus(site: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1166, 1165):
        rows = (json.dumps({"title": f"{number}-{i}", "content": "words"}) for i in range(800))
        site.files[f"/d/chunk-pubmed23n{number}.jsonl"] = "\n".join(rows).encode()
    run("data", "get", "pubmed", "--parts", "2")
    assert "2 of 1166 parts" in capsys.readouterr().out
    found = "".join(
        (tmp_path / f"data/pubmed/{split}.jsonl").read_text() for split in ("train", "valid", "test")
    )
    assert found.count("\n") == 1600
    for words, message in (
        (("pubmed", "--parts", "3"), "already in"),
        (("copa", "--parts", "3"), "always downloaded whole"),
        (("c4", "--parts", "0"), "1 to 1024 parts"),
        (("marvin_linzen",), "has no source for marvin_linzen; put its files into"),
        (("enwik9",), "unknown corpus or task 'enwik9'; did you mean 'enwik8'"),
    ):
        run("data", "get", *words, code=2)
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_a_failed_download_is_one_line_and_leaves_no_file(
    site: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("data", "get", "tinyshakespeare", code=2)
    err = capsys.readouterr().err
    place = tmp_path / "data/downloads/d-tinyshakespeare-input.txt"
    assert f"by hand to {place}" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "data/tinyshakespeare").exists()
    site.files["/d/tinyshakespeare-input.txt"] = PLAYS
    site.cut_after, site.cuts = 10_000, 3
    run("data", "get", "tinyshakespeare", code=2)
    assert place.with_name(f"{place.name}.part").stat().st_size == 30_000
    site.cuts = 0
    run("data", "get", "tinyshakespeare")
    assert site.requests[-1][1] == "bytes=30000-"
    assert (tmp_path / "data/tinyshakespeare/input.txt").read_bytes() == PLAYS


def test_an_interruption_keeps_what_arrived(
    site: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(response: IO[bytes], stream: IO[bytes], *_: object) -> int:
        stream.write(response.read(20_000))
        raise KeyboardInterrupt

    site.files["/d/tinyshakespeare-input.txt"] = PLAYS
    with monkeypatch.context() as patch:
        patch.setattr(downloading, "_receive", interrupted)
        run("data", "get", "tinyshakespeare", code=130)
    assert "what is downloaded is kept, and the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "data/tinyshakespeare").exists()
    run("data", "get", "tinyshakespeare")
    assert site.requests[-1][1] == "bytes=20000-"
    assert (tmp_path / "data/tinyshakespeare/input.txt").read_bytes() == PLAYS


def test_a_race_without_its_data_prints_the_command_and_nothing_else(
    site: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("race", "--arms", "standard", "diagonal", "--corpus", "stdlib", "enwik8", "--tokens", "2k", code=2)
    found = capsys.readouterr()
    assert found.err == "h2h: corpus 'enwik8' not found; download it with: h2h data get enwik8\n"
    assert found.out == ""
    run("reproduce", "faster_qk", "--scale", "small", code=2)
    found = capsys.readouterr()
    assert "download them with: h2h data get enwik8 hatexplain agreement " in found.err
    assert (found.err.count("\n"), found.out) == (1, "")
    assert not (tmp_path / "races").exists()


def test_preparing_a_path_says_how_it_was_split(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_bytes(story.read_bytes())
    run("data", "prepare", "my.txt")
    assert "my.txt: 1 document, cut in order: 90% train, 5% valid, 5% test" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "contains no text"),
        (b"ab\0cd" * 50, "looks like a binary file"),
        (None, "no such file or directory"),
    ],
)
def test_a_bad_path_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    run("race", "--arms", "standard", "diagonal", "--corpus", str(tmp_path / "bad.txt"), code=2)
    err = capsys.readouterr().err
    assert message in err
    assert "bad.txt" in err
    assert err.count("\n") == 1


SLOWLY = """
import sys
import time
from headtohead.cli.main import main
from headtohead.data.get import download, sources
from headtohead.data.get.sources import Remote

part = Remote((sys.argv[1],))
sources.SOURCES = tuple(
    sources.Source(one.files, (part,), one.unpack, one.license) if "tiny" in one.files[0] else one
    for one in sources.SOURCES
)
download._CHUNK = 1000
receive = download._receive

def slowly(response, stream, have, total, name, progress):
    def wait(*given):
        stream.flush()
        print("arrived", flush=True)
        time.sleep(30)
    return receive(response, stream, have, total, name, wait)

if len(sys.argv) > 2:
    download._receive = slowly
main(["data", "get", "tinyshakespeare"])
"""


@pytest.mark.slow
def test_ctrl_c_keeps_what_arrived(tmp_path: Path) -> None:
    environment = os.environ | {"H2H_DATA": str(tmp_path)}
    with web_server() as site:
        site.files["/d/input"] = PLAYS
        command = [sys.executable, "-c", SLOWLY, f"{site.url}/d/input"]
        process = subprocess.Popen(
            [*command, "wait"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        while "arrived" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "interrupted; what is downloaded is kept, and the same command continues" in err
        assert "Traceback" not in err
        assert not (tmp_path / "tinyshakespeare").exists()
        subprocess.run(command, env=environment, check=True, capture_output=True)
        assert site.requests[-1][1].startswith("bytes=")
        assert (tmp_path / "tinyshakespeare/input.txt").read_bytes() == PLAYS
