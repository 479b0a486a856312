"""What runs on a node of a cluster: facts about it, and a task, which is one run or one population."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from headtohead.common.errors import UserError
from headtohead.common.stop import Stop, Stopped
from headtohead.study.environment import processor
from headtohead.study.plan.execution import layers_of
from headtohead.study.plan.plan import LayerTable
from headtohead.study.plan.population import group_populations
from headtohead.study.run.claim_loop import ClaimLoop
from headtohead.study.run.cluster.messages import (
    NodeFacts,
    Order,
    Post,
    Reply,
    TaskEnd,
    Versions,
)
from headtohead.study.run.cluster.run_files import SentFiles
from headtohead.study.run.cluster.shipping import (
    DATA,
    localized,
    may_share,
    owned_name,
    remove_abandoned,
    unpack_inputs,
    unpack_state,
    write_chunks,
)
from headtohead.study.run.events import Event
from headtohead.study.store.run_spec import run_spec_from
from headtohead.study.store.run_store import Store

_PREFIX = "h2h-task"
_FAILING_SECONDS = 30.0
"""After this time without a successful post the driver counts as gone."""


class Link(Protocol):
    """The connection of a task to its driver."""

    node: str
    """The engine's name of this node."""

    def post(self, post: Post) -> Reply:
        """Send news and return the answer; raises DriverGone if the driver has ended."""
        ...

    def fetch(self, offer: Any) -> Iterator[bytes]:
        """Yield the content of an offered file."""
        ...


class DriverGone(Exception):
    """The driver has ended; a task can send it nothing any more."""


def device_type(on_gpu: bool) -> str:
    """Return the name of this machine's first GPU, or of its processor."""
    return torch.cuda.get_device_name(0) if on_gpu and torch.cuda.is_available() else processor()


def node_facts(store: str, nonce: str, on_gpu: bool) -> NodeFacts:
    """Return the facts of this node."""
    return NodeFacts(socket.gethostname(), Versions.here(), device_type(on_gpu), _sees(store, nonce))


def _sees(store: str, nonce: str) -> bool:
    return may_share() and bool(nonce) and (Path(store) / nonce).is_file()


def run_task(order: Order, link: Link) -> TaskEnd:
    """Execute the runs of an order; return how it ended."""
    host = socket.gethostname()
    if problem := order.versions.differences(Versions.here()):
        return TaskEnd(order.task, "unfit", f"node {host} has {problem}", link.node)
    if order.device and (found := device_type(order.gpus > 0)) != order.device:
        return TaskEnd(order.task, "unfit", f"node {host} has {found} instead of {order.device}", link.node)
    if order.shared and not _sees(order.store, order.nonce):
        return TaskEnd(order.task, "unshared")
    if 0 < order.gpus < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(order.gpus)
    with Reporter(order.task, link) as reporter:
        try:
            inputs = unpack_inputs(order.inputs, reporter.fetch) if order.inputs else None
            with _store(order, reporter) as store:
                held = _execute(order, store, inputs, reporter)
        except Stopped:  # before all files had arrived
            held = False
        except (OSError, UserError) as error:  # a file cannot be written or read here
            return TaskEnd(order.task, "unfit", f"{error} (on node {host})", link.node)
    return TaskEnd(order.task, "held" if held else "returned")


@contextmanager
def _store(order: Order, reporter: Reporter) -> Iterator[Store]:
    """Yield the store of the study, or one in a directory of this task, whose files the reporter sends."""
    if order.shared:
        yield Store(Path(order.store))
        return
    root = Path(tempfile.gettempdir())
    remove_abandoned(root, _PREFIX)
    folder = root / owned_name(_PREFIX)
    folder.mkdir(mode=0o700)
    try:
        store = Store(folder)
        store.make()
        unpack_state(order.state, order.trunks, store.path, reporter.fetch)
        for run in order.runs:
            store.run(run["id"]).path.mkdir(exist_ok=True)
        reporter.watch([SentFiles(store.run(run["id"])) for run in order.runs])
        try:
            yield store
        finally:
            reporter.flush()
            reporter.watch([])  # the directory is deleted next
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _execute(order: Order, store: Store, inputs: Path | None, reporter: Reporter) -> bool:
    """Run the runs of an order; return whether another executor has one of them."""
    specs = [run_spec_from(record, record["id"]) for record in order.runs]
    execution = order.execution
    if inputs is not None:
        specs = [localized(spec, order.moved, inputs) for spec in specs]
        # Everything that the runs read is among the inputs.
        execution = dataclasses.replace(execution, data_dir=str(inputs / DATA))
    layers: LayerTable = {spec.layers: tuple(layers_of(spec)) for spec in specs}
    stop = Stop(reporter.stopped, reporter.deadline)
    loop = ClaimLoop(store, specs, execution, stop, reporter.emit, probes=order.probes, layers=layers)
    states = [loop.attempt(group) for group in group_populations(specs, execution)]
    return "held" in states


