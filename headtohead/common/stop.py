"""Early stop of a study: at once on request, or after a time limit once some progress is saved."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class Stopped(BaseException):
    """A stop was requested during a measurement. Not an Exception, so that no error handler catches it."""


class Interrupted(Stopped):
    """A stop was requested at an unknown point of a computation, whose state is not saved."""


STOPS = (KeyboardInterrupt, Stopped)
"""Raised to end a computation from outside; never an error of the code that is running."""


@dataclass(frozen=True)
class Stop:
    """Called between steps; returns True to save and stop.

    A request (Ctrl-C, a parent process that has exited) takes effect at once. A time limit takes effect only after
    `advance` was called, so every start saves at least one more step, result or probe, however short its limit.
    """

    requested: Callable[[], bool] = lambda: False
    deadline: float = math.inf
    """A time of `time.monotonic`."""
    _advanced: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def after(cls, seconds: float, requested: Callable[[], bool] = lambda: False) -> Stop:
        """Return a stop with a time limit that starts now."""
        return cls(requested, time.monotonic() + seconds)

    def __call__(self) -> bool:
        """Return whether to stop now."""
        return self.requested() or (self._advanced.is_set() and self.late)

    def advance(self) -> None:
        """Record that this start has saved progress that the next one does not repeat."""
        self._advanced.set()

    @property
    def late(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() >= self.deadline

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit, at least 0."""
        return max(0.0, self.deadline - time.monotonic())


@contextmanager
def interrupted_by(stop: Stop, every: float = 0.5) -> Iterator[None]:
    """Raise Interrupted within the block as soon as `stop` is true; only the main thread of a process can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def check(number: int, frame: object) -> None:
        if stop():
            raise Interrupted

    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, every, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


NEVER = Stop()
"""A stop that never triggers."""
