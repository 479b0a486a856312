"""Errors in a user's mechanism file are one line with the file and line of the user's code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.common.stop import Stopped
from headtohead.mechanisms.contract.registry import load_mechanism
from headtohead.mechanisms.contract.user_code import describe_error, user_errors, user_frame

HEAD = "import torch\nfrom torch import nn\nimport headtohead as h2h\n\n\nclass Mine(h2h.Mechanism):\n    '''Mine.'''\n\n"
BUILD = "    def __init__(self, shape, options):\n        super().__init__(shape, options)\n"
LAYER = "        self.v = nn.Linear(shape.width, shape.width)\n\n    def forward(self, x, frame):\n"
FORWARD = "    def forward(self, x, frame):\n        return x\n"
CASES = {
    "constructor": (
        HEAD + BUILD + "        raise ValueError('first\\nsecond')\n" + FORWARD,
        "line 11, in __init__: ValueError: first",
    ),
    "forward": (
        HEAD + BUILD + LAYER + "        return self.v(x) @ torch.zeros(3, 3)\n",
        "line 14, in forward: RuntimeError: ",
    ),
    "signature": (
        "from torch import nn\n\n\nclass Mine(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + FORWARD,
        "line 4: Mine cannot be built with (shape, options): TypeError: ",
    ),
    "no mechanism": ("\nclass Mine:\n    pass\n", "line 2: Mine is not a mechanism"),
    "import": ("import torch\nMine = torch.nothing\n", "line 2: failed on import: AttributeError: "),
    "syntax": ("def Mine(:\n", "line 1: "),
    "exit on import": ("import sys\nsys.exit(0)\n", "line 2: failed on import: SystemExit: 0"),
    "exit in the constructor": (
        HEAD + BUILD + "        exit()\n" + FORWARD,
        "line 11, in __init__: SystemExit",
    ),
    "exit in forward": (
        HEAD + BUILD + LAYER + "        raise SystemExit(0)\n",
        "line 14, in forward: SystemExit: 0",
    ),
    "exit in a score function": (
        "import headtohead as h2h\n\n\n@h2h.score\ndef Mine(s, head, i, j):\n    raise SystemExit\n",
        "line 6, in Mine: SystemExit: no message",
    ),
    "GeneratorExit in a score function": (
        "import headtohead as h2h\n\n\n@h2h.score\ndef Mine(s, head, i, j):\n    raise GeneratorExit('over')\n",
        "line 6, in Mine: GeneratorExit: over",
    ),
    "BaseException in a score function": (
        "import headtohead as h2h\n\n\nclass Own(BaseException): ...\n\n\n"
        "@h2h.score\ndef Mine(s, head, i, j):\n    raise Own('mine')\n",
        "line 9, in Mine: Own: mine",
    ),
    "BaseException in forward": (
        HEAD + BUILD + LAYER + "        raise BaseException('mine')\n",
        "line 14, in forward: BaseException: mine",
    ),
    "BaseException on import": (
        "raise BaseException('mine')\n",
        "line 1: failed on import: BaseException: mine",
    ),
}


@pytest.fixture
def mine(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    source, words = CASES[request.param]
    path = tmp_path / "mine.py"
    path.write_text(source)
    return f"{path}:Mine", words


@pytest.mark.parametrize("mine", CASES, indirect=True)
@pytest.mark.parametrize("command", ["race", "cost"])
def test_an_error_in_user_code_is_one_line(
    mine: tuple[str, str], command: str, story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arm, words = mine
    given = ["cost", "standard", arm]
    if command == "race":
        given = ["race", "--arms", "standard", arm, "--corpus", f"file:{story}", "--tokens", "512"]
        given += [
            "--batch",
            "256",
            "--seeds",
            "1",
            "--workers",
            "1",
            "--quiet",
            "--out",
            str(tmp_path / "out"),
        ]
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{arm.rpartition(':')[0]}, {words}" in error
    assert "second" not in error
    with pytest.raises(Exception) as raised:
        main([*given, "--debug"])
    assert words.partition(": ")[2] in str(raised.value)


@pytest.mark.parametrize(
    "mine",
    ["constructor", "forward", "signature", "exit in forward", "BaseException in forward"],
    indirect=True,
)
def test_the_suite_names_the_same_line(mine: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    arm, words = mine
    with pytest.raises(SystemExit) as ended:
        main(["check", arm])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    line = words.partition(",")[0].partition(":")[0]
    assert f"mine.py, {line}" in out or f"({line} of mine.py)" in out
    assert "of __init__.py" not in out


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Stopped])
def test_a_stop_in_user_code_is_no_error(stop: type[BaseException]) -> None:
    def score(s: torch.Tensor, head: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        raise stop

    with pytest.raises(stop):
        h2h.cost(h2h.score(score))
    with pytest.raises(stop), user_errors("mine"):
        raise stop


def test_code_of_packages_is_not_the_users() -> None:
    try:
        int("x")
    except ValueError as error:
        assert user_frame(error) is not None
        assert describe_error(error).endswith(f"of {Path(__file__).name})")
    try:
        Path("\0").read_text()
    except ValueError as error:
        frame = user_frame(error)
        assert frame is not None
        assert frame.filename == __file__


def test_an_exit_that_nothing_else_reports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headtohead.cli.main.dispatch", lambda words: exit(0))
    with pytest.raises(SystemExit) as ended:
        main(["list"])
    assert ended.value.code == 2
    assert "h2h: a mechanism ended the command: SystemExit: 0 (line" in capsys.readouterr().err


def test_a_file_with_null_bytes_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(b"x = 1\0")
    with pytest.raises(UserError, match=r"mine\.py: source code string cannot contain null bytes"):
        load_mechanism(str(tmp_path / "mine.py"))
