"""Progress of long work: live bars on a terminal, plain lines elsewhere, with an estimate in both."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headtohead.common.numbers import short_count, short_time

if TYPE_CHECKING:
    from rich.progress import TaskID

_LINE_EVERY = 15.0


@dataclass
class _Active:
    """A run at work."""

    title: str
    steps: int
    tokens: float
    first: int = -1
    """The step it went on from; what a checkpoint brought is no sign of speed."""
    step: int = 0

    @property
    def done(self) -> float:
        """Tokens trained here."""
        return self.tokens * max(0, self.step - max(0, self.first)) / max(1, self.steps)


class Display:
    """What a study shows while it runs. This one keeps the count and shows nothing."""

    def __init__(self) -> None:
        self.runs = self.done = 0
        self.total = self.finished = 0.0
        self.active: dict[str, _Active] = {}
        self.began = time.monotonic()

    def begin(self, runs: int, done: int, tokens: float) -> None:
        """Start with so many runs in all, so many done, and so many tokens still to train."""
        self.runs, self.done, self.total, self.began = runs, done, tokens, time.monotonic()

    def started(self, run: str, title: str, steps: int, tokens: float) -> None:
        """A run has begun."""
        self.active[run] = _Active(title, steps, tokens)

    def stepped(self, run: str, step: int, nats: float, rate: float) -> None:
        """A run has come to a step."""
        state = self.active[run]
        state.first = step - 1 if state.first < 0 else state.first
        state.step = step

    def compiling(self, run: str) -> None:
        """A run compiles its model, or finds it compiled."""

    def scoring(self, run: str, share: float) -> None:
        """A run is trained and being scored; that share of it is done."""

    def ended(self, run: str, words: str) -> None:
        """A run has ended, with its outcome in words."""
        state = self.active.pop(run, None)
        self.finished += state.tokens if state else 0.0
        self.done += 1
        self.line(f"[{self.done}/{self.runs}] {state.title if state else run}: {words}")

    def note(self, words: str) -> None:
        """Something a person should know."""
        self.line(words)

    def line(self, words: str) -> None:
        """Show one line."""

    def end(self) -> None:
        """The work is over."""

    def trained(self) -> float:
        """Return the tokens trained so far."""
        return self.finished + sum(state.done for state in self.active.values())

    def left(self) -> str:
        """Return the time left in words, once there is something to judge by."""
        trained, spent = self.trained(), time.monotonic() - self.began
        if trained <= 0 or spent < 2 or self.done >= self.runs:
            return ""
        return f"about {short_time(max(0.0, self.total - trained) * spent / trained)} left"


class Plain(Display):
    """Plain lines: each run's end, and a sign of life in between."""

    def begin(self, runs: int, done: int, tokens: float) -> None:
        """Say what there is to do."""
        super().begin(runs, done, tokens)
        self.line(f"{runs - done} of {runs} runs to do, {short_count(tokens)} tokens to train")

    def stepped(self, run: str, step: int, nats: float, rate: float) -> None:
        """Give a sign of life now and then."""
        super().stepped(run, step, nats, rate)
        if time.monotonic() - self.last >= _LINE_EVERY:
            self.line(
                f"[{self.done}/{self.runs}] {self.active[run].title}: {_step_text(self.active[run], nats, rate)}"
            )

    def scoring(self, run: str, share: float) -> None:
        """Give a sign of life now and then."""
        if time.monotonic() - self.last >= _LINE_EVERY:
            self.line(f"[{self.done}/{self.runs}] {self.active[run].title}: scoring, {share:.0%} done")

    def compiling(self, run: str) -> None:
        """Say so where nothing was said for a while."""
        if time.monotonic() - self.last >= _LINE_EVERY or not self.done:
            self.line(f"[{self.done}/{self.runs}] {self.active[run].title}: compiling")

    def line(self, words: str) -> None:
        """Print it, with the time left."""
        left = self.left()
        print(words + (f"; {left}" if left else ""), flush=True)
        self.last = time.monotonic()


class Live(Display):
    """Bars: the study, and each run at work (step, loss, tokens/s)."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__()
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        words = TextColumn("{task.fields[words]}", markup=False)
        self.bars = Progress(*columns, words, console=self.console, transient=True)
        self.tasks: dict[str, TaskID] = {}

    def begin(self, runs: int, done: int, tokens: float) -> None:
        """Start the bars."""
        super().begin(runs, done, tokens)
        self.bars.start()
        self.whole = self.bars.add_task("study", total=max(1.0, tokens), words=f"{done}/{runs} runs")

    def started(self, run: str, title: str, steps: int, tokens: float) -> None:
        """A bar for the run."""
        super().started(run, title, steps, tokens)
        self.tasks[run] = self.bars.add_task(f"  {title}", total=steps, words="starting")

    def stepped(self, run: str, step: int, nats: float, rate: float) -> None:
        """Move both bars."""
        super().stepped(run, step, nats, rate)
        self.bars.update(self.tasks[run], completed=step, words=_step_text(self.active[run], nats, rate))
        self._update()

    def compiling(self, run: str) -> None:
        """Say so beside the empty bar."""
        self.bars.update(self.tasks[run], words="compiling")

    def scoring(self, run: str, share: float) -> None:
        """Say so beside the full bar."""
        self.bars.update(self.tasks[run], words=f"scoring, {share:.0%} done")

    def ended(self, run: str, words: str) -> None:
        """The run's bar becomes a line."""
        super().ended(run, words)
        if run in self.tasks:
            self.bars.remove_task(self.tasks.pop(run))
        self._update()

    def line(self, words: str) -> None:
        """A line above the bars."""
        self.console.print(words, markup=False, highlight=False)

    def end(self) -> None:
        """Put the bars away."""
        self.bars.stop()

    def _update(self) -> None:
        words = ", ".join(filter(None, (f"{self.done}/{self.runs} runs", self.left())))
        self.bars.update(self.whole, completed=self.trained(), words=words)


def choose_display(quiet: bool = False) -> Display:
    """Return bars on a terminal, plain lines elsewhere, nothing when quiet."""
    if quiet:
        return Display()
    return Live() if sys.stderr.isatty() else Plain()


def part_of(
    progress: Callable[[float], None], first: float, last: float, whole: float = 1.0
) -> Callable[[float], None]:
    """Return the progress of a part of some work: the one from `first` to `last` of the `whole`."""
    return lambda share: progress((first + share * (last - first)) / whole)


@contextmanager
def progress_bar(title: str, quiet: bool = False) -> Iterator[Callable[[str, float], None]]:
    """Yield a callable (words, share done) that shows the progress of one piece of work."""
    if quiet:
        yield lambda words, share: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(title, total=1.0)
            yield lambda words, share: bars.update(task, description=words, completed=share)
    else:
        yield _Lines()


class _Lines:
    """A line every few seconds."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()

    def __call__(self, words: str, share: float) -> None:
        now = time.monotonic()
        if now - self.last >= 3.0:
            self.last = now
            left = (
                f", about {short_time((now - self.began) / share * (1 - share))} left" if share > 0.02 else ""
            )
            print(f"{words}: {share:.0%}{left}", flush=True)


def _step_text(state: _Active, nats: float, rate: float) -> str:
    return (
        f"step {state.step}/{state.steps}, loss {nats / math.log(2):.3f} bits, {short_count(rate)} tokens/s"
    )
