"""The path of a race: the functions that docs/architecture.md lists are called in that order."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from headtohead.cli.main import main

ROOT = Path(__file__).parents[3]


def stops() -> list[str]:
    """Return the functions in the table of a race."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## A race")[2].partition("\n\n| step | function |")[2].partition("\n\n")[0]
    return re.findall(r"\| `([a-z_/]+\.py: [\w.]+)` \|", table)


def code_of(stop: str) -> CodeType:
    file, _, name = stop.partition(": ")
    found: Any = importlib.import_module(f"headtohead.{file.removesuffix('.py').replace('/', '.')}")
    for part in name.split("."):
        found = getattr(found, part)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    code: CodeType = found.__code__
    return code


@pytest.mark.page
def test_a_race_passes_the_listed_functions_in_their_order(story: Path, tmp_path: Path) -> None:
    listed = stops()
    assert 10 <= len(listed) <= 15
    names = {code_of(stop): stop for stop in listed}
    passed: list[str] = []

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (stop := names.get(frame.f_code)) and stop not in passed:
            passed.append(stop)

    command = f"race --arms standard diagonal --corpus file:{story} --tokens 512 --batch 256 --seeds 2 --workers 1 --quiet"
    before = sys.getprofile()
    sys.setprofile(called)
    try:
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), "--out", str(tmp_path / "out")])
    finally:
        sys.setprofile(before)
    assert ended.value.code == 0
    assert passed == listed
    assert (tmp_path / "out" / "report.html").is_file()