class Reporter:
    """Sends the events and changed files of a task, and receives the request to stop."""

    def __init__(self, task: str, link: Link) -> None:
        self.task, self.link = task, link
        self.deadline = math.inf
        """The time limit, a time of `time.monotonic`."""
        self._events: deque[Event] = deque()
        self._files: list[SentFiles] = []
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._every = 1.0
        self._failing = 0.0
        """Since when posts fail."""
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> Reporter:
        first = Post(self.task, host=socket.gethostname(), pid=os.getpid(), node=self.link.node)
        while not (reply := self._post(first)).accepted:
            time.sleep(0.2)
        if reply.seconds_left is not None:
            self.deadline = time.monotonic() + reply.seconds_left
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.flush()

    def emit(self, event: Event) -> None:
        """Take an event of a run."""
        self._events.append(event)
        if event.kind in ("started", "ended"):
            # The process may die any moment, and the driver counts how often a run that started did not end.
            self.send()

    def watch(self, files: list[SentFiles]) -> None:
        """Send the changes of these run directories from now on."""
        with self._sending:
            self._files = files

    def stopped(self) -> bool:
        """Return whether the driver asked to stop, or is gone."""
        return self._stop.is_set()

    def flush(self) -> None:
        """Send what is left; wait while the mailbox is full."""
        while not self.send():
            time.sleep(0.2)

    def fetch(self, wanted: dict[str, Path]) -> None:
        """Ask the driver for files by their sha256 and write them to these paths."""
        left = dict(wanted)
        while left and not self.stopped():
            offers = self._post(Post(self.task, wanted=list(left))).offers
            for sha256, offer in offers.items():
                write_chunks(left.pop(sha256), self.link.fetch(offer))
            if not offers:
                time.sleep(0.1)
        if left:
            raise Stopped

    def send(self, empty: bool = False) -> bool:
        """Post events and changed files, and with `empty` also if there are none; return False if the mailbox is full."""
        with self._sending:
            events = _latest([self._events.popleft() for _ in range(len(self._events))])
            changes = [change for files in self._files if (change := files.changes())]
            if not (events or changes or empty):
                return True
            if not self._post(Post(self.task, events, changes)).accepted:
                self._events.extendleft(reversed(events))
                return False
            for files in self._files:
                files.sent()
            return True

    def _post(self, post: Post) -> Reply:
        """Post; return a reply that asks to repeat it if that failed, or to stop if it has failed for a while."""
        try:
            reply = self.link.post(post)
            self._failing = 0.0
        except Exception as error:  # engines have many kinds
            self._failing = self._failing or time.monotonic()
            gone = isinstance(error, DriverGone) or time.monotonic() - self._failing > _FAILING_SECONDS
            reply = Reply(accepted=gone, stop=gone)
        if reply.stop:
            self._stop.set()
        self._every = reply.every
        return reply

    def _report(self) -> None:
        while not self._ended.wait(self._every):
            self.send(empty=True)  # the answer may be a request to stop


def _latest(events: list[Event]) -> list[Event]:
    """Return the events with only the last step and the last share of each measurement of a run."""
    last = {(event.kind, event.run): index for index, event in enumerate(events)}
    passing = ("step", "scoring", "probing")
    return [
        event
        for index, event in enumerate(events)
        if event.kind not in passing or last[event.kind, event.run] == index
    ]
