"""Estimate the time left of a study, and divide the time spent by phase, from what its runs report."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """A run that is still to be trained."""

    run: str
    kind: Hashable
    """Runs of one kind have the same throughput: the same layers at the same size."""
    tokens: float
    flops: float = 1.0
    """FLOPs per token, which relate the throughput of kinds not yet seen to that of others."""


@dataclass
class _Seen:
    """The seconds that runs of one kind spent in training, and for how many tokens."""

    seconds: float = 0.0
    tokens: float = 0.0


@dataclass
class _Active:
    """A run in progress."""

    work: Work
    phase: str
    """start, compile, train, score or probe."""
    since: float
    """When its phase began, or its last step was reported."""
    trained: float = 0.0
    """Share of its tokens that are trained, including those of earlier starts."""
    other: float = 0.0
    """Seconds spent outside training."""


class Estimate:
    """The time left and the time spent, from the tokens of the plan and the throughput seen of each kind of run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.waiting: dict[str, Work] = {}
        self.later: list[Work] = []
        """Work of which no run is known yet, such as a study's runs while it is tuned."""
        self.active: dict[str, _Active] = {}
        self.spent: defaultdict[str, float] = defaultdict(float)
        """Wall-clock seconds by phase; those in which several runs were active are divided equally among them."""
        self._kinds: dict[Hashable, _Seen] = {}
        self._flops: dict[Hashable, float] = {}
        self._other: list[float] = []
        self._slots = 1
        self._last = clock()

    def begin(self, work: Sequence[Work], later: Sequence[Work] = (), at_once: int = 0) -> None:
        """Set the work of an execution, and how many runs train at the same time if that is known.

        What was seen in earlier executions is kept; the time between them is not counted.
        """
        self._slots = at_once or self._slots
        self._last = self.clock()
        self.waiting, self.later = {one.run: one for one in work}, list(later)
        self._flops |= {one.kind: one.flops for one in (*work, *later)}
        self.active = {}

    def enter(self, run: str, phase: str) -> None:
        """Record that a run has begun a phase."""
        self._pass_time()
        now = self.clock()
        if run not in self.active:
            self.active[run] = _Active(self.waiting.pop(run, Work(run, "", 0.0)), phase, now)
            self._slots = max(self._slots, len(self.active))
            return
        state = self.active[run]
        if state.phase != phase:
            if state.phase != "train":
                state.other += now - state.since
            state.phase, state.since = phase, now

    def trained(self, run: str, share: float) -> None:
        """Record that a share of a run's tokens is trained. What an earlier start trained does not count as speed."""
        state = self.active.get(run)
        if state is None:
            return
        first = state.phase != "train"
        self.enter(run, "train")
        now = self.clock()
        if not first and share > state.trained:
            seen = self._kinds.setdefault(state.work.kind, _Seen())
            seen.seconds += now - state.since
            seen.tokens += (share - state.trained) * state.work.tokens
        state.trained, state.since = share, now

    def end(self, run: str) -> None:
        """Record the end of a run."""
        self._pass_time()
        if (state := self.active.pop(run, None)) is not None and state.phase != "train":
            self._other.append(state.other + self.clock() - state.since)
        self.waiting.pop(run, None)

    def seconds_left(self) -> float | None:
        """Return the estimated seconds left, or None while no throughput is known."""
        if not any(seen.tokens for seen in self._kinds.values()):
            return None
        now = self.clock()
        ends = []
        for state in self.active.values():
            rate = self._seconds_per_token(state.work.kind)
            training = rate * state.work.tokens * (1 - state.trained)
            if state.phase == "train":
                training = max(0.0, training - (now - state.since))
            other = state.other + (now - state.since if state.phase != "train" else 0.0)
            ends.append(training + max(0.0, self._usual_other() - other))
        # Each free slot takes the next run: as many run at once as are known or have been seen to.
        heapq.heapify(ends)
        while len(ends) < self._slots:
            heapq.heappush(ends, 0.0)
        for work in (*self.waiting.values(), *self.later):
            seconds = self._seconds_per_token(work.kind) * work.tokens + self._usual_other()
            heapq.heappush(ends, heapq.heappop(ends) + seconds)
        return max(ends)

    def _usual_other(self) -> float:
        """Return the seconds that a run spends outside training, by the last runs that ended."""
        recent = self._other[-20:] or [state.other for state in self.active.values() if state.other]
        return sum(recent) / len(recent) if recent else 0.0

    def _seconds_per_token(self, kind: Hashable) -> float:
        seen = self._kinds.get(kind)
        if seen is not None and seen.tokens:
            return seen.seconds / seen.tokens
        known = [(one, row) for one, row in self._kinds.items() if row.tokens]
        per_flop = [row.seconds / row.tokens / self._flops.get(one, 1.0) for one, row in known]
        return sum(per_flop) / len(per_flop) * self._flops.get(kind, 1.0)

    def _pass_time(self) -> None:
        """Add the seconds since the last event to the phases of the active runs."""
        now = self.clock()
        passed, self._last = now - self._last, now
        for state in self.active.values():
            self.spent[state.phase] += passed / len(self.active)
        if not self.active:
            self.spent["idle"] += passed
