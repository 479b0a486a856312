"""Studies as SLURM job arrays, with a stand-in for SLURM."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from headtohead import SlurmJob, Study
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.study.config.spec import build_study
from headtohead.study.config.toml_text import toml_text
from headtohead.study.plan.planner import plan_study
from headtohead.study.run import slurm as slurm_module
from headtohead.study.run.execute import Summary, _interruptible
from headtohead.study.run.slurm import TaskResources, check_shared, slurm_seconds
from headtohead.study.store.run_store import Store
from tests import processes
from tests.results import run_result, stored
from tests.slurm_stand_in import JOB, Slurm

SMALL: dict[str, Any] = {"arms": ["standard", "diagonal"], "tokens": 512, "batch": 256, "seeds": 2}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    found = Slurm(tmp_path / "cluster", monkeypatch)
    yield found
    found.kill_all()


def study(story: Path, **values: Any) -> Study:
    return Study(**(SMALL | {"corpus": f"file:{story}"} | values))


def words(story: Path, out: Path, *more: str) -> list[str]:
    """Return the words of a race of four runs on SLURM."""
    given = ["race", "--arms", "standard", "diagonal", "--corpus", f"file:{story}", "--tokens", "512"]
    return [*given, "--batch", "256", "--seeds", "2", "--out", str(out), "--on", "slurm", *more]


def ended(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as found:
        main(arguments)
    assert isinstance(found.value.code, int)
    return found.value.code


def command_in(script: str) -> list[str]:
    """Return the words of the command that each task runs."""
    return shlex.split(re.findall(r"^    exec (.*)$", script, re.MULTILINE)[0])


def test_the_script_has_what_was_given(story: Path, tmp_path: Path, slurm: Slurm) -> None:
    out = tmp_path / "it's 100% mine"
    options = ["--sbatch", "partition=gpu", "comment=a b", "--sbatch", "time=2:00:00", "exclusive"]
    options += [
        "--jobs",
        "3",
        "--threads",
        "2",
        "--workers",
        "4",
        "--device",
        "cuda",
        "--no-compile",
        "--quiet",
        "--allow-failed-check",
    ]
    assert (
        ended(words(story, out, *options, "--data-dir", str(tmp_path), "--no-keep-weights", "--extend")) == 0
    )
    text = (out / "slurm" / "job.sh").read_text()
    directives = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert directives == [
        "--array=0-2",
        f"--output={tmp_path}/it's 100%% mine/slurm/%A_%a.log",
        f"--chdir={Path.cwd()}",
        "--open-mode=append",
        "--requeue",
        "--signal=B:TERM@120",
        "--job-name=h2h-it-s-100-mine",
        "--cpus-per-task=4",
        "--gres=gpu:2",
        "--partition=gpu",
        "--comment=a b",
        "--time=2:00:00",
        "--exclusive",
    ]
    command = command_in(text)
    assert command[:5] == [sys.executable, "-m", "headtohead", "race", str(out / "slurm" / "study.toml")]
    expected = "--device cuda --workers 4 --threads 2 --data-dir DATA --no-keep-weights --no-compile"
    expected += " --allow-failed-check --quiet --extend --time-limit 6960s"
    assert command[5:] == ["--out", str(out), *expected.replace("DATA", str(tmp_path)).split()]
    assert not list(out.glob("*.json")), "the tasks plan on their own device"


def test_what_to_type_next_is_printed(
    story: Path, tmp_path: Path, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert ended(words(story, out)) == 0
    printed = capsys.readouterr().out
    assert f"written:  {out}/slurm/job.sh: 4 array tasks, 1 CPU each" in printed
    assert f"submit:   sbatch {out}/slurm/job.sh" in printed
    assert f"watch:    h2h watch {out}" in printed
    assert not (slurm.spool / "job.sh").exists()
    assert ended(words(story, out, "--submit", "--jobs", "2")) == 0
    printed = capsys.readouterr().out
    assert f"job:      {JOB}; squeue -j {JOB} lists its tasks, scancel {JOB} ends them" in printed
    assert slurm.script == (out / "slurm" / "job.sh").read_text()
    nonce = (out / "slurm" / "nonce").read_text()
    assert ended(words(story, out)) == 0
    assert JOB not in capsys.readouterr().out, "squeue no longer lists it"
    (slurm.spool / "queue").write_text("RUNNING")
    assert ended(words(story, out)) == 0
    assert f"job {JOB}, submitted earlier, is still in the queue" in capsys.readouterr().out
    assert (out / "slurm" / "nonce").read_text() == nonce, "tasks in the queue expect it"


def test_the_study_file_is_the_study(story: Path, tmp_path: Path, slurm: Slurm) -> None:
    arms = ["standard", {"arm": "sharing:tie=kv", "name": 'K=V "tied"', "lr": 1e-05, "model": {"tied": True}}]
    given = study(
        story, arms=arms, margin=None, seeds=[3, 5], circuit_lr={"qk": "30x"}, name="Größe", tokens="512"
    )
    result = given.run(tmp_path / "out", on="slurm", quiet=True)
    assert result.job is not None
    values = tomllib.loads((tmp_path / "out/slurm/study.toml").read_text())
    assert build_study(values) == given.spec
    assert result.summary.left == 4


def test_toml_text_writes_what_toml_reads() -> None:
    given = {
        "a b": {"c.d": [1, 2.5, True, float("inf"), 1e-300]},
        "text": 'a"\\\u00e9\U0001f600\t',
        "none": None,
    }
    expected = {key: value for key, value in given.items() if value is not None}
    assert tomllib.loads(toml_text(given)) == expected


def test_a_class_is_named_by_its_file_and_rejected_without_one(
    story: Path, tmp_path: Path, slurm: Slurm
) -> None:
    class Mine(nn.Module):
        def __init__(self, shape: Any, options: Any) -> None:
            super().__init__()
            self.v = nn.Linear(shape.width, shape.width)

        def forward(self, x: Any, frame: Any) -> Any:
            return self.v(x)

    with pytest.raises(UserError, match="arm 'Mine' is a class that no file contains"):
        study(story, arms=["standard", Mine]).run(tmp_path / "out", on="slurm", quiet=True)
    assert not (tmp_path / "out").exists()
    given = study(story, arms=["standard", {"arm": Linear, "name": "linear"}])
    assert given.portable_values()["arms"] == ["standard", {"arm": f"{__file__}:Linear", "name": "linear"}]


class Linear(nn.Module):
    """A mechanism in a file."""

    def __init__(self, shape: Any, options: Any) -> None:
        super().__init__()
        self.v = nn.Linear(shape.width, shape.width)

    def forward(self, x: Any, frame: Any) -> Any:
        """Return the values."""
        return self.v(x)


BAD = {
    "a short option": (["--sbatch", "p=gpu"], "long name of an option"),
    "dashes": (["--sbatch=--partition=gpu"], "long name of an option"),
    "a newline": (["--sbatch", "comment=a\n#SBATCH --array=0-999"], "control character"),
    "no value": (["--sbatch", "partition="], "takes a value"),
    "a value with a dash": (["--sbatch", "partition=-x"], "takes a value"),
    "a value with a backslash": (["--sbatch", "comment=a\\b"], "takes a value"),
    "array": (["--sbatch", "array=0-3"], "--jobs sets the number of tasks"),
    "signal": (["--sbatch", "signal=KILL"], "cannot be given"),
    "twice": (["--sbatch", "mem=1G", "mem=2G"], "given twice"),
    "a wrong time": (["--sbatch", "time=2h"], "HH:MM:SS"),
    "a short time": (["--sbatch", "time=4:59"], "at least 5 minutes"),
    "jobs": (["--jobs", "-1"], "jobs=-1"),
    "resources": (["--cpus-per-run", "-1"], "cpus_per_run=-1"),
    "unlimited resources": (["--gpus-per-run", "inf"], "gpus_per_run=inf"),
    "a setting": (["--set", "warmup=9"], "warmup"),
    "data": (["--corpus", "enwik8"], "enwik8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_before_anything_is_written(
    name: str, story: Path, tmp_path: Path, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    more, message = BAD[name]
    given = words(story, tmp_path / "out", "--submit")
    if more[0] == "--corpus":
        del given[given.index("--corpus") : given.index("--tokens")]
    assert ended([*given, *more]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out" / "slurm").exists()
    assert not (slurm.spool / "job.sh").exists()


def test_an_arm_that_fails_the_causality_check_is_not_submitted(
    story: Path, tmp_path: Path, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "from torch import nn\n\n\nclass Peek(nn.Module):\n    def __init__(self, shape, options):\n"
    source += "        super().__init__()\n        self.v = nn.Linear(shape.width, shape.width)\n\n"
    source += "    def forward(self, x, frame):\n        return self.v(x).flip(1)\n"
    (tmp_path / "peek.py").write_text(source)
    given = words(story, tmp_path / "out", "--submit", "--quiet", "--workers", "1")
    given[given.index("diagonal")] = f"{tmp_path}/peek.py:Peek"
    assert ended(given) == 2
    assert "Nothing was trained" in capsys.readouterr().err
    assert not (slurm.spool / "job.sh").exists()


def test_options_of_slurm_without_slurm_are_rejected(story: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="add --on slurm"):
        study(story).run(tmp_path / "out", slurm=SlurmJob(submit=True))
    with pytest.raises(UserError, match="apply to --on ray and --on slurm"):
        study(story).run(tmp_path / "out", gpus_per_run=1.0)
    with pytest.raises(UserError, match="unknown value for on 'pbs'"):
        study(story).run(tmp_path / "out", on="pbs")  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        main(["reproduce", "sharing", "--on", "slurm"])


def test_options_that_a_task_cannot_have_are_rejected(story: Path, tmp_path: Path, slurm: Slurm) -> None:
    class Tracker:
        name = "mine"

        def open(self, run: Any) -> Any: ...

    with pytest.raises(UserError, match="trackers by name"):
        study(story).run(tmp_path / "out", on="slurm", track=Tracker())
    with pytest.raises(UserError, match="save_every"):
        study(story).run(tmp_path / "out", on="slurm", save_every=5.0)


def test_sbatch_is_missing_or_refuses(
    story: Path,
    tmp_path: Path,
    slurm: Slurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (slurm.spool / "refusal").write_text("sbatch: notice\nsbatch: error: invalid account\n")
    out = tmp_path / "out"
    assert ended(words(story, out, "--submit", "--quiet")) == 2
    expected = f"h2h: sbatch rejected {out}/slurm/job.sh: sbatch: error: invalid account\n"
    assert capsys.readouterr().err == expected
    assert not (out / "slurm" / "job_id").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ended(words(story, tmp_path / "other", "--submit")) == 2
    assert "--submit needs sbatch, which is not installed here" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


MOUNTS = """\
/dev/sda1 / xfs rw 0 0
tmpfs /scratch\\040node tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
overlay /home/container overlay rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("/home/me/races", ""),
        ("/data/races", ""),
        ("/scratch node/races", "file system tmpfs"),
        ("/home/container/races", "file system overlay"),
        ("/var/tmp/races", "below /var/tmp"),
    ],
)
def test_a_directory_of_one_node_is_rejected(
    folder: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("H2H_SHARED_DIR", raising=False)
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(slurm_module, "_MOUNTS", tmp_path / "mounts")
    if not why:
        check_shared(Path(folder))
        return
    with pytest.raises(UserError, match=rf"{folder} is on this machine only \({why}\).*H2H_SHARED_DIR=1"):
        check_shared(Path(folder))
    monkeypatch.setenv("H2H_SHARED_DIR", "1")
    check_shared(Path(folder))


def test_a_study_on_one_node_is_one_error_and_nothing_is_written(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("H2H_SHARED_DIR", raising=False)
    monkeypatch.setattr(slurm_module, "_NODE_LOCAL_PATHS", (str(tmp_path),))
    with pytest.raises(UserError, match="needs a directory that all nodes share"):
        study(story).run(tmp_path / "out", on="slurm")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("1:00:00", 3600),
        ("2-1", 176_400),
        ("1-0:30", 88_200),
        ("1-1:1:1", 90_061),
    ],
)
def test_time_limits_of_slurm(text: str, seconds: float) -> None:
    assert slurm_seconds(text) == seconds
    assert slurm_seconds("UNLIMITED") == float("inf")
    assert SlurmJob().task_seconds == float("inf")


