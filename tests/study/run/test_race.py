"""Studies from end to end: they finish, resume, share work between executors, and record what they did."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import headtohead as h2h
from headtohead import Study
from headtohead.common.errors import UserError
from headtohead.common.schema import write_document
from headtohead.study.store.manifest import read_manifest
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store, find_run
from tests import processes

SMALL = {"tokens": 2560, "batch": 256, "seeds": 2, "lr": 5e-3}


def study(story: Path, **values: Any) -> Study:
    return Study(**({"arms": ["standard", "sharing:tie=kv"], "corpus": f"file:{story}"} | SMALL | values))


def results(folder: Path) -> dict[str, str]:
    """Return result.json of every run, as text: bit for bit."""
    return {run.id: (run.path / "result.json").read_text() for run in Store(folder).runs()}


@pytest.fixture(scope="module")
def finished(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    study(story, evaluations=2).run(folder, workers=1, quiet=True)
    return folder


def test_nothing_to_do_builds_no_record(finished: Path, story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(run: RunSpec) -> None:
        raise AssertionError(f"built the record of {run.id}")

    monkeypatch.setattr(RunSpec, "as_dict", built)
    assert study(story, evaluations=2).run(finished, workers=1, quiet=True).summary.left == 0


def test_entries_of_a_contest_share_one_object(finished: Path) -> None:
    manifest, _ = read_manifest(finished / "study.json")
    (contest,) = manifest.contests()
    assert all(entry.contest is contest for entry in manifest.entries)


def test_a_study_ends_with_verdicts_runs_and_a_page(finished: Path) -> None:
    verdicts = json.loads((finished / "verdicts.json").read_text())
    assert len(verdicts) == 1
    assert verdicts[0]["arm"] == "sharing:tie=kv"
    assert verdicts[0]["n"] == 2
    if find_spec("altair"):
        assert (finished / "report.html").stat().st_size > 500_000
    assert (finished / "study.lock.json").is_file()
    for run in Store(finished).runs():
        names = {path.name for path in run.path.iterdir()}
        assert names == {
            "spec.json",
            "environment.json",
            "metrics.jsonl",
            "checkpoint",
            "cost.json",
            "result.json",
        }
        assert {path.name for path in run.checkpoints.iterdir()} == {"final.safetensors", "final.sha256"}
        result = run.result()
        assert result is not None
        assert result.status == "done"
        assert result.test.values["bits_per_byte"] < 8
        assert len(result.test.blocks["bits_per_byte"]) >= 3
        stretch = json.loads((run.path / "environment.json").read_text())["stretches"][0]
        assert {"commit", "torch", "device", "attention", "date"} <= set(stretch)
        assert sum(row.valid is not None for row in run.logged_rows()) == 1


def test_a_finished_study_starts_nothing_and_reports_the_same(story: Path, finished: Path) -> None:
    before, stamps = (
        results(finished),
        {run.id: (run.path / "result.json").stat().st_mtime_ns for run in Store(finished).runs()},
    )
    result = study(story, evaluations=2).run(finished, quiet=True)
    assert result.summary.done == 0
    assert results(finished) == before
    assert {run.id: (run.path / "result.json").stat().st_mtime_ns for run in Store(finished).runs()} == stamps


def test_workers_give_the_same_results_bit_for_bit(story: Path, finished: Path, tmp_path: Path) -> None:
    study(story, evaluations=2).run(tmp_path, workers=2, quiet=True)
    assert results(tmp_path) == results(finished)


def progress_of(folder: Path) -> int:
    """Return the saved progress of a study: steps in checkpoints, results and probes."""
    total = 0
    for run in Store(folder).runs():
        steps = [int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")]
        total += 100 if run.finished() else max(steps, default=0)
        total += len(list((run.path / "probes").glob("*")))
    return total


@pytest.mark.parametrize("stack", [False, True], ids=("single", "stacked"))
def test_a_start_with_a_time_limit_of_zero_makes_progress_and_the_study_ends_the_same(
    story: Path, tmp_path: Path, stack: bool
) -> None:
    chosen = study(story, arms=["standard"], tokens=768, seeds=2, evaluations=2, probes=["positions", "skip"])
    chosen.run(tmp_path / "whole", workers=1, population=stack, quiet=True)
    reached = [0]
    while reached[-1] < progress_of(tmp_path / "whole"):
        result = chosen.run(tmp_path / "parts", workers=1, population=stack, time_limit=0.0, quiet=True)
        reached.append(progress_of(tmp_path / "parts"))
        assert reached[-1] > reached[-2], f"a start made no progress: {reached}"
        assert result.summary.stopped == bool(result.summary.left)
    assert len(reached) > 5
    assert result.summary.left == 0
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


@pytest.mark.slow
def test_workers_with_a_time_limit_of_zero_make_progress(story: Path, tmp_path: Path) -> None:
    result = study(story, seeds=1).run(tmp_path, workers=2, time_limit=0.0, quiet=True)
    assert result.summary.stopped
    assert result.summary.left == 2
    assert [path.name for path in tmp_path.glob("runs/*/checkpoint/*")] == ["step-0000000001"] * 2


def longer(story: Path) -> Study:
    return study(story, tokens=5120)


@pytest.mark.slow
def test_a_killed_study_resumes_to_the_same_results(story: Path, tmp_path: Path) -> None:
    longer(story).run(tmp_path / "whole", workers=1, quiet=True)
    folder = tmp_path / "killed"
    for steps in (1, 6, 11):  # killed after this many saved steps
        process = processes.start(processes.race, longer(story).values, folder, save_every=0.0)
        processes.until(lambda steps=steps: progress_of(folder) >= steps)
        process.kill()
        assert processes.ended(process) == -signal.SIGKILL
    longer(story).run(folder, workers=1, quiet=True)
    assert results(folder) == results(tmp_path / "whole")


@pytest.mark.slow
def test_two_executors_train_every_run_once(story: Path, tmp_path: Path) -> None:
    both = [processes.start(processes.race, longer(story).values, tmp_path, workers=2) for _ in range(2)]
    assert [processes.ended(process) for process in both] == [0, 0]
    assert len(results(tmp_path)) == 4
    for run in Store(tmp_path).runs():
        assert len(json.loads((run.path / "environment.json").read_text())["stretches"]) == 1, (
            "no run was repeated"
        )
        assert not (run.path / "lock").exists()


def test_an_interrupt_stops_cleanly_and_prints_how_to_continue(story: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headtohead",
        "race",
        "--arms",
        "standard",
        "diagonal",
        "--corpus",
        f"file:{story}",
    ]
    command += ["--tokens", "2M", "--batch", "256", "--seeds", "1", "--workers", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processes.until(lambda: list(tmp_path.glob("runs/*/metrics.jsonl")))
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=processes.PATIENCE)[0]
    assert process.returncode == 3, output
    assert "repeat the same command to continue" in output
    assert list(tmp_path.glob("runs/*/checkpoint/step-*"))
    assert not list(tmp_path.glob("runs/*/lock"))


def test_a_mechanism_that_raises_is_a_recorded_failure_and_the_rest_continues(
    story: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import torch\nfrom torch import nn\n"
        "class Mine(nn.Module):\n"
        "    def __init__(self, shape, options):\n        super().__init__()\n        self.v = nn.Linear(shape.width, shape.width)\n        self.calls = 0\n"
        "    def forward(self, x, frame):\n        self.calls += x.device.type != 'meta'\n"
        "        if self.calls > 5: raise ValueError('in the middle')\n        return self.v(x)\n"
    )
    arms = ["standard", f"{mine}:Mine"]
    result = study(story, arms=arms).run(tmp_path / "out", workers=1, quiet=True, allow_failed_check=True)
    assert result.summary.left == 0
    states = sorted(run.result().status for run in Store(tmp_path / "out").runs())
    assert states == ["done", "done", "failed", "failed"]
    failed = next(run for run in Store(tmp_path / "out").runs() if run.state() == "failed")
    assert "ValueError: in the middle (line 10 of mine.py)" in failed.result().error
    assert "in the middle" in (failed.path / "failure.txt").read_text()
    assert result.verdicts[0].failed == 2

    mine.write_text(mine.read_text().replace("> 5", "> 5000"))
    again = study(story, arms=arms).run(tmp_path / "out", workers=1, quiet=True)
    assert again.summary.done == 2, "an edited file gives new runs"
    assert again.verdicts[0].n == 2


def test_an_edited_file_is_reported(story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.py"
    source = Path("examples/prefix_mean.py").read_text()
    mine.write_text(source)
    study(story, arms=["standard", f"{mine}:PrefixMean"], seeds=1).run(tmp_path / "out", workers=1)
    assert "has changed" not in capsys.readouterr().out
    mine.write_text(source + "\nNEW = 'thought'\n")
    for expected in (1, 0):  # the second time all runs have the new text
        study(story, arms=["standard", f"{mine}:PrefixMean"], seeds=1).run(tmp_path / "out", workers=1)
        out = capsys.readouterr().out
        assert out.count(f"{mine} has changed: its runs start from scratch") == expected


@pytest.mark.slow
def test_a_tuned_study_reports_an_edited_file_once(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(Path("examples/prefix_mean.py").read_text())
    settings = {"arms": [f"{mine}:PrefixMean"], "tune": {"lr": [1e-3, 2e-3, 4e-3], "tokens": 512}}
    given = {key: value for key, value in (SMALL | settings | {"seeds": 1}).items() if key != "lr"}
    h2h.Study(corpus=f"file:{story}", **given).run(tmp_path / "out", workers=1, quiet=True)
    mine.write_text(mine.read_text() + "MORE = 1\n")
    h2h.Study(corpus=f"file:{story}", **given).run(tmp_path / "out", workers=1)
    assert capsys.readouterr().out.count("has changed: its runs start from scratch") == 1


def test_an_edit_of_comments_or_formatting_reuses_finished_runs(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    source = Path("examples/prefix_mean.py").read_text()
    mine.write_text(source)
    arms = ["standard", f"{mine}:PrefixMean"]
    study(story, arms=arms, seeds=1).run(tmp_path / "out", workers=1, quiet=True)
    before = {run.id for run in Store(tmp_path / "out").runs()}
    planned = {entry.run for entry in h2h.open_study(tmp_path / "out").manifest.entries}
    mine.write_text("# a new thought\n" + source.replace("self.v(x)", "self.v( x )"))
    capsys.readouterr()
    again = study(story, arms=arms, seeds=1).run(tmp_path / "out", workers=1)
    assert again.summary.done == 0
    assert {run.id for run in Store(tmp_path / "out").runs()} == before
    assert {entry.run for entry in again.manifest.entries} == planned
    out = capsys.readouterr().out
    assert f"{mine}: only comments or formatting differ from earlier runs; 1 run reused" in out
    assert "has changed" not in out
    run = find_run(f"{tmp_path / 'out'}/PrefixMean/1")
    assert h2h.load_model(run.path, trust_files=True).parameter_count() > 0, "the same program"
    study(story, arms=arms, seeds=2).run(tmp_path / "out", workers=1, quiet=True)
    assert len(Store(tmp_path / "out").runs()) == 4, "a further seed has the id of the new text"


def test_the_trunk_and_branches_of_the_same_program_are_reused(story: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    source = Path("examples/prefix_mean.py").read_text()
    mine.write_text(source)
    settings = {"arms": [f"{mine}:PrefixMean"], "seeds": 1, "branches": [1024, 2048], "tokens": None}
    given = {key: value for key, value in (SMALL | settings).items() if value is not None}
    first = h2h.Study(corpus=f"file:{story}", **given).run(tmp_path / "out", workers=1, quiet=True)
    mine.write_text(source + "# the end\n")
    again = h2h.Study(corpus=f"file:{story}", **given).run(tmp_path / "out", workers=1, quiet=True)
    assert again.summary.done == 0
    assert [entry.run for entry in again.manifest.entries] == [entry.run for entry in first.manifest.entries]


def test_failed_runs_are_retried_on_request(story: Path, tmp_path: Path) -> None:
    study(story, seeds=1).run(tmp_path, workers=1, quiet=True)
    run = Store(tmp_path).runs()[0]
    good = (run.path / "result.json").read_text()
    (run.path / "result.json").write_text('{"status": "out of memory", "error": "x"}')
    assert study(story, seeds=1).run(tmp_path, workers=1, quiet=True).summary.done == 0
    assert study(story, seeds=1).run(tmp_path, workers=1, quiet=True, retry_failed=True).summary.done == 1
    assert (run.path / "result.json").read_text() == good


def test_runs_of_another_commit_are_reused_with_a_note(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study(story, seeds=1).run(tmp_path, workers=1, quiet=True)
    for run in Store(tmp_path).runs():
        path = run.path / "environment.json"
        record = json.loads(path.read_text())
        record["stretches"][-1]["commit"] = "0123456789ab"
        write_document(path, record)
    study(story, seeds=1).run(tmp_path, workers=1)
    assert "2 runs of commit 0123456789ab are reused: the same numerics" in capsys.readouterr().out


def test_a_run_resumed_in_another_environment_is_noted(story: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    longer(story).run(folder, workers=1, seconds=0.0, quiet=True)
    run = next(run for run in Store(folder).runs() if list(run.checkpoints.glob("step-*")))
    path = run.path / "environment.json"
    record = json.loads(path.read_text())
    record["stretches"][-1]["torch"] = "1.0"
    write_document(path, record)
    longer(story).run(folder, workers=1, quiet=True)
    assert any("torch 1.0 ->" in change for change in run.result().environment_changed)
    notes = h2h.open_study(folder).verdicts[0].notes
    assert any("resumed with another torch version" in note for note in notes)
    others = [other.result() for other in Store(folder).runs() if other.id != run.id]
    assert not any(result.environment_changed for result in others)


def test_seeds_added_after_results_existed_are_marked_and_planned_ones_are_not(
    story: Path, tmp_path: Path
) -> None:
    assert study(story).run(tmp_path, workers=1, quiet=True).verdicts[0].added_seeds == []
    assert study(story, seeds=3).run(tmp_path, workers=1, quiet=True).verdicts[0].added_seeds == [3]
    assert study(story, seeds=3).run(tmp_path, workers=1, quiet=True).verdicts[0].added_seeds == [3]


def test_a_class_passed_in_python_trains_in_this_process(story: Path, tmp_path: Path) -> None:
    from torch import nn

    wrapped = h2h.wrap(lambda shape: nn.Linear(shape.width, shape.width), name="pointwise")
    result = study(story, arms=["standard", wrapped], seeds=1).run(tmp_path, workers=2, quiet=True)
    assert [row.label for row in result.verdicts] == ["pointwise"]
    assert result.verdicts[0].n == 1


def test_a_score_function_of_a_file_trains_in_other_processes(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_scores.py").write_text(
        "import headtohead as h2h\n\n\ndef make(factor):\n    @h2h.score\n    def scaled(s, head, i, j):\n"
        "        return s * factor\n\n    return scaled\n\n\nhalf = make(0.5)\nsame = make(1.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "user_scores", None)  # absent again after the test
    del sys.modules["user_scores"]
    file = importlib.import_module("user_scores")
    given = study(story, arms=["standard", file.half, file.same])
    assert all(arm.layout.portable for arm in given.spec.arms)
    result = given.run(tmp_path / "out", workers=2, quiet=True)
    assert [(row.label, row.n) for row in result.verdicts] == [("half", 2), ("same", 2)]
    half, same = (abs(row.difference or 0.0) for row in result.verdicts)
    assert same < half / 10


def test_the_result_converts_to_pandas_html_and_sentences(finished: Path) -> None:
    result = h2h.open_study(finished)
    assert len(result.to_pandas()) == 1
    assert "(Q, K=V)" in result._repr_html_()
    assert result.sentences()[0].startswith("(Q, K=V)")


def test_load_returns_the_trained_model_and_its_tokenizer(finished: Path, story: Path) -> None:
    from headtohead.data.shards import prepare
    from headtohead.evaluation.loss import score_split

    run = Store(finished).runs()[0]
    model, tokenizer = h2h.load(run.path)
    corpus = prepare(f"file:{story}")
    score = score_split(model, corpus.splits["test"], tokenizer.token_bytes())
    assert score.bits_per_byte == run.result().test.values["bits_per_byte"]
    assert h2h.evaluate(run.path, f"file:{story}", quiet=True).bits_per_byte == score.bits_per_byte
    text = "".join(h2h.generate_text(run.path, "the ", tokens=20))
    assert len(text.encode("utf-8")) >= 1


def test_a_bpe_run_includes_its_tokenizer(story: Path, tmp_path: Path) -> None:
    result = study(story, arms=["standard", "diagonal"], tokenizer="bpe:300", seeds=1).run(
        tmp_path, workers=1, quiet=True
    )
    assert result.summary.left == 0
    model, tokenizer = h2h.load(Store(tmp_path).runs()[0].path)
    assert tokenizer.vocabulary == model.size.vocabulary == 300


def test_user_code_of_a_run_is_not_executed_by_default(story: Path, tmp_path: Path) -> None:
    arm = "examples/prefix_mean.py:PrefixMean"
    study(story, arms=["standard", arm], seeds=1).run(tmp_path, workers=1, quiet=True)
    run = next(run for run in Store(tmp_path).runs() if run.spec().label == "PrefixMean")
    with pytest.raises(UserError, match="trust_files"):
        h2h.load(run.path)
    model, _ = h2h.load(run.path, trust_files=True)
    assert model.parameter_count() > 0


def test_runs_are_found_by_directory_or_prefix(finished: Path) -> None:
    run = Store(finished).runs()[0]
    assert find_run(run.path).id == run.id
    assert find_run(finished / run.id[:12]).id == run.id
    for path, message in (
        (finished, "is a study"),
        (finished / "zzz", "no run 'zzz' in"),
        ("nowhere", "no run at"),
    ):
        with pytest.raises(UserError, match=message):
            find_run(path)


def test_an_unwritable_output_directory_is_named(story: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UserError, match="cannot write to"):
        study(story).run(tmp_path / "file" / "out", quiet=True)


def test_without_the_chart_library_a_study_still_finishes(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("altair", "headtohead.report"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "altair", None)
    result = study(story, seeds=1).run(tmp_path, workers=1)
    assert result.report is None
    assert (tmp_path / "verdicts.json").is_file()
    assert "page not written: altair is not installed" in capsys.readouterr().out


def test_the_commit_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from headtohead.study import environment

    environment.commit.cache_clear()
    monkeypatch.setitem(os.environ, "H2H_COMMIT", "abc123")
    assert environment.commit() == "abc123"
    environment.commit.cache_clear()


@pytest.mark.slow
@pytest.mark.page
def test_equal_cache_and_equal_time_from_end_to_end(story: Path, tmp_path: Path) -> None:
    given = study(
        story, arms=["sharing:tie=kv", "standard"], shape="cache", length=["tokens", "time"], seeds=2
    )
    result = given.run(tmp_path, workers=2, quiet=True)
    assert not result.summary.left
    assert {row.n for row in result.verdicts} == {2}
    assert [(row.shape, row.length) for row in result.verdicts] == [("cache", "tokens"), ("cache", "time")]
    assert len(result.headlines()) == 1
    assert "at equal tokens and cache" in result.headlines()[0]
    assert "at equal time and cache" in result.headlines()[0]
    specs = [run.spec() for run in Store(tmp_path).runs()]
    assert {spec.cache_bytes_per_token for spec in specs} == {256}
    assert {text for spec in specs for text in spec.layers} == {"sharing:tie=kv", "standard:kv_heads=2"}
    # A second start uses the seconds stored in the lock.
    seconds = json.loads((tmp_path / "study.lock.json").read_text())["seconds"]
    again = given.run(tmp_path, workers=1, quiet=True)
    assert again.summary.done == 0
    assert again.manifest == result.manifest == h2h.open_study(tmp_path).manifest
    assert json.loads((tmp_path / "study.lock.json").read_text())["seconds"] == seconds
    if find_spec("altair"):
        page = (tmp_path / "report.html").read_text()
        assert page.count("<h3>How budgets were solved</h3>") == 2
        assert "ms per step, the baseline" in page
        assert page.index("at equal time and cache") < page.index("<h2>")
        shown = result._repr_html_()
        assert shown.count("<h4>") == 2
        assert "shape cache, length time</h4>" in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": -4}, "workers=-4"),
        ({"threads": 0}, "threads=0"),
        ({"threads": 100_000}, "threads=100000"),
    ],
)
def test_invalid_workers_and_threads_are_rejected(
    story: Path, tmp_path: Path, given: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        study(story).run(tmp_path, quiet=True, **given)  # type: ignore[arg-type]
    if "workers" in given:
        with pytest.raises(UserError, match=message):
            h2h.run_toy("smoke", tmp_path, device="cpu", quiet=True, **given)
    assert not list(tmp_path.glob("runs/*"))
