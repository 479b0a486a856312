from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headtohead import Study, open_study

pytest.importorskip("altair")

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def folder(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study whose arm, study and corpus names are hostile."""
    place = tmp_path_factory.mktemp("report")
    text = place / "<b onclick=alert(1)>corpus.txt"
    text.write_text(story.read_text())
    arms = ["standard", {"arm": "sharing:tie=kv", "name": HOSTILE}, "sharing:tie=qkv"]
    Study(arms, name=HOSTILE, corpus=f"file:{text}", tokens=5120, batch=256, seeds=3, lr=5e-3).run(
        place / "out", workers=1, quiet=True
    )
    return place / "out"


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_is_one_file_that_asks_for_nothing(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    parser = Tags()
    parser.feed(page)
    assert not [
        attrs for _, attrs in parser.tags if "src" in attrs or (attrs.get("href") or "").startswith("http")
    ]
    assert not [tag for tag, _ in parser.tags if tag in ("link", "img", "iframe", "base")]
    assert "default-src 'none'" in page
    assert (folder / "report.html").stat().st_size < 5_000_000


def test_hostile_names_are_text(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    body = re.sub(r"<script type=\"(module|application/json)\".*?</script>", "", page, flags=re.DOTALL)
    assert "<script>" not in body
    assert 'onerror="document' not in body
    assert "&lt;script&gt;document.title" in body
    for definition in re.findall(
        r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL
    ):
        assert "<" not in definition
        json.loads(definition)


def test_the_page_holds_verdicts_curves_references_and_what_differs(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    definitions = [
        json.loads(text)
        for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL)
    ]
    assert len(definitions) == 3
    everything = json.dumps(definitions)
    for name in ("uniform", "unigram", "bigram", "xz"):
        assert f'"{name} ' in everything
    for words in (
        "What differs between the arms",
        "Before you believe it",
        "Where it was run",
        "feed-forward width",
    ):
        assert words in page
    assert "parameters are not matched (shape as_is)" in page


def test_a_report_is_rebuilt_from_the_directory_alone(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before = (copy / "verdicts.json").read_text()
    for name in ("report.html", "verdicts.json"):
        (copy / name).unlink()
    result = open_study(copy)
    result.write()
    assert (copy / "verdicts.json").read_text() == before
    assert (copy / "report.html").is_file()


def test_a_study_without_results_has_a_page_too(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in copy.glob("runs/*/result.json"):
        path.unlink()
    result = open_study(copy)
    result.write()
    assert {row.verdict for row in result.verdicts} == {"undecided"}


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on this machine (Debian: apt install chromium)")


def test_in_a_real_browser_charts_are_drawn_and_hostile_text_is_inert(folder: Path, tmp_path: Path) -> None:
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [
        chromium(),
        *flags,
        "--virtual-time-budget=10000",
        "--enable-logging=stderr",
        "--dump-dom",
        f"file://{folder / 'report.html'}",
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    dom = found.stdout
    assert len(re.findall(r'<svg[^>]*class="marks"', dom)) == 3, found.stderr[-2000:]
    assert "<title>owned" not in dom
    console = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
