"""Forward what a study's runs log to trackers, without blocking the runs.

The executor's display signals that a run has logged something; the rows are read from its metrics.jsonl, whichever process
wrote them. Trackers run in their own thread: one that hangs delays no run, and one that raises is dropped with one warning.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from headtohead.common.progress import Display
from headtohead.integrations.sinks import Channel, Sink, TrackedRun
from headtohead.study.store.run_store import Store

_EVERY = 1.0
"""Seconds between reads of the same files."""
PATIENCE = 30.0
"""Seconds that trackers get at the end of a study to send the remaining rows."""


@contextmanager
def forwarding(display: Display, store: Store, study: str, sinks: Sequence[Sink]) -> Iterator[Display]:
    """Forward the rows of the runs that `display` shows to the trackers, until the end of the block."""
    if not sinks:
        yield display
        return
    follower = _Forwarder(store, study, sinks)

    def listen(run: str, ended: bool) -> None:
        follower.news.put((run, ended))
        follower.show_warnings(display)

    before, display.listener = display.listener, listen
    try:
        yield display
    finally:
        display.listener = before
        follower.close()
        follower.show_warnings(display)


@dataclass
class _Line:
    """One run on one tracker."""

    channel: Channel
    sent: set[tuple[int, bool]] = field(default_factory=set)
    """Step of each row sent, and whether it is one of training: a row of scores may have the same step."""


class _Forwarder:
    """The thread that sends rows to trackers."""

    def __init__(self, store: Store, study: str, sinks: Sequence[Sink]) -> None:
        self.store, self.study, self.sinks = store, study, list(sinks)
        self.lines: dict[tuple[int, str], _Line] = {}
        self.news: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self.warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._serve, name="trackers", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Send the remaining rows, waiting at most `PATIENCE` seconds."""
        self.closing.set()
        self.news.put(("", False))
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            names = ", ".join(sink.name for sink in self.sinks)
            self.warnings.put(f"tracking did not finish within {PATIENCE:.0f} s and was stopped ({names})")

    def show_warnings(self, display: Display) -> None:
        """Show pending warnings; must run in the thread that owns the display."""
        while not self.warnings.empty():
            display.note(self.warnings.get())

    def _serve(self) -> None:
        while True:
            ended = dict([self.news.get()])
            while not self.news.empty():
                run, over = self.news.get()
                ended[run] = ended.get(run, False) or over
            for run, over in ended.items():
                if run:
                    self._send(run, over)
            if self.closing.wait(_EVERY) and self.news.empty():
                break
        for run in dict.fromkeys(run for _, run in self.lines):
            self._send(run, True)

    def _send(self, run: str, ended: bool) -> None:
        """Send a run's new rows to every working tracker."""
        for sink in list(self.sinks):
            try:
                self._send_to(sink, run, ended)
            except (Exception, SystemExit) as error:
                self.sinks.remove(sink)
                self.lines = {key: line for key, line in self.lines.items() if key[0] != id(sink)}
                message = (str(error).strip() or "no message").splitlines()[0]
                self.warnings.put(
                    f"tracking by {sink.name} stopped, the study continues: {type(error).__name__}: {message}"
                )

    def _send_to(self, sink: Sink, run: str, ended: bool) -> None:
        folder, key = self.store.run(run), (id(sink), run)
        line = self.lines.get(key)
        if line is None:
            spec = folder.spec()
            name = f"{spec.label}, {spec.corpus.label}, {spec.size.name}, seed {spec.seed}"
            tracked = TrackedRun(run, name, self.study, self.store.path, spec.as_dict())
            line = self.lines[key] = _Line(sink.open(tracked))
        rows = folder.logged_rows()
        for row in rows:
            mark = (row.step, row.valid is None)
            if mark not in line.sent:
                line.channel.row(row.step, _numbers(structs.asdict(row)))
                line.sent.add(mark)
        if ended:
            del self.lines[key]
            result = folder.result()
            scores = {} if result is None else {"valid": result.valid, "test": result.test}
            numbers = _numbers({name: score.values for name, score in scores.items() if score is not None})
            status = "stopped" if result is None else result.status
            line.channel.end(status, rows[-1].step if rows else 0, numbers)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by name, such as `train/nats` or `valid/bits_per_byte`; other values are left out."""
    found = {}
    for name, value in row.items():
        inner = value.items() if isinstance(value, Mapping) else [(name, value)]
        group = name if isinstance(value, Mapping) else "train"
        for key, number in inner:
            if isinstance(number, int | float) and key != "step":
                found[f"{group}/{key}"] = float(number)
    return found
