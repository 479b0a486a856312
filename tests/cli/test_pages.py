"""docs/mechanisms/ says what the mechanisms' own files say, and says it of every mechanism."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from headtohead.cli.main import main
from headtohead.cli.shared.pages import mechanism_pages
from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.describe import describe
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Settings
from headtohead.study.config.spec import build_study

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
    receive = describe(builtin_mechanisms()[name])
    for section in ("summary", "idea", "equation", "claims", "watch"):
        assert getattr(receive, section).strip(), section
    assert receive.equation.startswith("    ")
    for arm in receive.arms:
        assert name in {term.kind.name for layer in parse_layout(arm).pattern for term in layer.terms}


def quoted(name: str) -> list[str]:
    """Return what a mechanism's docstring has in backticks."""
    words = sys.modules[builtin_mechanisms()[name].__module__].__doc__ or ""
    return sorted(set(re.findall(r"`([^`]+)`", words.replace("\n", " "))))


def accept(name: str, text: str) -> str:
    """Raise where an arm, option or study setting in backticks is refused; return which of them it is, or nothing."""
    if setting := re.fullmatch(r"(\w+) = (.+)", text):
        key, value = setting[1], setting[2]
        with suppress(tomllib.TOMLDecodeError):  # a bare word, as in `shape = params`
            value = tomllib.loads(f"x = {value}")["x"]
        of_model = key in {field.name for field in fields(Settings)}
        build_study({"arms": [name], **({"model": {key: value}} if of_model else {key: value})})
        return "setting"
    if choice := re.fullmatch(r"(\w+)=(\w+)", text):
        option = {field.name: field for field in fields(builtin_mechanisms()[name].Options)}[choice[1]]
        allowed = option.metadata["choices"]
        assert not allowed or choice[2] in allowed, f"{text}: allowed are {allowed}"
        return "option"
    if text in NAMES or re.match(r"\(?\w+[:+(] ?\w|\(\w+ \w+\)", text):
        parse_layout(text.replace("H/2", "2"))  # H, the model's heads
        return "arm"
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_what_a_docstring_quotes_is_accepted(name: str) -> None:
    for text in quoted(name):
        accept(name, text)


def test_quoted_arms_options_and_settings_are_recognised() -> None:
    assert accept("kuramoto_gated", 'circuit_lr = {ffn = "0.5x"}') == "setting"
    assert accept("kuramoto", "tied = false") == "setting"
    assert accept("kuramoto", "cache=i16") == "option"
    for arm in ("differential+coupled:dynamics=euler", "even(no_attention)", "(gated_linear standard)*3"):
        assert accept("coupled", arm) == "arm"
        assert arm in {text for name in NAMES for text in quoted(name)}
    for wrong in ('rates = "ffn=0.5"', "shape = parameters"):
        with pytest.raises(UserError):
            accept("kuramoto_gated", wrong)
    with pytest.raises(UserError):
        accept("standard", "even(no_such)")
    with pytest.raises(KeyError):
        accept("standard", "cache=i16")


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

    receive = describe(Bare)
    assert (receive.summary, receive.claims, receive.arms) == ("Does little.", "", ())
