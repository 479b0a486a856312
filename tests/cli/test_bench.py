from __future__ import annotations

import json
from pathlib import Path

import pytest

from headtohead.cli.main import main


@pytest.mark.parametrize("name", ["kernels", "decode"])
def test_the_last_line_is_the_document(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, "--device", "cpu", "--out", str(file)])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == json.loads(file.read_text())
    assert "plain kernels" in out


def test_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "h2h bench kernels" in out
    assert "h2h race" not in out.split("Start with")[0]