def test_resources_are_those_of_the_runs_of_a_task() -> None:
    assert TaskResources.of_runs(3, 1.5, 0.5) == TaskResources(5, 2)
    assert TaskResources.of_runs(1, 0.0, 0.0) == TaskResources(1, 0)
    assert str(TaskResources(2, 1)) == "2 CPUs and 1 GPU"


def test_directives_that_are_given_replace_the_usual_ones(story: Path, tmp_path: Path, slurm: Slurm) -> None:
    job = SlurmJob(sbatch=["gres=gpu:h200:1", "cpus-per-task=6", "job-name=mine"], submit=True)
    result = study(story).run(tmp_path / "out", on="slurm", slurm=job, device="cuda", quiet=True)
    assert result.job is not None
    assert result.job.id == JOB
    assert slurm.directive("gres") == "gpu:h200:1"
    assert slurm.directive("cpus-per-task") == "6"
    assert slurm.directive("job-name") == "mine"


def test_lengths_in_seconds_are_left_to_the_tasks(
    story: Path, tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*given: object) -> None:
        raise AssertionError("timed on the machine that submits")

    monkeypatch.setattr("headtohead.study.plan.step_timing.FrozenStepTimes.__call__", measured)
    result = study(story, length=["time", "tokens"]).run(tmp_path / "out", on="slurm", quiet=True)
    assert result.job is not None
    assert tomllib.loads((tmp_path / "out/slurm/study.toml").read_text())["length"] == ["time", "tokens"]
    assert not (tmp_path / "out" / "study.lock.json").exists()


