"""Child processes for tests, forked from one server that has imported everything: a start takes milliseconds."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from headtohead import Study
from headtohead.report import page, templates  # noqa: F401  so that no child imports the chart library
from headtohead.study.run import worker
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


def executor(settings: dict[str, Any], folder: Path, log: Path) -> None:
    """Run a study as one of several executors, and log the id of each result it writes."""
    finish = RunDirectory.finish

    def logged(run: RunDirectory, result: dict[str, Any]) -> None:
        with open(log, "a", encoding="utf-8") as stream:
            stream.write(f"{run.id}\n")
        finish(run, result)

    RunDirectory.finish = logged  # type: ignore[method-assign]
    race(settings, folder, save_every=0.2)


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
