"""Fault tolerance of a study: processes die, disks fill up, files change and clocks jump."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headtohead import Study
from headtohead.common.errors import UserError
from headtohead.common.progress import Plain
from headtohead.common.stop import NEVER
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.planner import plan_study
from headtohead.study.run import executor
from headtohead.study.run.deaths import MAX_DEATHS
from headtohead.study.run.events import Event
from headtohead.study.run.execute import Monitor, work_of
from headtohead.study.run.executor import WorkerPool
from headtohead.study.store.lease import LEASE_SECONDS, LeaseManager, owner_of
from headtohead.study.store.run_store import Store
from headtohead.training.checkpoint import latest_checkpoint
from tests import processes

SMALL = {"arms": ["standard", "sharing:tie=kv"], "batch": 256, "seeds": 2, "lr": 5e-3}


def results(folder: Path) -> dict[str, str]:
    """Return result.json of every run, as text: bit for bit."""
    return {run.id: (run.path / "result.json").read_text() for run in Store(folder).runs()}


def study(story: Path, **values: Any) -> Study:
    return Study(**(SMALL | {"corpus": f"file:{story}", "tokens": 2560} | values))


def run_script(text: str, *arguments: object, timeout: float = 300) -> str:
    """Run Python source in a process of its own; return what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def same_after_deaths(folder: Path, settings: dict[str, Any], seed: int, deaths: int) -> None:
    """Run a study without faults and one that is killed `deaths` times: their results are the same."""
    Study(**settings).run(folder / "whole", workers=1, quiet=True)
    killed = processes.start(processes.run_with_kills, settings, folder / "killed", seed, deaths)
    assert processes.ended(killed) == 0
    assert results(folder / "killed") == results(folder / "whole")
    assert not list((folder / "killed").glob("runs/*/lock"))


