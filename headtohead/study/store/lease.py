"""Leases on runs: a lock file in the run directory, so that two executors never do the same run.

The lock file is created exclusively and taken over by rename; both operations are atomic on network file systems too.
Byte-range locks and clocks of other hosts are not used. The owner updates the lock every 20 seconds. A lock whose owner
is dead on this host is taken over at once. A lock of another host, or of another container on this host, is taken over
after this process has seen no update for 60 seconds of its own monotonic clock, so that changing a clock on either host
cannot end a live lease.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import SoftFileLease, Timeout

LEASE_SECONDS = 60.0


@dataclass(frozen=True)
class Owner:
    """The process that owns a lock."""

    host: str
    pid: int

    @property
    def here(self) -> bool:
        """Whether this process can see it: it runs on this host and in the same container (PID namespace)."""
        return self.host == this_host()

    @property
    def dead(self) -> bool:
        """Whether it is known to be dead: a process that would be visible here and does not exist."""
        if not self.here:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def __str__(self) -> str:
        name = self.host.partition("?")[0]
        near = not self.here and name == this_host().partition("?")[0]
        return f"process {self.pid} {'in another container ' if near else ''}on {name}"


@cache
def this_host() -> str:
    """Return the host name that this process writes into its locks: it includes the PID namespace."""
    with TemporaryDirectory() as folder:
        lease = SoftFileLease(Path(folder) / "lock", lease_duration=LEASE_SECONDS)
        with lease:
            owner = lease.owner
    return socket.gethostname() if owner is None else owner.hostname


def owner_of(lock: Path) -> Owner | None:
    """Return the owner of a lock file, or None if there is no readable lock."""
    record = SoftFileLease(lock, lease_duration=LEASE_SECONDS).owner
    return None if record is None else Owner(record.hostname, record.pid)


def released(lock: Path) -> bool:
    """Take over a lock as an executor would and remove it; return False if its owner cannot be shown to be dead."""
    lease = SoftFileLease(lock, lease_duration=LEASE_SECONDS)
    try:
        lease.acquire(timeout=0)
    except Timeout:
        return False
    lease.release()
    return True


class Lease:
    """The right to work on one run."""

    def __init__(self, lease: SoftFileLease) -> None:
        self._lease = lease

    def lost(self) -> bool:
        """Return whether another process has taken over the run, because this one stopped updating its lock."""
        return self._lease.compromise is not None


class LeaseManager:
    """The locks that one executor holds or waits for.

    An executor uses one instance throughout, because a lock of another host is taken over only after it has been watched
    for the whole lease duration.
    """

    def __init__(self) -> None:
        self._leases: dict[Path, SoftFileLease] = {}

    @contextmanager
    def acquire(self, folder: Path) -> Iterator[Lease | None]:
        """Yield the lease on `folder`, or None if another process holds it."""
        lock = folder / "lock"
        lease = self._leases.setdefault(lock, SoftFileLease(lock, lease_duration=LEASE_SECONDS))
        try:
            lease.acquire(timeout=0)
        except Timeout:
            yield None
            return
        try:
            yield Lease(lease)
        finally:
            lease.release()
            self._leases.pop(lock, None)
