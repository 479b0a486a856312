"""Who works on a run: a lock file beside its others, so that two executors never do a run twice.

The lock is a file that is made by exclusive creation and taken over by rename, operations that are atomic on network
file systems too; no byte-range locks, no clock of another host. Its owner touches it every 20 seconds. A lock whose
owner is dead on this host is taken over at once. One from another host is taken over when it has not been touched for
60 seconds of this process's own clock, watched by this process: a clock set back or ahead, here or there, cannot end a
living lease.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import SoftFileLease, Timeout

LEASE_SECONDS = 60.0


@dataclass(frozen=True)
class Owner:
    """The process a lock names."""

    host: str
    pid: int

    @property
    def here(self) -> bool:
        """Whether it is a process of this host."""
        return self.host.partition("?")[0] == socket.gethostname()

    @property
    def dead(self) -> bool:
        """Whether it is certainly gone: a process of this host that does not exist."""
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
        return f"process {self.pid} on {self.host.partition('?')[0]}"


def owner_of(lock: Path) -> Owner | None:
    """Return the process that a lock file names, or None where there is no readable lock."""
    record = SoftFileLease(lock, lease_duration=LEASE_SECONDS).owner
    return None if record is None else Owner(record.hostname, record.pid)


class Lease:
    """The right to work on one run."""

    def __init__(self, lease: SoftFileLease) -> None:
        self._lease = lease

    def lost(self) -> bool:
        """Whether another process has taken the run over, because this one was silent for too long."""
        return self._lease.compromise is not None


class LeaseManager:
    """The locks that one executor holds or waits for.

    An executor keeps this for all of its work: a lock from another host is taken over only after it has been watched
    for as long as a living owner could be silent.
    """

    def __init__(self) -> None:
        self._leases: dict[Path, SoftFileLease] = {}

    @contextmanager
    def acquire(self, folder: Path) -> Iterator[Lease | None]:
        """Yield the right to work in `folder`, or None while another process has it."""
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
