"""Progress display: live bars on a terminal, plain lines elsewhere, both with an estimate of the time left."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headtohead.common.estimate import Estimate, Work
from headtohead.common.numbers import short_count, short_time
from headtohead.common.terminal import is_terminal, printable, say

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

_LINE_EVERY = 15.0


@dataclass
class _Active:
    """A run in progress."""

    title: str
    steps: int
    step: int = 0


class Display:
    """Progress display of a study. The base class counts and prints nothing."""

    def __init__(self) -> None:
        self.runs = self.done = 0
        self.active: dict[str, _Active] = {}
        self.estimate = Estimate()
        self.listener: Callable[[str, bool], None] = lambda run, ended: None
        """Called with every run that has logged a row or has ended."""

    def begin(self, runs: int, work: Sequence[Work], later: Sequence[Work] = (), at_once: int = 0) -> None:
        """Start with the total number of runs and those to do; `later` is work of later executions.

        `at_once` is how many runs train at the same time, if that is known.
        """
        self.runs, self.done, self.active = runs, runs - len(work), {}
        self.estimate.begin(work, later, at_once)

    def started(self, run: str, title: str, steps: int) -> None:
        """Record the start of a run."""
        self.active[run] = _Active(title, steps)
        self.estimate.enter(run, "start")

    def shows(self, run: str) -> bool:
        """Return whether a run has started and not ended."""
        return run in self.active

    def stepped(self, run: str, step: int, nats: float, rate: float) -> None:
        """Record that a run has finished a step."""
        state = self.active[run]
        state.step = step
        self.estimate.trained(run, step / max(1, state.steps))
        loss = f"loss {nats / math.log(2):.3f} bits"
        self.show(run, f"step {step}/{state.steps}, {loss}, {short_count(rate)} tokens/s")
        self.listener(run, False)

    def compiling(self, run: str) -> None:
        """Record that a run compiles its model or loads it from the compile cache."""
        first = not any(state.phase == "compile" for state in self.estimate.active.values())
        self.estimate.enter(run, "compile")
        self.show(run, "compiling", urgent=first and not self.done)

    def scoring(self, run: str, share: float) -> None:
        """Record the share of an evaluation that is done."""
        self.estimate.enter(run, "score")
        self.show(run, f"scoring, {share:.0%} done")

    def probing(self, run: str, share: float) -> None:
        """Record the share of the probes that is done."""
        self.estimate.enter(run, "probe")
        self.show(run, f"probing, {share:.0%} done")

    def ended(self, run: str, message: str) -> None:
        """Record the end of a run and its outcome."""
        state = self.active.pop(run, None)
        self.estimate.end(run)
        self.done += 1
        self.line(f"[{self.done}/{self.runs}] {state.title if state else run}: {message}")
        self.listener(run, True)

    def show(self, run: str, message: str, urgent: bool = False) -> None:
        """Show what a run is doing."""

    def note(self, message: str) -> None:
        """Show a message to the user."""
        self.line(message)

    def line(self, message: str) -> None:
        """Show one line."""

    def end(self) -> None:
        """End the display."""

    def left(self) -> str:
        """Return the estimated time left as text, or an empty string if nothing is left."""
        if self.done >= self.runs and not self.estimate.later:
            return ""
        seconds = self.estimate.seconds_left()
        return "time left unknown" if seconds is None else f"about {short_time(seconds)} left"


class Plain(Display):
    """Plain lines: one at the end of each run, at most one every 15 seconds in between."""

    def begin(self, runs: int, work: Sequence[Work], later: Sequence[Work] = (), at_once: int = 0) -> None:
        """Print the amount of work."""
        super().begin(runs, work, later, at_once)
        self.line(f"{len(work)} of {runs} runs to do, {short_count(_tokens(work))} tokens to train")

    def show(self, run: str, message: str, urgent: bool = False) -> None:
        """Print a line if it is urgent or none was printed recently."""
        if urgent or time.monotonic() - self.last >= _LINE_EVERY:
            self.line(f"[{self.done}/{self.runs}] {self.active[run].title}: {message}")

    def line(self, message: str) -> None:
        """Print the message with the time left."""
        left = self.left()
        say(message + (f"; {left}" if left else ""), flush=True)
        self.last = time.monotonic()


class Live(Display):
    """Progress bars: one for the study and one for each active run (step, loss, tokens/s)."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, TextColumn

        super().__init__()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        self.bars = _bars(*columns, TextColumn("{task.fields[message]}", markup=False))
        self.tasks: dict[str, TaskID] = {}

    def begin(self, runs: int, work: Sequence[Work], later: Sequence[Work] = (), at_once: int = 0) -> None:
        """Start the bars."""
        super().begin(runs, work, later, at_once)
        self.bars.start()
        self.whole = self.bars.add_task("study", total=max(1, runs), message=f"{self.done}/{runs} runs")

    def started(self, run: str, title: str, steps: int) -> None:
        """Add a bar for the run."""
        super().started(run, title, steps)
        self.tasks[run] = self.bars.add_task(f"  {printable(title)}", total=steps, message="starting")

    def show(self, run: str, message: str, urgent: bool = False) -> None:
        """Update the bars of the run and the study."""
        self.bars.update(self.tasks[run], completed=self.active[run].step, message=message)
        self._update()

    def ended(self, run: str, message: str) -> None:
        """Replace the run's bar by a line."""
        super().ended(run, message)
        if run in self.tasks:
            self.bars.remove_task(self.tasks.pop(run))
        self._update()

    def line(self, message: str) -> None:
        """Print a line above the bars."""
        self.bars.console.print(printable(message), markup=False, highlight=False)

    def end(self) -> None:
        """Remove the bars."""
        self.bars.stop()

    def _update(self) -> None:
        message = ", ".join(filter(None, (f"{self.done}/{self.runs} runs", self.left())))
        partly = sum(state.step / max(1, state.steps) for state in self.active.values())
        self.bars.update(self.whole, completed=self.done + partly, message=message)


def _tokens(work: Sequence[Work]) -> float:
    return sum(one.tokens for one in work)


def _bars(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True)


def choose_display(quiet: bool = False) -> Display:
    """Return bars on a terminal, plain lines elsewhere, nothing when quiet."""
    if quiet:
        return Display()
    return Live() if is_terminal(sys.stderr) else Plain()


def part_of(
    progress: Callable[[float], None], first: float, last: float, whole: float = 1.0
) -> Callable[[float], None]:
    """Return a progress callback for the part from `first` to `last` of `whole`."""
    return lambda share: progress((first + share * (last - first)) / whole)


@contextmanager
def progress_bar(title: str, quiet: bool = False) -> Iterator[Callable[[str, float], None]]:
    """Yield a callable (message, share done) that shows the progress of one operation."""
    if quiet:
        yield lambda message, share: None
    elif is_terminal(sys.stderr):
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        with _bars(text, BarColumn(), TimeRemainingColumn()) as bars:
            task = bars.add_task(printable(title), total=1.0)
            yield lambda message, share: bars.update(task, description=printable(message), completed=share)
    else:
        yield _Lines()


class _Lines:
    """Prints a line at most every 3 seconds."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()

    def __call__(self, message: str, share: float) -> None:
        now = time.monotonic()
        if now - self.last < 3.0:
            return
        self.last = now
        left = f", about {short_time((now - self.began) / share * (1 - share))} left" if share > 0.02 else ""
        say(f"{message}: {share:.0%}{left}", flush=True)
