"""Execute the unfinished runs of a plan, and show and count what happens to them."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.estimate import Work
from headtohead.common.numbers import short_count
from headtohead.common.progress import Display
from headtohead.common.stop import Stop
from headtohead.study.plan.branches import drop_checkpoints
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import Plan
from headtohead.study.plan.population import group_populations
from headtohead.study.run.cluster.engine import Engine
from headtohead.study.run.cluster.executor import ClusterExecutor
from headtohead.study.run.cluster.shipping import study_inputs
from headtohead.study.run.events import Event
from headtohead.study.run.executor import Executor, InProcess, WorkerPool
from headtohead.study.run.scoring import is_done
from headtohead.study.run.training import UNFINISHED
from headtohead.study.store.manifest import metric_label
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import RunDirectory, Store


@dataclass
class Summary:
    """How one execution of a study ended."""

    done: int = 0
    """Runs finished in this execution."""
    left: int = 0
    """Runs without a result; after a stop also those that lack a requested probe."""
    stopped: bool = False
    """Whether a stop was requested."""
    trouble: list[str] = field(default_factory=list)
    """Error messages."""
    unreported: bool = False
    """Whether the verdicts or the page could not be written."""


def execute(
    store: Store,
    plan: Plan,
    execution: ExecutionSettings,
    display: Display,
    *,
    workers: int = 1,
    seconds: float = math.inf,
    later: Sequence[Work] = (),
    engine: Engine | None = None,
    planning: ExecutionSettings | None = None,
) -> Summary:
    """Execute every run that has no result and take missing probes; stop cleanly on Ctrl-C or after `seconds`.

    `engine` executes them on a cluster; `planning` are then the settings of this machine.
    `later` is work of a later execution, which the estimate of the time left includes.
    """
    probes, pending = plan.spec.probes, pending_runs(store, plan)
    portable = all(composed.portable for run in pending for composed in plan.composed(run))
    if engine is not None and not portable:
        raise UserError(
            "an arm is a class that no file contains, which other nodes cannot load: save it in a file"
        )
    if engine is None and (len(pending) < 2 or not portable):
        workers, execution = 1, dataclasses.replace(execution, devices=())
    groups = group_populations(pending, planning or execution)
    at_once = sum(sorted(map(len, groups))[-workers:])
    display.begin(len(plan.runs), [work_of(plan, run) for run in pending], later, at_once)
    monitor = Monitor(store, plan, display)
    summary = monitor.summary
    stop = Stop.after(seconds, lambda: summary.stopped)
    executor: Executor
    if engine is not None:
        inputs = study_inputs(plan, pending, execution.data_dir)
        executor = ClusterExecutor(
            store, execution, engine, inputs, probes=probes, stop=stop, planning=planning
        )
    elif workers > 1:
        executor = WorkerPool(store, execution, workers, probes=probes, stop=stop)
    else:
        executor = InProcess(store, execution, plan.layers, probes=probes, stop=stop)
    if workers > 1 and execution.devices:
        display.note(f"{workers} workers on {', '.join(execution.devices)}")
    passes = [group for group in groups if len(group) > 1]
    if passes:
        rows = sorted({len(group) for group in passes})
        display.note(
            f"{sum(map(len, passes))} runs are trained as populations: {len(passes)} passes of "
            f"{' or '.join(map(str, rows))} rows"
        )
    executor.submit(pending)
    try:
        with _interruptible(summary, executor):
            executor.events(monitor.handle, monitor.say)
    finally:
        display.end()
    store.check_present()
    # Repeated here in case a process was killed between a branch's result and this call.
    drop_checkpoints(store, plan.runs.values())
    summary.stopped = summary.stopped or (stop.late and not all(_done(store, run, probes) for run in pending))
    summary.left = sum(not _done(store, run, probes if summary.stopped else ()) for run in pending)
    return summary


def pending_runs(store: Store, plan: Plan) -> list[RunSpec]:
    """Return the runs that lack a result or a probe, without trunks whose branches are all done."""
    pending = [run for run in plan.runs.values() if not _done(store, run, plan.spec.probes)]
    wanted = {run.parent.run for run in pending if run.parent}
    return [run for run in pending if not run.branches or run.id in wanted]


def _done(store: Store, run: RunSpec, probes: tuple[str, ...]) -> bool:
    return is_done(store.run(run.id), () if run.branches else probes)


def work_of(plan: Plan, run: RunSpec) -> Work:
    """Return what the estimate of the time left needs to know about a run."""
    return Work(run.id, (run.layers, run.size), float(plan.tokens(run)), max(1.0, run.flops_per_token))


@contextmanager
def _interruptible(summary: Summary, executor: Executor) -> Iterator[None]:
    """Turn Ctrl-C or SIGTERM into a clean stop; a second Ctrl-C interrupts immediately.

    A second SIGTERM does not: batch systems send it to the job's shell, which forwards it, and to this process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: Any) -> None:
        if summary.stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        summary.stopped = True
        executor.stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Monitor:
    """Shows and counts the events of an execution."""

    def __init__(self, store: Store, plan: Plan, display: Display) -> None:
        self.store, self.plan, self.display = store, plan, display
        self.summary = Summary()
        self.contests = {entry.run: entry.contest for entry in reversed((*plan.trunks, *plan.entries))}

    def say(self, message: str) -> None:
        """Show and keep a message about the executor."""
        self.summary.trouble.append(message)
        self.display.note(message)

    def handle(self, event: Event) -> None:
        """Show and count an event."""
        run, display = self.plan.runs[event.run], self.display
        name = self._name(run)
        if event.kind in ("step", "compiling", "scoring", "probing") and not display.shows(run.id):
            return  # two workers had the run, because its lock was deleted, and the other one has ended it
        if event.kind == "started":
            display.started(run.id, name, run.steps)
        elif event.kind == "step":
            nats = math.nan if event.nats is None else event.nats
            display.stepped(run.id, event.step, nats, event.rate)
        elif event.kind == "compiling":
            display.compiling(run.id)
        elif event.kind == "scoring":
            display.scoring(run.id, event.share)
        elif event.kind == "probing":
            display.probing(run.id, event.share)
        elif event.kind == "warning":
            display.note(f"{name}: {event.message}")
        elif event.kind == "deferred":
            if event.message not in self.summary.trouble:
                self.summary.trouble.append(event.message)
                display.note(f"{name}: {event.message}")
        elif event.kind == "waiting":
            display.note(f"waiting for {name}, which {event.owner} is running")
        elif event.kind == "ended" and event.state not in UNFINISHED:
            self.summary.done += 1
            display.ended(run.id, _outcome(self.store.run(run.id)))

    def _name(self, run: RunSpec) -> str:
        contest = self.contests[run.id]
        task = f"{contest.corpus_label}, " if run.task else ""
        branch = f"{contest.branch} tokens, " if run.parent else ""
        return f"{run.label}, {task}{branch}seed {run.seed}"


def _outcome(folder: RunDirectory) -> str:
    result = folder.result()
    if result is None:
        return "unknown: "
    if result.tested is not None:
        speed = folder.costs().tokens_per_second
        rate = f", {short_count(speed)} tokens/s" if isinstance(speed, float) else ""
        metric = result.tested.metric
        return f"{result.tested.values[metric]:.4f} {metric_label(metric)}{rate}"
    if result.status == "diverged":
        return f"diverged at step {result.diverged_at}; recorded as a result"
    return f"{result.status}: {result.error or ''}"
