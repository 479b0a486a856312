"""What all benchmarks share: cases with their rows in a file, failures as rows, and contenders timed in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headtohead.bench.clock import allocated, mean_seconds, peak_bytes, release, wait
from headtohead.common.errors import DamagedFile, UserError, first_line
from headtohead.common.files import finite, json_text, output_target, read_json, write_output
from headtohead.study.environment import commit, provenance

Progress = Callable[[str, float], None]
Row = dict[str, Any]
Step = Callable[[], object]
UNUSABLE = "CUDA error"
"""Text of errors after which the device is unusable in this process."""


def silent(message: str, share: float) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Case:
    """One row to measure: the facts that identify it, its name while it is measured, and the measurement."""

    facts: Row
    label: str
    measure: Callable[[Progress], Row]


class Rows:
    """Measured rows, stored in a file if one is given; a row is identified by its facts and its commit."""

    def __init__(self, benchmark: str, out: str | Path | None, facts: Mapping[str, Any]) -> None:
        self.benchmark, self.facts = benchmark, {**provenance(), **facts}
        self.path = None if out is None else Path(out)
        self.rows: list[Row] = []
        if self.path is None:
            return
        if not self.path.parent.is_dir():
            raise UserError(f"out={out}: no directory {self.path.parent}")
        if (target := output_target(self.path)) is None:  # a device or a pipe has no rows to continue
            return
        if not os.access(target.parent, os.W_OK):
            raise UserError(f"out={out}: directory {target.parent} is not writable")
        if target.exists():
            document = read_json(target, links=True)
            if not isinstance(document, dict) or document.get("benchmark") != benchmark:
                raise UserError(f"out={out} is not a file of the benchmark '{benchmark}'")
            rows = document.get("rows", [])
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise DamagedFile(f"damaged file {self.path}: its rows are not a list of tables")
            self.rows = rows

    def find(self, facts: Mapping[str, Any]) -> Row | None:
        """Return the row with these facts from this commit."""
        own = (row for row in self.rows if row.get("commit") == commit())
        return next((row for row in own if _has(row, facts)), None)

    def missing(self, cases: Iterable[Case]) -> list[Case]:
        """Return the cases to measure: those without a row, or whose row holds the reason of an error or of a skip."""

        def unsettled(case: Case) -> bool:
            row = self.find(case.facts)
            return row is None or any(isinstance(row.get(key), str) for key in ("error", "skipped"))

        return [case for case in cases if unsettled(case)]

    def run(self, cases: Iterable[Case], progress: Progress) -> Row:
        """Measure the missing cases; return the document. A failed row that leaves the device unusable is the last."""
        missing = self.missing(cases)
        for index, case in enumerate(missing):

            def show(message: str, share: float, case: Case = case, index: int = index) -> None:
                progress(
                    f"{case.label}: {message}" if message else case.label, (index + share) / len(missing)
                )

            show("", 0.0)
            self.add(case.facts, case.measure(show))
            if UNUSABLE in self.rows[-1].get("failed", ""):
                break
        return self.document()

    def add(self, facts: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
        """Add a row; it replaces one with the same facts."""
        self.rows = [row for row in self.rows if not _has(row, facts)]
        self.rows.append({**facts, **provenance(), **measured})
        if self.path is not None:
            write_output(self.path, json_text(self.document()))

    def document(self) -> Row:
        """Return all rows with their shared facts and provenance."""
        document: Row = finite({"benchmark": self.benchmark, **self.facts, "rows": self.rows})
        return document


def _has(row: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in facts.items())


def in_a_line(error: Exception) -> str:
    """Return an error as one line: its type and the first line of its message."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    kind, message = type(error).__name__, first_line(error)
    return kind if message == kind else f"{kind}: {message}"[:300]


def attempt(work: Callable[..., Row], *given: Any, name: str = "failed") -> Row:
    """Return the result of `work`, or its error in one line under `name`; release cached memory."""
    try:
        return work(*given)
    except Exception as error:
        return {name: in_a_line(error)}
    finally:
        release()


def _nothing() -> None:
    """Placeholder step of a contender that is not built, failed or finished."""


@dataclass
class Contender:
    """A step that is timed in turns with others, and what was measured of it."""

    name: str
    build: Callable[[], Step]
    step: Step = _nothing
    error: str = ""
    """Why it failed; empty if it did not."""
    start_seconds: float = 0.0
    held: int = 0
    peak_bytes: int | None = None
    times: list[float] = field(default_factory=list)
    """Seconds of a step, one mean per round."""

    def start(self, device: torch.device, warm: int) -> None:
        """Build the step and run it `warm` times."""
        before, began = allocated(device), time.perf_counter()
        self.step = self.build()
        for _ in range(warm):
            self.step()
        wait(device)
        self.start_seconds = round(time.perf_counter() - began, 1)
        self.held = allocated(device) - before

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """On failure record the reason and release the contender's memory."""
        try:
            yield
        except Exception as error:
            self.error = in_a_line(error)
            self.end()

    def end(self) -> None:
        """Release the contender's memory."""
        self.step, self.build = _nothing, lambda: _nothing
        release()


def _working(contenders: Iterable[Contender]) -> list[Contender]:
    return [one for one in contenders if not one.error]


def take_turns(
    contenders: Sequence[Contender],
    device: torch.device,
    progress: Progress,
    *,
    warm: int,
    burst: int,
    rounds: int,
) -> list[Contender]:
    """Start every contender, then time `burst` steps of each in every round; return those that did not fail."""
    for index, one in enumerate(contenders):
        progress(f"{one.name}: building and first steps", 0.5 * index / len(contenders))
        with one.attempt():
            one.start(device, warm)
    for one in _working(contenders):
        with one.attempt():
            # Without what the other contenders hold.
            one.peak_bytes = peak_bytes(one.step, device, allocated(device) - one.held)
    for done in range(rounds):
        for one in _working(contenders):
            progress(f"{one.name}: round {done + 1} of {rounds}", 0.5 + 0.5 * done / rounds)
            with one.attempt():
                wait(device)
                one.times.append(mean_seconds(one.step, device, burst))
    return _working(contenders)
