from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from headtohead import Study, UserError, open_study, write_site
from headtohead.cli.main import main
from headtohead.study.judge.headline import headline
from tests.browser import DARK, MEASURE, WIDTHS, framed

pytest.importorskip("altair")

HOSTILE = "<script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def site(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of two studies in directories of the same name; the second has a paper's page beside its report."""
    root = tmp_path_factory.mktemp("site")
    arms = ["standard", {"arm": "sharing:tie=kv", "name": HOSTILE}]
    settings = {"name": HOSTILE, "tokens": 2560, "batch": 256, "seeds": 2}
    Study(arms, corpus=f"file:{story}", **settings).run(root / "a" / "Race 1", workers=1, quiet=True)
    shutil.copytree(root / "a" / "Race 1", root / "b" / "Race 1")
    (root / "b" / "Race 1" / "toy.html").write_text("the toy")
    write_site([root / "a" / "Race 1", root / "b" / "Race 1"], root / "site", title="One & all", quiet=True)
    return root / "site"


def test_the_index_has_a_card_with_the_result_and_facts_of_every_study(site: Path) -> None:
    page = (site / "index.html").read_text()
    result = open_study(site.parent / "a" / "Race 1")
    assert page.count(f'<p class="headline">{headline(result.verdicts)}</p>') == 2
    for fact in ("story.txt", "nano", "2.56k", "2 paired", "equal tokens"):
        assert page.count(f"<dd>{fact}</dd>") == 2
    assert len(re.findall(r"<dt>date</dt><dd>\d{4}-\d\d-\d\d</dd>", page)) == 2
    assert "One &amp; all" in page
    assert HOSTILE not in page
    assert page.count("&lt;script&gt;document.title=&#39;owned&#39;&lt;/script&gt;</a>") == 2


def test_every_link_leads_to_a_copied_report(site: Path) -> None:
    links = re.findall(r'href="([^"]+)"', (site / "index.html").read_text())
    assert links == ["race-1/report.html", "race-1-2/report.html"]
    for link, folder in zip(links, "ab", strict=True):
        assert (site / link).read_bytes() == (site.parent / folder / "Race 1" / "report.html").read_bytes()
    assert (site / "race-1-2" / "toy.html").read_text() == "the toy"
    assert not (site / "race-1" / "toy.html").exists()


def test_the_index_requests_nothing(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert "default-src 'none'" in page
    assert not re.findall(r"<(?:link|img|iframe|base)\b| src=|https?:", page)


def test_in_a_real_browser_the_index_fits_every_width(site: Path, tmp_path: Path) -> None:
    measured, console = framed(tmp_path, (site / "index.html").read_text(), MEASURE, WIDTHS, DARK)
    assert console == []
    assert sorted(found["width"] for found in measured) == sorted(WIDTHS)
    for found in measured:
        assert (found["page"], found["cut"], found["overlapping"]) == (found["width"], [], [])
        assert found["paper"] == "rgb(20, 23, 28)"


def test_the_command_prints_where_the_page_is(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["site", str(site.parent / "a" / "Race 1"), "--out", str(tmp_path / "new")])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"site: {tmp_path / 'new' / 'index.html'}\n"
    assert "1 study." in (tmp_path / "new" / "index.html").read_text()


def test_a_place_that_cannot_be_written_is_named(site: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        write_site([site.parent / "a" / "Race 1"], tmp_path / "file", quiet=True)
