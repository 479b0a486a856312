"""Child processes for tests, forked from one server that has imported everything: a start takes milliseconds."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from headtohead import Study, UserError, examine_study, judge, load, open_study
from headtohead.cli.main import dispatch
from headtohead.data.shards import prepare
from headtohead.report import page, templates  # noqa: F401  so that no child imports the chart library
from headtohead.report.dashboard.status import StatusReader
from headtohead.report.gather import gather
from headtohead.study.config.spec import build_study
from headtohead.study.judge.analysis import Analysis
from headtohead.study.plan.freeze import planned_seeds
from headtohead.study.plan.plan import Plan
from headtohead.study.run import worker
from headtohead.study.store.archive import export_runs, import_runs
from headtohead.study.store.run_store import RunDirectory, Store
from headtohead.training import checkpoint
from headtohead.training.trainer import Trainer

PATIENCE = 600.0
"""Seconds to wait for another process: far more than needed on a busy machine, so that only a hang exceeds it."""


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.processes"])
    return context


def start(function: Callable[..., Any], *arguments: Any, **named: Any) -> BaseProcess:
    """Start a function of this module in a separate process."""
    process: BaseProcess = _server().Process(target=_alone, args=(function, arguments, named))
    process.start()
    return process


def ended(process: BaseProcess) -> int:
    """Wait for a process to end; return its exit code."""
    process.join(PATIENCE)
    assert process.exitcode is not None, f"the process did not end within {PATIENCE:.0f} s"
    return process.exitcode


def _alone(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    function(*arguments, **named)


def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"the condition was not met within {PATIENCE:.0f} s"
        time.sleep(0.01)


def race(settings: dict[str, Any], folder: Path, **how: Any) -> None:
    """Run a study to completion."""
    left = Study(**settings).run(folder, quiet=True, **({"workers": 1} | how)).summary.left
    assert not left


def run_with_kills(settings: dict[str, Any], folder: Path, seed: int, deaths: int) -> None:
    """Run a study in `deaths` processes that are killed midway, and in one that completes.

    Half of the kills happen inside a training step, half before, inside or after a write, a sync or a rename: at random
    points that are the same on every machine.
    """
    for death in range(deaths + 1):
        child = os.fork()
        if child == 0:
            if death < deaths:
                _schedule_kill(random.Random(seed * 1000 + death))
            left = Study(**settings).run(folder, workers=1, save_every=0.0, quiet=True).summary.left
            os._exit(3 if left else 0)
        _, status = os.waitpid(child, 0)
        assert status == (signal.SIGKILL if death < deaths else 0), f"start {death + 1} ended with {status}"


def _schedule_kill(choose: random.Random) -> None:
    write = checkpoint._write
    if choose.random() < 0.5:
        steps, step = choose.randrange(1, 4), Trainer._whole_step

        def last(trainer: Trainer, parts: Any) -> Any:
            nonlocal steps
            steps -= 1
            if steps == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(trainer, parts)

        Trainer._whole_step = last  # type: ignore[method-assign]
        return
    left = choose.randrange(1, 60)

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if real is write:
                    with open(arguments[0], "wb") as stream:
                        stream.write(arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    checkpoint._write = deadly(write)
    os.rename, os.replace, os.fsync = deadly(os.rename), deadly(os.replace), deadly(os.fsync)


def plan_seeds(folder: Path, seeds: Sequence[int]) -> None:
    """Wait for the file `go`, then plan one seed after the other; each is added after results existed."""
    until((folder / "go").is_file)
    for seed in seeds:
        planned_seeds(folder, empty_plan(seed), started=True)


def empty_plan(seed: int) -> Plan:
    """Return a plan of one seed without runs."""
    spec = dataclasses.replace(build_study({"arms": ["standard"]}), seeds=(seed,))
    return Plan(spec, {}, (), (), {}, {})


def executor(settings: dict[str, Any], folder: Path, log: Path) -> None:
    """Run a study as one of several executors, and log the id of each result it writes."""
    finish = RunDirectory.finish

    def logged(run: RunDirectory, result: dict[str, Any]) -> None:
        with open(log, "a", encoding="utf-8") as stream:
            stream.write(f"{run.id}\n")
        finish(run, result)

    RunDirectory.finish = logged  # type: ignore[method-assign]
    race(settings, folder, save_every=0.2)


def read_with_irregular_files(settings: dict[str, Any], folder: Path, log: Path, every_command: bool) -> None:
    """Put a pipe and an endless device in place of each file of a study, one at a time, and read the study.

    The outcome of each command is logged: nothing, or the message of a UserError. Any other error ends the process.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (8 * 2**30, 8 * 2**30))
    page.write_report = _gather_all
    commands = study_commands(settings, folder)
    run = Store(folder).runs()[0]
    files = [path for path in [*folder.iterdir(), *run.path.rglob("*")] if path.is_file()]
    with open(log, "w", encoding="utf-8") as stream:
        for path in [*sorted(files), folder / "claims.json", run.path / "lock"]:
            kept = folder.with_name("kept")
            if path.exists():
                path.rename(kept)
            for kind in ("pipe", "device"):
                for name in commands if every_command else ("report", "runs", "doctor"):
                    path.unlink(missing_ok=True)
                    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
                    stream.write(f"{path.name} {kind} {name}: {outcome(commands[name])}\n")
                    stream.flush()
            path.unlink(missing_ok=True)
            if kept.exists():
                kept.rename(path)