def test_tasks_are_as_many_as_can_be_trained_at_the_same_time(
    story: Path, tmp_path: Path, slurm: Slurm
) -> None:
    def tasks(name: str, **settings: Any) -> int:
        how = {"workers": settings.pop("workers", 0)}
        job = study(story, **settings).run(tmp_path / name, on="slurm", quiet=True, **how).job
        assert job is not None
        return job.tasks

    assert tasks("few", seeds=3) == 6
    assert tasks("many", seeds=9) == 8
    assert tasks("pairs", seeds=3, workers=2) == 3
    assert tasks("tuned", seeds=1, arms=["standard"], tune={"lr": [1e-3, 2e-3, 4e-3]}) == 3


def test_failed_runs_are_reset_once_by_the_machine_that_submits(
    story: Path, tmp_path: Path, slurm: Slurm
) -> None:
    out = tmp_path / "out"
    (run,) = plan_study(study(story, arms=["standard"], seeds=1).spec).compared()
    Store(out).make()
    folder = Store(out).run(run.id)
    folder.open(run)
    folder.finish(run_result("failed", error="mine"))
    result = study(story, arms=["standard"], seeds=1).run(out, on="slurm", quiet=True)
    assert result.job is None, "a failed run is a result"
    result = study(story, arms=["standard"], seeds=1).run(out, on="slurm", retry_failed=True, quiet=True)
    assert result.job is not None
    assert not folder.finished()
    assert "--retry" not in result.job.script.read_text()