@pytest.mark.slow
def test_a_study_killed_at_random_moments_ends_with_the_same_results(story: Path, tmp_path: Path) -> None:
    same_after_deaths(tmp_path, SMALL | {"corpus": f"file:{story}", "tokens": 2560}, seed=1, deaths=6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
def test_a_study_killed_twenty_times_ends_with_the_same_results(
    story: Path, tmp_path: Path, seed: int
) -> None:
    same_after_deaths(tmp_path, SMALL | {"corpus": f"file:{story}", "tokens": 12_800}, seed, deaths=20)


def test_a_worker_whose_parent_is_killed_saves_its_newest_step(story: Path, tmp_path: Path) -> None:
    (run,) = plan_study(study(story, arms=["standard"], seeds=1, tokens=2_560_000).spec).compared()
    store = Store(tmp_path)
    store.make()
    order = {
        "store": str(tmp_path),
        "execution": dataclasses.asdict(ExecutionSettings(save_every=1e9)),
        "runs": [run.as_dict()],
        "probes": [],
        "seconds": 1e9,
    }
    folder = store.run(run.id)
    parent = processes.start(processes.parent_of_a_worker, order, folder.path / "metrics.jsonl")
    assert processes.ended(parent) == -signal.SIGKILL
    processes.until(lambda: not (folder.path / "lock").exists())
    checkpoint, warnings = latest_checkpoint(folder.checkpoints)
    assert not warnings
    assert checkpoint is not None
    assert folder.logged_rows()[-1].step <= checkpoint.step < run.steps
    assert folder.state() == "stopped"


def test_a_study_that_is_deleted_while_it_runs_is_one_error(story: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    deleting = arm(
        tmp_path,
        "Deleting",
        f"__import__('shutil').rmtree({str(out)!r}) if os.path.exists({str(out / 'study.json')!r}) else None",
    )
    with pytest.raises(UserError, match="out was deleted while the study was running"):
        study(story, arms=[deleting, "standard"], seeds=1).run(out, workers=1, quiet=True)
    assert not out.exists()


def test_a_run_of_two_workers_may_report_after_its_end(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_study(study(story, arms=["standard"], seeds=1).spec)
    (run,) = plan.runs
    display, step = Plain(), Event("step", run, step=1, nats=1.0, rate=1.0)
    display.begin(1, [work_of(plan, plan.runs[run])])
    monitor = Monitor(Store(tmp_path), plan, display)
    for event in (Event("started", run), Event("ended", run, state="done"), step, Event("compiling", run)):
        monitor.handle(event)
    assert "[1/1] standard, seed 1" in capsys.readouterr().out


def test_a_log_directory_that_is_a_link_is_not_written_to(story: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "worker-1.log").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "logs").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links are not followed"):
        study(story, seeds=1).run(tmp_path / "out", workers=2, quiet=True)
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["mine"]


def executors(story: Path, folder: Path, count: int, victim: int) -> None:
    """Run a study with several executors, one of which is killed (none if `victim` is -1)."""
    arms = ["standard", "sharing:tie=kv", "diagonal"]
    settings = SMALL | {"arms": arms, "corpus": f"file:{story}", "tokens": 2560, "seeds": 4}
    log = folder.with_suffix(".log")
    all_of_them = [processes.start(processes.executor, settings, folder, log) for _ in range(count)]
    if victim >= 0:
        processes.until(lambda: processes.holds_a_lease(all_of_them[victim], folder))
        all_of_them[victim].kill()
    codes = [processes.ended(one) for one in all_of_them]
    assert codes == [-signal.SIGKILL if number == victim else 0 for number in range(count)]
    done = log.read_text().split()
    assert len(done) == 12
    assert len(set(done)) == 12, "a run was done twice"
    assert len(results(folder)) == 12
    assert not list(folder.glob("runs/*/lock"))


def test_two_executors_one_of_them_killed_do_every_run_once(story: Path, tmp_path: Path) -> None:
    executors(story, tmp_path / "study", 2, victim=1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [-1, 0, 5])
def test_eight_executors_do_every_run_once(story: Path, tmp_path: Path, victim: int) -> None:
    executors(story, tmp_path / "study", 8, victim)


def foreign_lock(folder: Path) -> Path:
    """Create the lock of a live owner on another host."""
    folder.mkdir(exist_ok=True)
    with LeaseManager().acquire(folder) as lease:
        assert lease is not None
        owner = owner_of(folder / "lock")
        assert owner is not None
        text = (folder / "lock").read_text()
    assert owner.host in text
    (folder / "lock").write_text(text.replace(owner.host, "elsewhere"))
    return folder / "lock"


def taken(leases: LeaseManager, folder: Path) -> bool:
    with leases.acquire(folder) as lease:
        return lease is not None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace this process's clock by one that the test controls."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_lock_from_another_host_expires_when_its_heartbeat_ends_and_not_before(
    tmp_path: Path, clock: list[float]
) -> None:
    folder = tmp_path / "run"
    lock = foreign_lock(folder)
    leases = LeaseManager()
    for _ in range(5):
        os.utime(lock)
        assert not taken(leases, folder)
        clock[0] += LEASE_SECONDS - 1
        assert not taken(leases, folder)
    clock[0] += 2
    assert taken(leases, folder)


@pytest.mark.parametrize("shift", [-86_400, 86_400])
def test_a_clock_set_back_or_ahead_does_not_end_a_live_lease(
    tmp_path: Path, clock: list[float], shift: int
) -> None:
    folder = tmp_path / "run"
    lock = foreign_lock(folder)
    before = time.time() + shift
    os.utime(lock, (before, before))
    leases = LeaseManager()
    assert not taken(leases, folder)
    clock[0] += LEASE_SECONDS / 2
    assert not taken(leases, folder)
    assert not taken(LeaseManager(), folder), "a new executor has to observe the lock first"


def test_a_clock_that_goes_back_does_not_change_results(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study(story, seeds=1).run(tmp_path / "usual", workers=1, quiet=True)
    real, began = time.time, time.time()
    monkeypatch.setattr(time, "time", lambda: began - 50 * (real() - began))
    study(story, seeds=1).run(tmp_path / "back", workers=1, quiet=True)
    assert results(tmp_path / "back") == results(tmp_path / "usual")
    for run in Store(tmp_path / "back").runs():
        assert run.costs().train_seconds > 0


def test_a_lock_of_a_dead_local_process_is_taken_over_immediately(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    text = """
        import os, signal, sys
        from pathlib import Path
        from headtohead.study.store.lease import LeaseManager
        with LeaseManager().acquire(Path(sys.argv[1])) as lease:
            assert lease is not None
            if os.fork() == 0:
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text), str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    owner = owner_of(folder / "lock")
    assert owner is not None
    assert owner.dead
    assert taken(LeaseManager(), folder)


FILE = """
import os, signal
import torch
from torch import nn

class {name}(nn.Module):
    def __init__(self, shape, options):
        super().__init__()
        self.v = nn.Linear(shape.width, shape.width)
        self.calls = 0

    def forward(self, x, frame):
        self.calls += x.device.type != "meta"
        if self.calls > 5:
            {action}
        return self.v(x)
"""


def arm(folder: Path, name: str, action: str) -> str:
    path = folder / f"{name.lower()}.py"
    path.write_text(FILE.format(name=name, action=action))
    return f"{path}:{name}"


def test_an_arm_that_runs_out_of_memory_is_a_result_and_the_rest_continues(
    story: Path, tmp_path: Path
) -> None:
    greedy = arm(tmp_path, "Greedy", "torch.empty(2**50)")
    done = study(story, arms=["standard", greedy], seeds=1).run(tmp_path / "out", workers=1, quiet=True)
    assert done.summary.left == 0
    states = {run.spec().label: run.state() for run in Store(tmp_path / "out").runs()}
    assert states == {"standard": "done", "Greedy": "out of memory"}


@pytest.mark.slow
def test_an_arm_that_kills_its_process_fails_after_two_deaths_and_the_rest_continues(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deadly = arm(tmp_path, "Deadly", "os.kill(os.getpid(), signal.SIGKILL)")
    arms = ["standard", deadly, "diagonal"]
    done = study(story, arms=arms, seeds=1).run(tmp_path / "out", workers=2)
    assert done.summary.left == 0
    states = {run.spec().label: run.state() for run in Store(tmp_path / "out").runs()}
    assert states == {"standard": "done", "Deadly": "failed", "diagonal": "done"}
    printed = capsys.readouterr().out
    assert printed.count("was killed (signal 9), often because memory ran out") >= 2
    assert "is recorded as failed" in printed


@pytest.mark.slow
def test_an_arm_that_exits_without_an_error_fails_after_two_deaths(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quits = arm(tmp_path, "Quits", "os._exit(0)")
    done = study(story, arms=["standard", quits], seeds=1).run(tmp_path / "out", workers=2)
    assert done.summary.left == 0
    states = {run.spec().label: run.state() for run in Store(tmp_path / "out").runs()}
    assert states == {"standard": "done", "Quits": "failed"}
    printed = capsys.readouterr().out
    assert printed.count("a worker ended with code 0 in the middle of a run") == 2
    assert "is recorded as failed: its process ended with code 0 in the middle of a run (2 times)" in printed


@pytest.mark.parametrize(
    ("kinds", "deaths"),
    [(["started", "ended"], 0), (["started", "deferred"], 0), (["started", "deferred", "probing"], 2)],
)
def test_a_worker_that_exits_without_an_error_has_died_if_its_run_goes_on(
    tmp_path: Path, kinds: list[Any], deaths: int
) -> None:
    said: list[str] = []
    pool = Exiting(Store(tmp_path), kinds)
    pool.events(lambda event: None, said.append)
    assert len([line for line in said if line.startswith("a worker ended with code 0")]) == deaths


class Exiting(WorkerPool):
    """A worker exits without an error after events of these kinds, and so does the one that replaces it."""

    def __init__(self, store: Store, kinds: list[Any]) -> None:
        super().__init__(store, ExecutionSettings(), 1, stop=NEVER)
        self.kinds = kinds
        self.submit([None])  # type: ignore[list-item]  which run does not matter

    def _spawn(self, index: int) -> Any:
        worker = Worker(index, self.store)
        for kind in self.kinds if sum(self.deaths.values()) < MAX_DEATHS else []:
            self.queue.put((worker.process, Event(kind, "0" * 16)))
        return worker


class Worker(executor._Worker):
    """A worker that has exited without an error."""

    def __init__(self, index: int, store: Store) -> None:
        self.index, self.log, self.run = index, store.path / "worker.log", ""
        ended = SimpleNamespace(pid=0)
        self.process = SimpleNamespace(process=ended, alive=False, wait=str, ask_to_stop=int)  # type: ignore[assignment]


def test_a_corpus_that_changes_between_runs_is_reported_and_nothing_is_recorded(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    shutil.copy(story, text)
    switch = f"from pathlib import Path; Path({str(text)!r}).open('a').write('and a new line')"
    running = (
        f"self.calls == 6 and Path({str(tmp_path / 'out' / 'study.json')!r}).exists()"  # not during the gate
    )
    tamper = arm(tmp_path, "Tamper", f"{switch} if {running} else None")
    arms = [tamper, "standard"]
    first = Study(**(SMALL | {"arms": arms, "corpus": f"file:{text}", "tokens": 2560, "seeds": 1}))
    done = first.run(tmp_path / "out", workers=1)
    assert done.summary.left == 1
    assert f"corpus file:{text} has changed since this run was planned" in capsys.readouterr().out
    assert {run.state() for run in Store(tmp_path / "out").runs()} == {"done", "waiting"}
    shutil.copy(story, text)
    again = first.run(tmp_path / "out", workers=1, quiet=True)
    assert (again.summary.done, again.summary.left) == (1, 0)


def test_a_corpus_that_was_changed_gives_new_runs(story: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    shutil.copy(story, text)
    settings = SMALL | {"corpus": f"file:{text}", "tokens": 2560, "seeds": 1}
    assert Study(**settings).run(tmp_path / "out", workers=1, quiet=True).summary.done == 2
    text.write_text(text.read_text() + "the end.\n")
    assert Study(**settings).run(tmp_path / "out", workers=1, quiet=True).summary.done == 2
    assert len(Store(tmp_path / "out").runs()) == 4


FULL = """
    import subprocess, sys
    from pathlib import Path
    from headtohead import Study
    from headtohead.study.store.run_store import Store

    story, folder = sys.argv[1], Path(sys.argv[2])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], check=True)
    study = lambda: Study(arms=["standard", "sharing:tie=kv"], corpus="file:" + story, tokens=2560, batch=256,
                          seeds=1, lr=5e-3).run(folder / "out", workers=1, save_every=0.0, quiet=True)
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(2_800_000))
    first = study()
    print(first.summary.left, [text.partition(": ")[2] for text in first.summary.trouble])
    print({run.state() for run in Store(folder / "out").runs()})
    ballast.unlink()
    print(study().summary.left)
    for run in Store(folder / "out").runs():
        print(run.id, repr((run.path / "result.json").read_text()))
