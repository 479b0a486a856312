"""`h2h new mechanism` writes a file that passes the whole suite and races."""

from __future__ import annotations

from pathlib import Path

import pytest

import headtohead as h2h
from headtohead.cli.main import dispatch
from headtohead.common.errors import UserError
from headtohead.model.check import LEVELS
from headtohead.model.layout import parse_layout


def test_the_new_file_reaches_the_last_level_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dispatch(["new", "mechanism", "my_mixer"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        "h2h check ./my_mixer.py",
        "h2h race --arms standard ./my_mixer.py --tokens 200k --seeds 3",
    ]
    text = (tmp_path / "my_mixer.py").read_text()
    assert "class MyMixer(" in text
    assert not {"NAME", "CLASS"} & set(text.replace(".", " ").split())
    assert dispatch(lines[1].split()[1:]) == 0
    assert f"./my_mixer.py: {list(LEVELS)[-1]} (2 settings" in capsys.readouterr().out


@pytest.mark.slow
def test_the_new_file_races(story: Path, tmp_path: Path) -> None:
    arm = str(h2h.new_mechanism("racer", tmp_path))
    settings = {"corpus": f"file:{story}", "tokens": 2048, "batch": 1024, "seeds": 1}
    result = h2h.Study(["standard", f"{arm}:window=16"], **settings).run(
        tmp_path / "race", workers=1, quiet=True
    )
    assert [row.label for row in result.verdicts] == ["Racer:window=16"]
    assert not result.summary.left
    assert result.verdicts[0].n == 1


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("kept")
    with pytest.raises(UserError, match="is not overwritten"):
        h2h.new_mechanism("mine", tmp_path)
    assert (tmp_path / "mine.py").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("2fast", "cannot name a mechanism"),
        ("my-mixer", "cannot name a mechanism"),
        ("../up", "cannot name a mechanism"),
        ("lambda", "cannot name a mechanism"),
        ("standard", "is a built-in mechanism"),
        ("torch", "is a Python module"),
        ("json", "is a Python module"),
    ],
)
def test_a_name_that_does_not_work_is_rejected(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        h2h.new_mechanism(name, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_directory_that_no_arm_can_name_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    for folder, words in (("a b", "no arm can name a file in it"), ("none", "no such directory")):
        with pytest.raises(UserError, match=words):
            h2h.new_mechanism("mine", tmp_path / folder)


def test_an_arm_may_leave_out_the_class_of_a_file_with_one_mechanism(tmp_path: Path) -> None:
    file = h2h.new_mechanism("mine", tmp_path)
    for arm in (f"{file}", f"{file}:Mine"):
        assert parse_layout(arm).pattern == parse_layout(f"{file}:Mine").pattern
        assert parse_layout(f"even({arm}:window=4)").pattern[0].text == f"{file}:Mine:window=4"
    with pytest.raises(UserError, match="option of Mine 'windw'; did you mean 'window'"):
        parse_layout(f"{file}:windw=4")
    file.write_text(file.read_text() + "\n\nclass Other(Mine):\n    name = 'other'\n")
    with pytest.raises(UserError, match=rf"2 mechanisms; write {file}:Mine or {file}:Other"):
        parse_layout(str(file))
