"""Recorded results: what a folder in results/ holds of a finished study."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.study.store.archive import import_runs
from headtohead.study.store.run_store import Store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that records results."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import record_results

    return record_results


def test_a_study_is_not_recorded_over_itself(
    recorder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["record_results.py", str(tmp_path), f"{tmp_path}/."])
    with pytest.raises(SystemExit, match="2"):
        recorder.main()
    assert "is the study itself; give another folder" in capsys.readouterr().err
    assert (tmp_path / "study.json").read_text() == "{}"


def test_a_study_without_verdicts_replaces_nothing(
    recorder: ModuleType,
    tmp_path: Path,
    story: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, target = tmp_path / "race", tmp_path / "results"
    study = h2h.Study(arms=["standard"], corpus=f"file:{story}", tokens=512, batch=256, seeds=1)
    study.run(out, workers=1, quiet=True, device="cpu")
    (out / "verdicts.json").unlink()
    target.mkdir()
    (target / "verdicts.json").write_text("[]")
    monkeypatch.setattr(sys, "argv", ["record_results.py", str(out), str(target)])
    with pytest.raises(SystemExit, match="2"):
        recorder.main()
    assert "no verdicts.json in study; run h2h report there first" in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == ["verdicts.json"]


def test_a_recorded_study_can_be_restored_and_its_table_names_where_it_ran(
    recorder: ModuleType, tmp_path: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, target = tmp_path / "race", tmp_path / "results"
    settings = {"corpus": f"file:{story}", "tokens": 1024, "batch": 256, "seeds": 2}
    for place in (out, out / "other"):
        study = h2h.Study(arms=["standard", "gated"], **settings)
        study.run(place, workers=1, quiet=True, device="cpu")
    target.mkdir()
    (target / "runs.tar.gz").touch()  # recorded before, in the older format
    (target / "README.md").write_text(
        "before\n<!-- runs -->\nold\n<!-- end -->\nbetween\n<!-- verdicts -->\nold\n<!-- end -->\nafter\n"
    )
    monkeypatch.setattr(sys, "argv", ["record_results.py", str(out), str(target)])
    recorder.main()

    assert not (target / "runs.tar.gz").exists()
    lines = (target / "README.md").read_text().splitlines()
    assert (lines[0], lines[-1], "old" in lines) == ("before", "after", False)
    assert lines.index("between") < lines.index("### `study`") < lines.index("### `other`")
    assert sum(line.startswith("| gated | ") for line in lines) == 2
    for name in ("study", "other"):
        (row,) = (line for line in lines if line.startswith(f"| `{name}`"))
        shared = {"study": "4 (4 done)", "other": "4 (4 done, 4 of another study)"}[name]
        assert row.startswith(f"| `{name}` | {shared} |")
        assert ("cpu" in row) == (name == "study")
    for part in (Path(), Path("other")):
        store = Store(tmp_path / "restored" / part)
        store.make()
        assert import_runs(store, target / part / recorder.ARCHIVE) == (4, 0)
        runs = [run.id for run in Store(out / part).runs()]
        assert store.results(runs) == Store(out / part).results(runs)
        assert (target / part / "study.json").read_bytes() == (out / part / "study.json").read_bytes()
        assert not list((tmp_path / "restored").rglob("*.safetensors"))


def test_a_recorded_run_is_trained_again_and_compared(
    recorder: ModuleType,
    tmp_path: Path,
    story: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import repeat_recorded

    words = f"--arms standard --corpus {story} --tokens 1024 --batch 256 --seeds 2"
    study = h2h.Study(arms=["standard"], corpus=str(story), tokens=1024, batch=256, seeds=2)
    study.run(tmp_path / "race", workers=1, quiet=True, device="cpu")
    recorder.record(tmp_path / "race", tmp_path / "results")

    def run(command: list[str], **_: object) -> SimpleNamespace:
        with pytest.raises(SystemExit) as ended:
            main(command[3:])
        return SimpleNamespace(returncode=ended.value.code)

    monkeypatch.setattr(repeat_recorded.subprocess, "run", run)

    def repeated(*command: str) -> tuple[int, list[str], dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["repeat_recorded.py", str(tmp_path / "results"), "--", *command])
        capsys.readouterr()
        code = repeat_recorded.main()
        *rows, last = capsys.readouterr().out.splitlines()
        return code, [row.partition(": ")[2] for row in rows], json.loads(last)

    code, rows, last = repeated("race", *words.split())
    assert (code, rows, last["repeated"], last["equal"]) == (0, ["equal"] * 2, 2, 2)
    code, rows, last = repeated("list", "sizes")
    assert (code, rows, last["repeated"]) == (1, ["not trained again"] * 2, 0)
    monkeypatch.setattr(repeat_recorded, "outcome", lambda run: str(run.path.stat().st_ino))
    code, rows, last = repeated("race", *words.split())
    assert (code, rows, last["repeated"], last["equal"]) == (1, ["differs"] * 2, 2, 0)
