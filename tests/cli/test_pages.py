"""docs/mechanisms/ says what the mechanisms' own files say, and says it of every mechanism."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from headtohead.cli.main import main
from headtohead.cli.pages import mechanism_pages
from headtohead.mechanisms.base import Mechanism
from headtohead.mechanisms.describe import describe
from headtohead.mechanisms.find import builtin_mechanisms
from headtohead.model.layout import parse_layout

FOLDER = Path(__file__).parent.parent.parent / "docs" / "mechanisms"
NAMES = list(builtin_mechanisms())
pages = cache(mechanism_pages)


@pytest.mark.parametrize("name", ["README", *NAMES])
def test_the_committed_page_is_the_generated_one(name: str) -> None:
    committed = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert committed == pages()[f"{name}.md"], "run: h2h list --pages docs/mechanisms"


def test_no_page_is_left_of_a_mechanism_that_is_gone() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(pages())


@pytest.mark.parametrize("name", NAMES)
def test_every_mechanism_says_what_a_page_needs(name: str) -> None:
    told = describe(builtin_mechanisms()[name])
    for section in ("summary", "idea", "equation", "claims", "watch"):
        assert getattr(told, section).strip(), section
    assert told.equation.startswith("    ")
    for arm in told.arms:
        assert name in {term.kind.name for layer in parse_layout(arm).pattern for term in layer.terms}


def test_list_and_pages_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["list", "--json"])
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)["mechanisms"]}
    with pytest.raises(SystemExit):
        main(["list", "--pages", str(tmp_path / "new")])
    for name, row in listed.items():
        page = (tmp_path / "new" / f"{name}.md").read_text(encoding="utf-8")
        assert row["summary"] in page
        assert row["claims"] in page
        for option in row["options"]:
            assert f"| `{option['name']}` |" in page


def test_a_file_without_sections_is_described_by_what_it_has() -> None:
    class Bare(Mechanism):
        """Does little."""

        name = "bare"

    told = describe(Bare)
    assert (told.summary, told.claims, told.arms) == ("Does little.", "", ())
