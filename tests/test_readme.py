"""The commands of the README, executed in an empty directory with fewer tokens and seeds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headtohead.cli.main import main

README = (Path(__file__).parents[1] / "README.md").read_text()
SMALL = {"500k": "4096", "races/mine": "races/mine --seeds 2 --workers 1"}


def blocks(language: str) -> list[str]:
    """Return the code blocks of a language; an empty one is a terminal's."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def test_the_commands_of_the_readme_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line.split("#")[0].strip() for block in blocks("") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("h2h ")]
    assert any(line.startswith("h2h race ") for line in commands)
    for line in commands:
        for long, short in SMALL.items():
            line = line.replace(long, short)
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line)[1:])
        assert ended.value.code == 0, line
    assert (tmp_path / "races" / "mine" / "report.html").is_file()
    (script,) = blocks("python")
    # The same study: nothing is trained again.
    exec(script.replace('tokens="500k"', "tokens=4096, seeds=2"), {})
    assert "standard" in capsys.readouterr().out.splitlines()[-1]
    others = [line for line in lines if line and not line.startswith("h2h ")]
    assert all(
        re.match(r"git clone|cd |make race|make test|pip install|\. \.venv/bin/activate$", line)
        for line in others
    ), others
