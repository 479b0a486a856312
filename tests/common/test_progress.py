import pytest

from headtohead.common import progress
from headtohead.common.estimate import Estimate, Work
from headtohead.common.progress import Display, Plain, choose_display, progress_bar


def work(*runs: str, kind: str = "standard", tokens: float = 1000.0) -> list[Work]:
    return [Work(run, kind, tokens) for run in runs]


def at(display: Display, clock: list[float]) -> None:
    display.estimate = Estimate(lambda: clock[0])


def test_plain_lines_report_every_run_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    display = Plain()
    at(display, clock)
    display.begin(2, work("a", "b"))
    display.started("a", "standard, seed 1", steps=10)
    for step in range(1, 11):
        clock[0] += 1.0
        display.stepped("a", step, nats=1.0, rate=100.0)
    display.ended("a", "2.5 bits per byte")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 of 2 runs to do, 2k tokens to train; time left unknown"
    assert lines[-1] == "[1/2] standard, seed 1: 2.5 bits per byte; about 10 s left"


def test_a_long_run_prints_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    display = Plain()
    at(display, clock)
    display.begin(1, work("a"))
    display.started("a", "standard, seed 1", 100)
    for step in range(1, 6):
        clock[0] += 10.0
        display.stepped("a", step, 0.6931471805599453, 100.0)
    out = capsys.readouterr().out
    assert "step 2/100, loss 1.000 bits, 100 tokens/s" in out
    assert "about 16 m 20 s left" in out


def test_the_display_names_what_a_run_is_doing(capsys: pytest.CaptureFixture[str]) -> None:
    display = Plain()
    display.begin(1, work("a"))
    display.started("a", "standard, seed 1", 100)
    display.last = -100.0
    display.probing("a", 0.25)
    assert "standard, seed 1: probing, 25% done" in capsys.readouterr().out


def test_plain_lines_without_a_terminal_and_nothing_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(choose_display(), Plain)
    with progress_bar("preparing", quiet=True) as show:
        show("message", 0.5)
    assert capsys.readouterr().out == ""
