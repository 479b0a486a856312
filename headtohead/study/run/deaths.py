"""Runs that kill their process: after the second time they are recorded as failed."""

from __future__ import annotations

from headtohead.study.store.lease import LeaseManager
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import RunDirectory

MAX_DEATHS = 2
"""A run has failed after its process has died this many times."""


def record_death(run: RunDirectory, how: str) -> str:
    """Record a run whose process died as failed; return the message about it, empty if another executor has the run."""
    message = f"its process {how.partition(':')[0]} ({MAX_DEATHS} times)"
    with LeaseManager().acquire(run.path) as lease:
        if lease is None or run.finished():
            return ""
        run.finish(RunResult(status="failed", error=message))
    return f"run {run.id} is recorded as failed: {message}; run it again with --retry failed"
