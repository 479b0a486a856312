"""What the documents say is true: examples are the files, links lead somewhere, commands exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

import headtohead as h2h
from headtohead.cli.main import COMMANDS, GROUPS
from headtohead.data import corpora
from headtohead.data.tasks import registry as find
from headtohead.data.tasks import zeroshot
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.study.config.spec import build_study

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_example_in_contributing_is_the_example_file() -> None:
    block = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[0]
    file = (ROOT / "examples" / "prefix_mean.py").read_text()
    assert file.split('"""\n\n', 1)[1] == block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for first, second in re.findall(r"(?:^|`)h2h ([a-z]+)(?: ([a-z]+))?", page.read_text(), re.MULTILINE):
        name = f"{first} {second}" if first in GROUPS and second else first
        assert name in COMMANDS or name in GROUPS, name


def test_make_targets_named_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert next(filter(None, name)) in targets


def test_every_study_in_the_documents_is_one() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "studies.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        build_study({"arms": ["standard"], **tomllib.loads(block)})  # some show a part of one


def test_the_numbers_of_what_is_inside_are_those_of_the_package() -> None:
    text = (ROOT / "README.md").read_text()
    stated = {
        "mechanisms": (r"\| mechanisms \| (\d+), a", len(builtin_mechanisms())),
        "named corpora": (r"and (\d+) named sets \|", len(corpora._KINDS)),
        "tasks": (r"\| tasks \| \[(\d+)\]", len(find.KINDS) + len(find.SYNTHETIC)),
        "drawn tasks": (r"to train on, (\d+) of them drawn", len(find.SYNTHETIC)),
        "zero-shot sets": (r"and (\d+) known sets scored", len(zeroshot._KINDS)),
    }
    found = {name: re.findall(pattern, text) for name, (pattern, _) in stated.items()}
    assert found == {name: [str(number)] for name, (_, number) in stated.items()}
    nano = re.findall(r"`nano` \(([\d,]+) parameters\)", text)
    assert nano == [f"{h2h.cost('standard', size='nano')['parameters']:,}"]


def test_the_speed_of_peers_is_what_was_measured() -> None:
    text = (ROOT / "README.md").read_text()
    rows = json.loads((ROOT / "results/speed/train-gpu.json").read_text())["rows"]
    row = next(row for row in rows if (row["size"], row["tokens_per_step"]) == ("51m", 32_768))
    ours, litgpt = (row["results"][name]["milliseconds"] for name in ("standard", "litgpt"))
    settings = json.loads((ROOT / "results/speed/peer-settings.json").read_text())["rows"]
    best = min(one["milliseconds"] for one in settings if one["size"] == "51m")
    assert f"{best / ours:.2f} times as long with `transformers`" in text
    assert f"{litgpt / ours:.2f} times\nwith `litgpt`" in text