def test_a_damaged_result_is_left_to_the_tasks(story: Path, tmp_path: Path, slurm: Slurm) -> None:
    out = tmp_path / "out"
    study(story, arms=["standard"], seeds=1).run(out, workers=1, quiet=True)
    (run,) = Store(out).runs()
    (run.path / "result.json").write_text("{")
    result = study(story, arms=["standard"], seeds=1).run(out, on="slurm", quiet=True)
    assert result.job is not None
    assert (result.summary.left, run.finished()) == (1, False)


def test_a_second_sigterm_does_not_interrupt_and_a_second_ctrl_c_does() -> None:
    class Idle:
        def stop(self) -> None: ...

    summary = Summary()
    with _interruptible(summary, Idle()):  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert summary.stopped
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_finished_study_is_judged_and_no_job_is_written(story: Path, tmp_path: Path, slurm: Slurm) -> None:
    out = tmp_path / "out"
    study(story, seeds=1).run(out, workers=1, quiet=True)
    result = study(story, seeds=1).run(out, on="slurm", quiet=True)
    assert result.job is None
    assert result.verdicts
    assert not (out / "slurm").exists()


@pytest.fixture
def task(story: Path, tmp_path: Path, slurm: Slurm) -> Slurm:
    """One submitted array task."""
    job = SlurmJob(jobs=1, submit=True)
    study(story, seeds=1).run(tmp_path / "out", on="slurm", slurm=job, quiet=True)
    return slurm