"""


def test_a_full_disk_stops_the_study_and_nothing_is_lost(story: Path, tmp_path: Path) -> None:
    try:
        subprocess.run(["unshare", "-rm", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("users may not mount a tmpfs on this machine (unshare -rm)")
    (tmp_path / "disk").mkdir()
    command = [
        "unshare",
        "-rm",
        sys.executable,
        "-c",
        textwrap.dedent(FULL),
        str(story),
        str(tmp_path / "disk"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "mount" in done.stderr and done.returncode:
        pytest.skip("users may not mount a tmpfs on this machine (mount)")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "2 ['No space left on device', 'No space left on device']"
    assert "failed" not in lines[1]
    assert lines[2] == "0"
    study(story, tokens=2560, seeds=1).run(tmp_path / "whole", workers=1, quiet=True)
    whole = {f"{name} {text!r}" for name, text in results(tmp_path / "whole").items()}
    assert set(lines[3:]) == whole


@pytest.mark.slow
def test_a_file_size_limit_stops_the_study_and_nothing_is_lost(story: Path, tmp_path: Path) -> None:
    text = """
        import resource, signal, sys
        from headtohead import Study
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        study = Study(arms=["standard", "diagonal"], corpus="file:" + sys.argv[1], tokens=1280, batch=256, seeds=1)
        from headtohead.study.plan.planner import plan_study
        plan_study(study.spec)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        done = study.run(sys.argv[2], workers=1, save_every=0.0, quiet=True)
        print(done.summary.left, done.summary.trouble)
    """
    (tmp_path / "out").mkdir()
    printed = run_script(text, story, tmp_path / "out")
    assert printed.startswith("2 ")
    assert "File too large" in printed
    assert not list((tmp_path / "out").glob("runs/*/result.json"))
    again = Study(arms=["standard", "diagonal"], corpus=f"file:{story}", tokens=1280, batch=256, seeds=1)
    assert again.run(tmp_path / "out", workers=1, quiet=True).summary.left == 0


def test_an_unwritable_directory_is_named(story: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    if os.access(locked, os.W_OK):
        # root can write anywhere except to a read-only file system
        command = "mount -t tmpfs -o ro tmpfs {0} && exec {1} -m headtohead race --arms standard diagonal --corpus file:{2} --tokens 2560 --batch 256 --seeds 1 --out {0}/out"
        command = command.format(locked, sys.executable, story)
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, check=False
        )
        if "unshare" in done.stderr or "mount" in done.stderr:
            pytest.skip("this user can write anywhere and mount nothing")
    else:
        arguments = [
            "race",
            "--arms",
            "standard",
            "diagonal",
            "--corpus",
            f"file:{story}",
            "--out",
            f"{locked}/out",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "headtohead", *arguments], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"h2h: cannot write to {locked}/out: ")
    assert done.stderr.count("\n") == 1


def test_a_damaged_result_is_set_aside_and_its_run_repeated(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study(story).run(tmp_path, workers=1, quiet=True)
    before = results(tmp_path)
    first, second = Store(tmp_path).runs()[:2]
    (first.path / "result.json").write_text(before[first.id][:100])
    changed = before[second.id].replace('"status": "done"', '"status":  "done"')
    (second.path / "result.json").write_text(changed)
    assert {first.state(), second.state()} == {"damaged"}
    done = study(story).run(tmp_path, workers=1)
    assert done.summary.done == 2
    printed = capsys.readouterr().out
    assert f"damaged file {first.path / 'result.json'}" in printed
    assert "checksum mismatch" in printed
    assert results(tmp_path) == before
    assert (second.path / "result.json.damaged").read_text() == changed


def test_a_damaged_spec_is_written_again(story: Path, tmp_path: Path) -> None:
    study(story, seeds=1).run(tmp_path, workers=1, quiet=True)
    run = Store(tmp_path).runs()[0]
    spec = (run.path / "spec.json").read_text()
    (run.path / "spec.json").write_text(spec.replace('"seed": 1', '"seed": 2'))
    (run.path / "result.json").unlink()
    study(story, seeds=1).run(tmp_path, workers=1, quiet=True)
    assert json.loads((run.path / "spec.json").read_text()) == json.loads(spec)
    assert (run.path / "spec.json.damaged").is_file()