def _gather_all(path: Path, analysis: Analysis, damage: list[str], stamp: str) -> Path:
    for contest in analysis.manifest.contests():
        gather(path, analysis.manifest, contest, analysis.results, damage)
    return path / "report.html"


def study_commands(settings: dict[str, Any], folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the commands that read a study, by name."""
    return {
        "report": lambda: open_study(folder).write(quiet=True),
        "runs": lambda: dispatch(["runs", str(folder)]),
        "doctor": lambda: examine_study(folder, quiet=True),
        "watch": lambda: StatusReader(folder).look(),
        "export": lambda: export_runs(Store(folder), folder.with_name("export.tar.gz")),
        "load": lambda: load(Store(folder).runs()[0].path),
        "race": lambda: Study(**settings).run(folder, workers=1, quiet=True),
    }


def outcome(command: Callable[[], Any]) -> str:
    """Call a command; return nothing, or the message of an error that the command line prints as one line."""
    try:
        command()
    except (UserError, OSError) as error:
        return str(error)
    return ""


def import_in_little_memory(source: Path, folder: Path) -> None:
    """Import a file that must be rejected, with 300 MB of memory above what the process has."""
    limit_memory(300 * 10**6)
    try:
        import_runs(Store(folder), source)
    except UserError:
        return
    raise AssertionError("it was accepted")


def prepare_in_little_memory(path: Path, tokenizer: str, cache: Path, memory: int) -> None:
    """Prepare a corpus with `memory` bytes above what the process has."""
    limit_memory(memory)
    found = prepare(f"file:{path}", tokenizer, cache=cache)
    assert found.splits["train"].bytes > 0.89 * path.stat().st_size


def read_irregular_user_files(folder: Path, story: Path) -> None:
    """Give a pipe and an endless device as corpus, tokenizer, study file and table; each must raise a UserError."""
    resource.setrlimit(resource.RLIMIT_DATA, (8 * 2**30, 8 * 2**30))
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("/dev/zero")
    for path in (folder / "pipe", folder / "link", Path("/dev/zero")):
        for command in (
            lambda path=path: prepare(f"file:{path}", cache=folder),
            lambda path=path: prepare(f"file:{story}", f"file:{path}", cache=folder),
            lambda path=path: Study.from_file(path),
            lambda path=path: judge(path, arm="arm", seed="seed", metric="loss"),
            lambda path=path: import_runs(Store(folder), path),
        ):
            assert "not a regular file" in outcome(command)


def limit_memory(more: int) -> None:
    """Limit the private memory of this process to `more` bytes above what it has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    limit = more + 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def parent_of_a_worker(order: dict[str, Any], metrics: Path) -> None:
    """Start a worker process, then kill this process, its parent, after the worker has logged some rows.

    The pipe of events closes first, so that the worker always writes an event that nobody reads.
    """

    def rows() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    order_in, order_out = os.pipe()
    event_in, event_out = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(order_in, 0)
        os.dup2(event_out, 1)
        for end in (order_in, order_out, event_in, event_out):
            os.close(end)
        sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115  until it exits
        try:
            worker.main()
        finally:
            os._exit(0)
    os.close(order_in)
    os.close(event_out)
    with open(order_out, "w") as orders:
        orders.write(json.dumps(order) + "\n")
        orders.flush()
        until(rows)
        os.close(event_in)
        seen = rows()
        until(lambda: rows() > seen + 2 or os.waitpid(child, os.WNOHANG)[0])
        os.kill(os.getpid(), signal.SIGKILL)


def holds_a_lease(process: BaseProcess, folder: Path) -> bool:
    """Return whether a process holds the lease of a run of the study."""
    owners = [run.owner() for run in Store(folder).runs()]
    return any(owner is not None and owner.pid == process.pid for owner in owners)
