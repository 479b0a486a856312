"""Trackers get every row of every run, and cannot break a study."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import asdict

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.common.progress import Display
from headtohead.integrations import forwarder
from headtohead.integrations.forwarder import forwarding
from headtohead.integrations.sinks import Channel, TrackedRun, find_sinks
from headtohead.study.store.run_store import Store

SMALL = {"tokens": 2560, "batch": 256, "seeds": 1, "lr": 5e-3}


class Writer:
    """Fake SummaryWriter of torch.utils.tensorboard."""

    made: list[Writer]

    def __init__(self, log_dir: str, purge_step: int) -> None:
        self.log_dir, self.purge_step, self.closed = log_dir, purge_step, 0
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: dict[str, str] = {}
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert not self.closed
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts[name] = text

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    Writer.made = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    return Writer


class Recorder:
    """A user's tracker; it raises `error` at the call named by `breaks`."""

    name = "recorder"

    def __init__(self, breaks: str = "", error: BaseException | None = None) -> None:
        self.breaks, self.error = breaks, error
        self.calls: list[tuple[str, str]] = []
        self.rows: list[tuple[int, Mapping[str, float]]] = []

    def reached(self, place: str, run: str) -> None:
        self.calls.append((place, run))
        if self.error is not None and place == self.breaks:
            raise self.error

    def open(self, run: TrackedRun) -> Channel:
        self.reached("open", run.id)
        return Line(self, run.id)


class Line:
    def __init__(self, sink: Recorder, run: str) -> None:
        self.sink, self.run = sink, run

    def row(self, step: int, values: Mapping[str, float]) -> None:
        self.sink.rows.append((step, values))
        self.sink.reached("row", self.run)

    def end(self, state: str, step: int, values: Mapping[str, float]) -> None:
        self.sink.reached("end", self.run)
        self.sink.reached(state, self.run)


class Notes(Display):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def study(story: Path, **settings: Any) -> h2h.Study:
    return h2h.Study(arms=["standard", "diagonal"], corpus=f"file:{story}", **(SMALL | settings))


def logged(folder: Path) -> dict[str, set[tuple[str, float, int]]]:
    """Return the values in the run files of a study as scalars."""
    found: dict[str, set[tuple[str, float, int]]] = {}
    for run in Store(folder).runs():
        rows, result = run.logged_rows(), run.result()
        assert result is not None
        scalars = found[run.id] = set()
        last = rows[-1].step
        for row in rows:
            known = {key: value for key, value in asdict(row).items() if value is not None}
            step, scores = known.pop("step"), known.pop("valid", {})
            scalars |= {(f"train/{key}", value, step) for key, value in known.items()}
            scalars |= {(f"valid/{key}", value, step) for key, value in scores.items()}
        for split in ("valid", "test"):
            scores = getattr(result, split).values
            scalars |= {(f"{split}/{key}", value, last) for key, value in scores.items()}
    return found


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tensorboard_gets_every_row_once_with_any_number_of_workers(
    story: Path, tmp_path: Path, board: type[Writer], workers: int
) -> None:
    result = study(story, evaluations=2).run(tmp_path, workers=workers, quiet=True, track="tensorboard")
    assert result.summary.left == 0
    wanted = logged(tmp_path)
    assert len(wanted) == len(board.made) == 2
    for writer in board.made:
        folder = Path(writer.log_dir)
        assert folder.parent == tmp_path / "tensorboard"
        run = folder.name.rpartition("_")[2]
        assert set(writer.scalars) == wanted[run]
        assert len(writer.scalars) == len(set(writer.scalars))
        assert {"valid/bits_per_byte", "test/bits_per_byte", "train/grad_norm"} <= {
            n for n, *_ in writer.scalars
        }
        assert (writer.closed, writer.purge_step, writer.texts["state"]) == (1, 0, "done")
        assert '"seed": 1' in writer.texts["spec"]


