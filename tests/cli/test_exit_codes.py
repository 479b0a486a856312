"""What exit codes say about the work that is left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headtohead.cli.main import main, overview
from headtohead.cli.shared.exit_codes import ExitCode
from headtohead.cli.shared.results import show_left
from headtohead.study.run.execute import Summary

DOCS = Path(__file__).parents[2] / "docs" / "studies.md"


def code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_race_that_is_stopped_by_its_time_limit_ends_with_3_and_a_finished_one_with_0(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["race", "--arms", "standard", "--corpus", f"file:{story}", "--tokens", "1024", "--batch", "256"]
    words += ["--seeds", "1", "--workers", "1", "--out", str(tmp_path / "out"), "--quiet"]
    assert code_of(*words, "--time-limit", "0s") == ExitCode.UNFINISHED
    assert "stopped with 1 run left; repeat the same command" in capsys.readouterr().out
    assert code_of(*words) == ExitCode.DONE


@pytest.mark.parametrize(
    ("summary", "code"),
    [
        (Summary(done=2), ExitCode.DONE),
        (Summary(done=2, stopped=True), ExitCode.DONE),
        (Summary(left=1, stopped=True), ExitCode.UNFINISHED),
        (Summary(left=1), ExitCode.PROBLEM),
        (Summary(done=2, unreported=True), ExitCode.PROBLEM),
    ],
)
def test_the_code_follows_from_what_is_left(summary: Summary, code: ExitCode) -> None:
    assert show_left(summary) == code


@pytest.mark.parametrize(("command", "code"), [("race", 3), ("reproduce", 3), ("list", 130)])
def test_an_interrupt_outside_training_has_its_code(
    command: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("headtohead.cli.main.dispatch", interrupted)
    assert code_of(command) == code


def test_the_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    table = DOCS.read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\d+) \|", table, re.MULTILINE) == [str(int(code)) for code in ExitCode]
    shown = " ".join(overview().split())
    assert all(f" {int(code)} " in shown for code in ExitCode)
    for command in ("race", "reproduce"):
        code_of(command, "--help")
        assert "Exit code 3" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["verdict", "site"])
def test_no_other_command_writes_into_the_folder_of_a_study(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs.csv").write_text("arm,seed,loss\na,1,2.0\na,2,2.1\nb,1,2.2\nb,2,2.4\n")
    study = tmp_path / "study"
    study.mkdir()
    for name in ("study.json", "verdicts.json", "report.html"):
        (study / name).write_text("{}")
    words = {
        "verdict": [str(tmp_path / "runs.csv"), "--arm", "arm", "--seed", "seed", "--metric", "loss"],
        "site": [str(study)],
    }
    assert code_of(command, *words[command], "--out", str(study)) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"h2h: {study} holds a study; choose another folder for ")
    assert error.count("\n") == 1
    assert {path.name: path.read_text() for path in study.iterdir()} == dict.fromkeys(
        ("study.json", "verdicts.json", "report.html"), "{}"
    )
