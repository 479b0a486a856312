import pytest

from headtohead.common import progress
from headtohead.common.progress import Display, Plain, choose_display, progress_bar


def test_plain_lines_report_every_run_and_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    display = Plain()
    display.begin(runs=2, done=0, tokens=2000)
    display.started("a", "standard, seed 1", steps=10, tokens=1000)
    clock[0] = 5.0
    display.stepped("a", 5, nats=1.0, rate=100.0)
    clock[0] = 10.0
    display.ended("a", "2.5 bits per byte")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 of 2 runs to do, 2k tokens to train"
    assert lines[1] == "[1/2] standard, seed 1: 2.5 bits per byte; about 10 s left"


def test_a_long_run_prints_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    display = Plain()
    display.begin(1, 0, 1000)
    display.started("a", "standard, seed 1", 100, 1000)
    for step in range(1, 5):
        clock[0] += 10.0
        display.stepped("a", step, 0.6931471805599453, 100.0)
    out = capsys.readouterr().out
    assert "step 2/100, loss 1.000 bits, 100 tokens/s" in out
    assert "left" in out


def test_steps_restored_from_a_checkpoint_do_not_count_as_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    display = Display()
    display.begin(1, 0, 1000)
    display.started("a", "x", 100, 1000)
    clock[0] = 10.0
    display.stepped("a", 91, 1.0, 1.0)
    assert display.trained() == pytest.approx(10.0)


def test_plain_lines_without_a_terminal_and_nothing_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(choose_display(), Plain)
    with progress_bar("preparing", quiet=True) as show:
        show("message", 0.5)
    assert capsys.readouterr().out == ""
