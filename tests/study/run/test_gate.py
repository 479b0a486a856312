"""The causality gate of a study: a leak is rejected before training, or the arm is never called better."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headtohead as h2h
from headtohead import Study, StudyResult, open_study
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.model.check.gate import GateResult, Trial
from headtohead.model.decoder import Decoder
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.planner import plan_study
from headtohead.study.run import admission, scoring
from headtohead.study.store.manifest import read_manifest
from headtohead.study.store.run_store import Store

ARMS = Path(__file__).parents[2] / "mechanisms" / "user_arms.py"
SMALL = {"tokens": 640, "batch": 128, "seeds": 1, "lr": 5e-3, "context": 32}
FLAGS = ("--tokens", "640", "--batch", "128", "--seeds", "1", "--context", "32", "--workers", "1")


def study(story: Path, *names: str, **values: Any) -> Study:
    arms = ["standard", *(f"{ARMS}:{name}" for name in names)]
    return Study(**({"arms": arms, "corpus": f"file:{story}"} | SMALL | values))


def race(story: Path, out: Path, *words: str) -> object:
    arms = ["standard", f"{ARMS}:Peek", f"{ARMS}:Copy"]
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "race",
                "--arms",
                *arms,
                "--corpus",
                f"file:{story}",
                "--out",
                str(out),
                "--quiet",
                *FLAGS,
                *words,
            ]
        )
    return ended.value.code


@pytest.fixture(scope="module")
def allowed(story: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    folder = tmp_path_factory.mktemp("allowed")
    assert race(story, folder, "--allow-failed-check") == 0
    return open_study(folder)


def test_a_leak_is_rejected_before_anything_is_written(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert race(story, tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()
    message = capsys.readouterr().err
    assert f"arm '{ARMS}:Peek': it sees the future: changing tokens from position" in message
    assert "in training and evaluation mode" in message
    assert "--allow-failed-check" in message
    assert "Copy" not in message


def test_a_failed_check_is_on_every_verdict_sentence_and_page(allowed: StudyResult) -> None:
    peek, copy = allowed.verdicts
    assert peek.verdict in ("undecided", "worse")
    assert "it sees the future" in peek.failed_check[0]
    assert "after training, in 1 of 1 runs: it sees the future" in peek.failed_check[1]
    assert any("Peek failed its check" in note for note in peek.notes)
    assert "and Peek failed the causality check" in allowed.sentences()[0]
    assert "and Peek failed the causality check" in allowed.headlines()[0]
    assert copy.failed_check == []
    assert "failed the causality check" not in allowed.sentences()[1]
    assert json.loads((allowed.path / "verdicts.json").read_text())[0]["failed_check"] == peek.failed_check
    if find_spec("altair"):
        page = (allowed.path / "report.html").read_text()
        assert "and Peek failed the causality check" in page
        assert "Peek failed its check: it sees the future" in page


def test_a_reopened_study_keeps_its_failed_checks(allowed: StudyResult) -> None:
    again = open_study(allowed.path)
    assert again.verdicts == allowed.verdicts
    assert read_manifest(allowed.path / "study.json")[0].checks == allowed.manifest.checks


def test_every_trained_run_of_user_code_has_a_check_in_its_result(allowed: StudyResult) -> None:
    found = {run.spec().label: run.result().check for run in Store(allowed.path).runs()}
    assert found["standard"] is None
    assert found["Copy"] == GateResult()
    assert "it sees the future" in found["Peek"].failed[0]


def test_a_leak_in_the_trained_weights_alone_fails_after_training(story: Path, tmp_path: Path) -> None:
    (row,) = study(story, "Awakes").run(tmp_path, workers=1, quiet=True).verdicts
    assert row.failed_check == [f"after training, in 1 of 1 runs: {row.failed_check[0].partition(': ')[2]}"]
    assert "it sees the future" in row.failed_check[0]


@pytest.mark.slow
def test_the_check_after_training_changes_neither_weights_nor_scores(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for name in ("checked", "unchecked"):  # running means are buffers, which a pass in training mode changes
        chosen = study(story, arms=[f"{ARMS}:BatchNormed"], tokens=256)
        chosen.run(tmp_path / name, workers=1, quiet=True, allow_failed_check=True)
        runs += Store(tmp_path / name).runs()
        monkeypatch.setattr(scoring, "check_trained", lambda *given: GateResult())
    checked, unchecked = (run.result() for run in runs)
    assert checked.check.failed
    assert not unchecked.check.failed
    assert checked.test == unchecked.test
    assert runs[0].weights.read_bytes() == runs[1].weights.read_bytes()


def checks(chosen: Study, **settings: Any) -> Any:
    return admission.check_plan(plan_study(chosen.spec), ExecutionSettings(), **settings)


def test_passed_checks_are_cached_and_changed_files_are_checked_again(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(ARMS.read_text())
    calls = []

    def counted(model: Decoder, trial: Trial, **settings: Any) -> GateResult:
        calls.append(trial)
        leaks = "Peek" in model.arms[0].text
        return GateResult(failed=("it sees the future",) if leaks else ())

    monkeypatch.setattr(admission, "check_causality_halving", counted)
    base = {"arms": ["standard", f"{mine}:Copy"]}
    for values, wanted in (
        ({}, 1),
        ({}, 1),
        ({"seeds": 2}, 1),
        ({"context": 64}, 2),
        ({"precision": "bf16"}, 3),
    ):
        assert checks(study(story, **(base | values)))[0].failed == ()
        assert len(calls) == wanted, values
    mine.write_text(ARMS.read_text() + "\n# edited\n")
    checks(study(story, **base))
    assert len(calls) == 4
    for _ in range(2):
        with pytest.raises(UserError, match="sees the future"):
            checks(study(story, arms=["standard", f"{mine}:Peek"]))
    assert len(calls) == 6, "a failed check is repeated at every start"


def test_built_in_arms_are_not_checked(story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "check_causality_halving", None)
    assert checks(study(story, arms=["standard", "sharing:tie=kv"])) == ()


class Mixes(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x.cumsum(1).flip(1))


def test_classes_passed_in_python_are_checked(story: Path) -> None:
    wrapped = h2h.wrap(lambda shape: Mixes(shape.width), name="mixes")
    with pytest.raises(UserError, match="arm 'mixes': it sees the future"):
        checks(study(story, arms=["standard", wrapped]))


@pytest.mark.slow
def test_marks_are_in_the_notes_and_warnings_are_lines(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = study(story, "Rolls", "Idle", tokens=128).run(tmp_path, workers=1)
    rolls, idle = result.verdicts
    assert any("Rolls: the same input gives another output the second time" in note for note in rolls.notes)
    assert not any("second time" in note for note in idle.notes)
    assert "Idle: the gradient of blocks.0.mechanism.unused is zero everywhere" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [1, 2])
def test_an_arm_that_raises_is_rejected_with_file_and_line(story: Path, tmp_path: Path, workers: int) -> None:
    with pytest.raises(UserError, match=rf"{ARMS}, line \d+, in forward: \w+: no such luck"):
        study(story, "Raises", tokens=128).run(tmp_path, workers=workers, quiet=True)
    assert not list(tmp_path.glob("runs/*"))


def test_an_arm_that_raises_may_be_a_recorded_failure(story: Path, tmp_path: Path) -> None:
    arm = study(story, "Raises", tokens=128)
    result = arm.run(tmp_path, workers=1, quiet=True, allow_failed_check=True)
    assert result.verdicts[0].failed == 1
    assert "no such luck" in result.manifest.checks[0].failed[0]
    failed = next(run.result() for run in Store(tmp_path).runs() if run.state() == "failed")
    assert failed is not None
    assert re.fullmatch(r"\w+: no such luck \(line \d+ of \w+\.py\)", failed.error or "")


def test_memory_that_runs_out_in_the_check_is_a_warning(story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(admission, "check_causality_halving", full)
    (found,) = checks(study(story, "Copy", batch=192))  # not in the cache
    assert "it could not be checked before training: no room" in found.warnings[0]


@pytest.mark.parametrize(
    ("task", "message"), [("grammar:train=60", "right padding"), ("recall:train=60,pairs=3,queries=2", "")]
)
def test_padding_is_checked_if_a_task_has_it(task: str, message: str) -> None:
    arms = ["standard", f"{ARMS}:IgnoresPadding"]
    chosen = Study(arms=arms, tasks=[task], causal=False, tokens=1500, batch=300, seeds=1)
    if message:
        with pytest.raises(UserError, match=message):
            checks(chosen)
    else:
        assert checks(chosen)[0].failed == ()


PAPER = """
[study]
arms = ["standard", {{arm = "{arm}", name = "peek"}}]
seeds = 2
corpus = "file:{corpus}"
context = 32
tokens = 256
batch = 128
[scale.smoke]
[scale.small]
[scale.paper]
[[claim]]
id = "p.1"
statement = "peek is better"
published = "yes"
at = {{size = "nano"}}
criteria = [{{kind = "difference", arm = "peek", expect = "better"}}]
"""


@pytest.mark.slow
def test_reproduce_rejects_a_leak_or_leaves_its_claims_open(story: Path, tmp_path: Path) -> None:
    paper = tmp_path / "p.toml"
    paper.write_text(PAPER.format(arm=f"{ARMS}:Peek", corpus=story))

    def reproduced(*words: str) -> object:
        given = (
            "--scale",
            "small",
            "--out",
            str(tmp_path / "out"),
            "--device",
            "cpu",
            "--workers",
            "1",
            "--quiet",
        )
        with pytest.raises(SystemExit) as ended:
            main(["reproduce", str(paper), *given, *words])
        return ended.value.code

    assert reproduced() == 2
    assert reproduced("--allow-failed-check") == 0
    (claim,) = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert claim["direction"] == "open"
    assert "peek failed the causality check" in claim["reason"]
