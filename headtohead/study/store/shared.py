"""Exclusive access to the files that every process of a study writes: study.json, study.lock.json and history.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import SoftFileLease, Timeout

from headtohead.common.errors import UserError
from headtohead.study.store.lease import LEASE_SECONDS, owner_of

NAME = "update.lock"
_PATIENCE_SECONDS = 300.0
"""An update takes milliseconds; a lock of a dead process on another host is taken over after a minute."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the shared files of the study in `folder`.

    What is read inside is current until it is written inside. May be nested in one thread. The lock is a lease as those
    of runs, so it works on network file systems, and the lock of a dead process is taken over.
    """
    path = folder / NAME
    lease = SoftFileLease(path, lease_duration=LEASE_SECONDS, is_singleton=True)
    try:
        lease.acquire(timeout=_PATIENCE_SECONDS)
    except Timeout:
        raise UserError(
            f"{path} has been held by {owner_of(path) or 'an unknown process'} for {_PATIENCE_SECONDS:.0f} seconds; "
            "end that process, or remove the file if the process no longer exists"
        ) from None
    try:
        yield
    finally:
        lease.release()