def replace_race(slurm: Slurm, command: str) -> None:
    """Let the tasks run a shell command instead of `h2h race`."""
    text = re.sub(
        r"^    exec .*$", lambda _: f"    exec bash -c {shlex.quote(command)}", slurm.script, flags=re.M
    )
    (slurm.spool / "job.sh").write_text(text)


def log_of(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "slurm").glob("*.log")))


@pytest.mark.parametrize("code", [0, 1, 2, 137])
def test_a_task_that_is_done_or_wrong_is_not_requeued(task: Slurm, tmp_path: Path, code: int) -> None:
    replace_race(task, f"exit {code}")
    task.start_all()
    task.run()
    assert (task.codes, task.requeued) == ([code], [])
    assert (tmp_path / "out/slurm/job_id").read_text().strip() == JOB


def test_a_task_is_requeued_while_it_saves_something(task: Slurm, tmp_path: Path) -> None:
    runs = tmp_path / "out" / "runs"
    command = (
        f'n=$(ls {runs} | wc -l); [ "$n" -lt 5 ] || exit 0; mkdir -p {runs}/$n/checkpoint/step-1; exit 3'
    )
    replace_race(task, command)
    task.start_all()
    task.run()
    assert task.requeued == [f"{JOB}_0"] * 5
    assert task.codes == [0] * 6
    assert not list((tmp_path / "out/slurm").glob("*.stalled"))


def test_a_task_that_never_saves_anything_ends_with_a_line(task: Slurm, tmp_path: Path) -> None:
    replace_race(task, "exit 3")
    task.start_all()
    task.run()
    assert (task.codes, task.requeued) == ([0, 0, 1], [f"{JOB}_0"] * 2)
    assert "three starts in a row saved nothing" in log_of(tmp_path / "out")