@pytest.mark.slow
def test_the_real_tensorboard_reads_back_what_was_tracked(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    h2h.Study(["standard"], **SMALL).run(tmp_path, quiet=True, workers=1, track="tensorboard")
    (run,) = Store(tmp_path).runs()
    (folder,) = (tmp_path / "tensorboard").iterdir()
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    logged = [(row.step, row.nats) for row in run.logged_rows() if row.nats is not None]
    tracked = [(event.step, event.value) for event in events.Scalars("train/nats")]
    assert tracked == [(step, pytest.approx(nats, rel=1e-6)) for step, nats in logged]
    result = run.result()
    assert result is not None
    (score,) = events.Scalars("test/bits_per_byte")
    assert score.value == pytest.approx(result.test.values["bits_per_byte"], rel=1e-6)


def test_the_shell_tracks_and_rejects_unknown_trackers(
    story: Path, tmp_path: Path, board: type[Writer], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["race", "--arms", "standard", "--corpus", f"file:{story}", "--tokens", "2560", "--batch", "256"]
    words += ["--seeds", "1", "--workers", "1", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--track", "tensorbored"])
    assert ended.value.code == 2
    assert "unknown tracker 'tensorbored'; did you mean 'tensorboard'?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as ended:
        main([*words, "--track", "tensorboard"])
    assert ended.value.code == 0
    assert len(board.made) == 1


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_library_is_named_with_its_command_before_anything_runs(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"tracker '{name}' cannot be used.*pip install {name}\)"):
        study(story).run(tmp_path / "out", quiet=True, track=[name])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("place", "error"),
    [("open", RuntimeError("no network\nat all")), ("row", SystemExit(1)), ("end", ValueError())],
)
def test_a_broken_tracker_gives_one_warning_and_the_study_continues(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    shown = Notes()
    monkeypatch.setattr("headtohead.api.runner.choose_display", lambda quiet: shown)
    broken, is_valid = Recorder(place, error), Recorder()
    result = study(story).run(tmp_path, workers=1, track=[broken, is_valid])
    assert (result.summary.done, result.summary.left) == (2, 0)
    assert result.summary.trouble == []
    warnings = [note for note in shown.notes if "tracking by" in note]
    assert len(warnings) == 1
    assert warnings[0].startswith("tracking by recorder stopped, the study continues: ")
    assert "\n" not in warnings[0]
    assert broken.calls.count((place, broken.calls[-1][1])) == 1, "it is dropped"
    assert [name for name, _ in is_valid.calls].count("done") == 2, "the other tracker continues"


def test_a_tracker_that_hangs_delays_no_run(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder, "PATIENCE", 0.1)
    shown, released = Notes(), threading.Event()
    monkeypatch.setattr("headtohead.api.runner.choose_display", lambda quiet: shown)
    sink = Recorder()
    monkeypatch.setattr(sink, "open", lambda run: released.wait(60) and Line(sink, run.id))
    result = study(story).run(tmp_path, workers=1, track=sink)
    released.set()
    assert (result.summary.done, result.summary.left) == (2, 0)
    assert [note for note in shown.notes if "was stopped (recorder)" in note]


def test_a_stopped_run_is_closed_as_stopped_and_tracked_in_full_on_resume(
    story: Path, tmp_path: Path
) -> None:
    first, second = Recorder(), Recorder()
    planned = study(story, tokens=256 * 20)
    result = planned.run(tmp_path, workers=1, quiet=True, seconds=0.0, track=first)
    assert result.summary.left > 0
    assert first.calls[-1][0] == "stopped"
    planned.run(tmp_path, workers=1, quiet=True, track=second)
    assert [name for name, _ in second.calls].count("done") == result.summary.left
    runs = {run for name, run in second.calls if name == "done"}
    steps = sum(len(Store(tmp_path).run(run).logged_rows()) for run in runs)
    assert len(second.rows) == steps, "rows of the first session too: a tracker may be new"


class Remote:
    """Fake wandb module and run in one."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logs: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, Any] = {}
        self.codes: list[int] = []
        self.step = 0

    def init(self, **settings: Any) -> Remote:
        self.inits.append(settings)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logs.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


def test_wandb_gets_a_run_per_run_and_no_step_twice(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote()
    remote.step = 4
    monkeypatch.setitem(sys.modules, "wandb", remote)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    h2h.Study(arms=["standard"], corpus=f"file:{story}", name="mine", **SMALL).run(
        tmp_path, quiet=True, track=["wandb"]
    )
    run = Store(tmp_path).runs()[0]
    (settings,) = remote.inits
    assert (settings["id"], settings["project"], settings["group"]) == (run.id, "headtohead", "mine")
    assert (settings["resume"], settings["reinit"]) == ("allow", "create_new")
    assert settings["config"]["seed"] == 1
    assert [step for step, _ in remote.logs] == [4, 5, 6, 7, 8, 9, 10], (
        "it had steps 0 to 3 from an earlier session"
    )
    result = run.result()
    assert result is not None
    assert remote.summary["test/bits_per_byte"] == result.test.values["bits_per_byte"]
    assert (remote.summary["state"], remote.codes) == ("done", [0])


def test_a_non_tracker_is_rejected_and_a_repeated_one_is_used_once(board: type[Writer]) -> None:
    with pytest.raises(UserError, match="3 is not a tracker: it needs a name and open"):
        find_sinks([3])  # type: ignore[list-item]
    own = Recorder()
    assert [sink.name for sink in find_sinks(["tensorboard", own, "tensorboard", own])] == [
        "tensorboard",
        "recorder",
    ]


def test_tracking_changes_neither_runs_nor_results(story: Path, tmp_path: Path) -> None:
    for place, track in (("plain", ()), ("tracked", Recorder())):
        study(story).run(tmp_path / place, workers=1, quiet=True, track=track)
    contents = [
        {run.id: (run.path / "result.json").read_bytes() for run in Store(tmp_path / place).runs()}
        for place in ("plain", "tracked")
    ]
    assert contents[0] == contents[1]


def test_the_display_is_listened_to_while_trackers_run_and_only_then(tmp_path: Path) -> None:
    display = Display()
    listener = display.listener
    with forwarding(display, Store(tmp_path), "x", []):
        assert display.listener is listener
    with forwarding(display, Store(tmp_path), "x", [Recorder()]):
        assert display.listener is not listener
    assert display.listener is listener
