from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from headtohead.common.errors import UserError
from headtohead.data.get import download as module
from headtohead.data.get.download import DownloadFailed, download
from headtohead.data.text import silent
from tests.web_server import WebServer, web_server

CONTENT = b"0123456789" * 10_000
SUM = sha256(CONTENT).hexdigest()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    with web_server() as found:
        found.files["/a/file"] = CONTENT
        yield found


def get(site: WebServer, path: Path, sha: str = "", name: str = "/a/file") -> None:
    download([site.url + name], path, sha, silent)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_a_file_is_downloaded_with_progress(site: WebServer, tmp_path: Path) -> None:
    shown: list[tuple[str, float]] = []
    download([f"{site.url}/a/file"], tmp_path / "x", SUM, lambda *given: shown.append(given))
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert names(tmp_path) == {"x"}
    assert shown[-1][1] == 1.0
    assert "x" in shown[-1][0]
    get(site, tmp_path / "x", SUM)
    assert len(site.requests) == 1, "what is there is not downloaded again"


@pytest.mark.parametrize("tags", [True, False])
def test_a_partial_download_is_resumed(site: WebServer, tmp_path: Path, tags: bool) -> None:
    site.cut_after, site.cuts, site.tags = 30_000, module._ATTEMPTS, tags
    with pytest.raises(DownloadFailed, match=r"broke after 90,000 of 100,000 bytes|connection broke"):
        get(site, tmp_path / "x", SUM)
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "x.part").stat().st_size == 90_000
    site.cut_after = 0
    get(site, tmp_path / "x", SUM)
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert [asked for _, asked in site.requests] == ["", "bytes=30000-", "bytes=60000-", "bytes=90000-"]
    assert names(tmp_path) == {"x"}


def test_a_broken_connection_is_tried_again(site: WebServer, tmp_path: Path) -> None:
    site.cut_after, site.cuts = 70_000, 1
    get(site, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert site.requests[1][1] == "bytes=70000-"


def test_a_file_that_changed_on_the_server_is_downloaded_from_the_start(
    site: WebServer, tmp_path: Path
) -> None:
    site.cut_after, site.cuts = 10_000, module._ATTEMPTS
    with pytest.raises(DownloadFailed):
        get(site, tmp_path / "x")
    site.files["/a/file"] = b"new content" * 5000
    site.cut_after = 0
    get(site, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"new content" * 5000


def test_without_a_version_and_a_checksum_nothing_is_resumed(site: WebServer, tmp_path: Path) -> None:
    site.tags, site.cut_after, site.cuts = False, 10_000, module._ATTEMPTS
    with pytest.raises(DownloadFailed):
        get(site, tmp_path / "x")
    site.cut_after = 0
    get(site, tmp_path / "x")
    assert {asked for _, asked in site.requests} == {""}
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_everything_again(site: WebServer, tmp_path: Path) -> None:
    site.ranges, site.cut_after, site.cuts = False, 10_000, 1
    get(site, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_part_that_is_longer_than_the_file_is_deleted(site: WebServer, tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(CONTENT + b"more")
    get(site, tmp_path / "x", SUM)
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_part_of_another_file_is_replaced(site: WebServer, tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(b"?" * 50_000)
    get(site, tmp_path / "x", SUM)
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert [asked for _, asked in site.requests] == ["bytes=50000-", ""]


def test_a_corrupt_download_is_deleted(site: WebServer, tmp_path: Path) -> None:
    site.files["/a/file"] = CONTENT[:-1] + b"?"
    with pytest.raises(
        DownloadFailed, match=r"checksum .* instead of .*; the download was deleted"
    ) as raised:
        get(site, tmp_path / "x", SUM)
    assert "\n" not in str(raised.value)
    assert not names(tmp_path) & {"x", "x.part"}


def test_the_next_address_is_used_if_one_fails(site: WebServer, tmp_path: Path) -> None:
    site.files["/b/file"] = b"something else"
    urls = [f"{site.url}{path}" for path in ("/gone", "/b/file", "/a/file")]
    download(urls, tmp_path / "x", SUM, silent)
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_errors_name_the_address(site: WebServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"cannot download http://127.*/gone: HTTP 404"):
        get(site, tmp_path / "x", name="/gone")
    with pytest.raises(DownloadFailed, match=r"cannot download http://127\.0\.0\.1:1/a: "):
        download(["http://127.0.0.1:1/a"], tmp_path / "x", "", silent)
    assert not (tmp_path / "x").exists()


def test_an_interruption_keeps_the_part(site: WebServer, tmp_path: Path) -> None:
    def interrupt(message: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download([f"{site.url}/a/file"], tmp_path / "x", SUM, interrupt)
    assert not (tmp_path / "x").exists()
    (tmp_path / "x.part").write_bytes(CONTENT[:40_000])
    get(site, tmp_path / "x", SUM)
    assert site.requests[-1][1] == "bytes=40000-"
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_file_got_by_hand_is_used_if_it_is_the_right_one(site: WebServer, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"something else")
    with pytest.raises(UserError, match=r"x has the checksum .* instead of .*; remove it"):
        get(site, tmp_path / "x", SUM)
    (tmp_path / "x").write_bytes(CONTENT)
    get(site, tmp_path / "x", SUM)
    assert site.requests == []


def test_two_downloads_into_one_folder_do_not_mix(site: WebServer, tmp_path: Path) -> None:
    with module._lock(tmp_path / "x"), pytest.raises(UserError, match="another download"):
        get(site, tmp_path / "x")