def test_the_signal_reaches_the_race_and_the_task_is_requeued(task: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = (
        f'[ ! -f {out}/told ] || exit 0; trap "touch {out}/told; mkdir {out}/runs/step-1; exit 3" TERM; '
    )
    replace_race(task, command + f"touch {out}/ready; while :; do sleep 0.02; done")
    task.start_all()
    processes.until((out / "ready").exists)
    task.tasks[0].terminate()
    task.run()
    assert (task.codes, task.requeued) == ([0, 0], [f"{JOB}_0"])


def test_a_race_that_is_signaled_before_it_can_save_is_requeued(task: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    replace_race(task, f"[ ! -f {out}/ready ] || exit 0; touch {out}/ready; exec sleep 600")
    task.start_all()
    processes.until((out / "ready").exists)
    task.tasks[0].terminate()
    task.run()
    assert (task.codes, task.requeued) == ([0, 0], [f"{JOB}_0"])


def test_a_canceled_task_is_not_requeued(task: Slurm, tmp_path: Path) -> None:
    (task.spool / "queue").write_text("COMPLETING\n")
    replace_race(task, "exit 3")
    task.start_all()
    task.run()
    assert (task.codes, task.requeued) == ([3], [])
    assert "SLURM has ended task 4242_0; its work is saved" in log_of(tmp_path / "out")


def test_a_task_that_scontrol_does_not_requeue_says_how_to_continue(task: Slurm, tmp_path: Path) -> None:
    (task.spool.parent / "bin" / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    replace_race(task, "exit 3")
    task.start_all()
    task.run()
    assert task.codes == [3]
    assert f"continue with: sbatch {tmp_path}/out/slurm/job.sh" in log_of(tmp_path / "out")


@pytest.mark.parametrize("content", [None, "another\n"])
def test_a_task_that_sees_another_directory_ends(task: Slurm, tmp_path: Path, content: str | None) -> None:
    replace_race(task, f"touch {tmp_path}/raced")
    nonce = tmp_path / "out/slurm/nonce"
    nonce.unlink() if content is None else nonce.write_text(content)
    task.start_all()
    task.run()
    assert (task.codes, task.requeued) == ([2], [])
    assert "is not the directory that this job was written in" in log_of(tmp_path / "out")
    assert not (tmp_path / "raced").exists()


def check_finished(story: Path, out: Path, whole: Path, **settings: Any) -> None:
    """Compare a study with an undisturbed one: same results, every run finished once, report and files intact."""
    study(story, **settings).run(whole, workers=1, quiet=True)
    assert stored(out, "result.json") == stored(whole, "result.json")
    named = re.findall(r"^\[\d+/\d+\] (.*?): [\d.]+ bits per byte", log_of(out), re.MULTILINE)
    assert sorted(set(named)) == sorted(named), "a run was done twice"
    assert json.loads((out / "verdicts.json").read_text()) == json.loads(
        (whole / "verdicts.json").read_text()
    )
    assert "</html>" in (out / "report.html").read_text()
    assert not list(out.glob("runs/*/lock"))
    assert not list(out.glob(".*.tmp"))


LONG = {"tokens": 38_400, "seeds": 3}


def submit(story: Path, out: Path, jobs: int, **settings: Any) -> None:
    job = SlurmJob(jobs=jobs, submit=True)
    result = study(story, **settings).run(out, on="slurm", slurm=job)
    assert result.job is not None
    assert result.summary.left == 6


@pytest.mark.slow
def test_an_array_does_every_run_once(story: Path, tmp_path: Path, slurm: Slurm) -> None:
    out = tmp_path / "out"
    submit(story, out, 3, seeds=3)
    slurm.start_all()
    slurm.run()
    assert (slurm.codes, slurm.requeued) == ([0, 0, 0], [])
    check_finished(story, out, tmp_path / "whole", seeds=3)
    slurm.start_all()
    slurm.run()
    assert slurm.codes == [0] * 6, "tasks that find the study finished"


def training(slurm: Slurm, out: Path, index: int) -> bool:
    """Return whether a task trains a run: it has the lease and has logged a step."""
    return any(
        (owner := run.owner()) is not None
        and owner.pid == slurm.race_of(index)
        and (run.path / "metrics.jsonl").is_file()
        and not run.finished()
        for run in Store(out).runs()
    )


@pytest.mark.slow
def test_signaled_tasks_save_and_are_requeued(story: Path, tmp_path: Path, slurm: Slurm) -> None:
    out = tmp_path / "out"
    submit(story, out, 2, **LONG)
    slurm.start_all()
    for index in (0, 1):
        processes.until(lambda index=index: training(slurm, out, index))
        slurm.tasks[index].send_signal(signal.SIGTERM)
    slurm.run()
    assert sorted(slurm.requeued) == [f"{JOB}_0", f"{JOB}_1"]
    assert slurm.codes == [0] * 4
    assert log_of(out).count("repeat the same command to continue") == 2
    check_finished(story, out, tmp_path / "whole", **LONG)


@pytest.mark.slow
def test_a_killed_race_and_a_lost_node_lose_nothing(story: Path, tmp_path: Path, slurm: Slurm) -> None:
    out = tmp_path / "out"
    submit(story, out, 3, **LONG)
    slurm.start_all()
    processes.until(lambda: training(slurm, out, 0))
    os.kill(slurm.race_of(0), signal.SIGKILL)
    processes.until(lambda: training(slurm, out, 1))
    slurm.lose_node(1)
    slurm.run()
    assert sorted(slurm.codes) == [0, 0, 137]
    assert slurm.requeued == [], "a race that is killed may be killed again: only SLURM restarts it"
    check_finished(story, out, tmp_path / "whole", **LONG)
