"""Worker processes: orders on standard input, one event per line on standard output.

The parent starts a worker with `WorkerProcess`; the worker calls `receive`, or `orders` for several, and `send`. End of
file on the worker's standard input, because the parent closed it or died, tells it to save its work and stop.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import IO, Any, TypeVar

import msgspec

T = TypeVar("T")
_PREFIX = b"headtohead "
"""Starts every event; user code in a worker may print lines of its own."""
_EXIT_SECONDS = 120.0


class WorkerProcess:
    """A worker process and the thread that puts its events, as (worker, event), into a queue."""

    def __init__(
        self,
        module: str,
        order: object,
        event: type[T],
        events: queue.Queue[tuple[WorkerProcess, T]],
        *,
        log: IO[Any] | int,
        threads: int = 1,
        environment: Mapping[str, str] = {},
    ) -> None:
        """Start `python -m module`, with an order unless it is None.

        Standard error goes to `log`, a file or a constant of `subprocess`.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **library_environment(threads), **environment},
        )
        if order is not None:
            self.give(order)
        self._listener = threading.Thread(target=self._listen, args=(event, events), daemon=True)
        self._listener.start()

    def give(self, order: object) -> None:
        """Write an order to its input."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it died; its log says why
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()

    @property
    def alive(self) -> bool:
        """Whether it can still send events."""
        return self._listener.is_alive()

    def ask_to_stop(self) -> None:
        """Close its input: it saves its work and exits."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with suppress(OSError):
                self.process.stdin.close()

    def wait(self) -> str:
        """Wait until it exits, kill it if that takes long, and return how it died, or an empty string."""
        try:
            code = self.process.wait(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code == 0:
            return ""
        if code == -signal.SIGKILL:
            return "was killed (signal 9), often because memory ran out"
        return f"was killed (signal {-code})" if code < 0 else f"ended with code {code}"

    def _listen(self, kind: type[T], events: queue.Queue[tuple[WorkerProcess, T]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(_PREFIX):
                with suppress(msgspec.MsgspecError):
                    events.put((self, msgspec.json.decode(line.removeprefix(_PREFIX), type=kind)))


def library_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a worker's C libraries."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # By default glibc returns large blocks to the system and takes them again at every step, with a page fault
        # per 4 KiB. Keeping them makes training 4 to 7 % faster.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_TOP_PAD_": str(2**24),
    }


def orders(kind: type[T]) -> Iterator[T]:
    """Yield the orders of this worker until the parent closes its input; SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        yield msgspec.json.decode(line, type=kind)


def receive(kind: type[T]) -> tuple[T, Callable[[], bool]]:
    """Return the order of this worker and a function that returns whether to stop.

    SIGINT is ignored; the parent handles Ctrl-C.
    """
    order = next(orders(kind))
    stopped = threading.Event()

    def listen() -> None:
        # Not through sys.stdin: Python aborts at exit if a thread holds its lock.
        while os.read(0, 2**16):
            pass
        stopped.set()

    threading.Thread(target=listen, daemon=True).start()
    return order, stopped.is_set


def send(event: object) -> None:
    """Write one event as a line; none is written after the parent has died.

    The end of standard input then stops the worker, which first saves its work.
    """
    out = sys.stdout.buffer
    try:
        out.write(b"\n" + _PREFIX + msgspec.json.encode(event) + b"\n")
        out.flush()
    except BrokenPipeError:
        # The line stays in the buffer of sys.stdout, and Python writes it again at the next event and at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
