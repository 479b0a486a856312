"""What happens to a run while it is executed, as sent from a worker to its executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct


class Event(Struct, frozen=True, omit_defaults=True):
    """One event of a run; which other fields are set depends on its kind."""

    kind: Literal[
        "started", "step", "compiling", "scoring", "probing", "warning", "deferred", "waiting", "ended"
    ]
    run: str
    step: int = 0
    nats: float | None = None
    rate: float = 0.0
    """Tokens per second."""
    share: float = 0.0
    """Completed share of a measurement."""
    message: str = ""
    """Of a warning, or the reason why a run has no result yet."""
    state: str = ""
    """How a run ended: see `TrainingPass.run`."""
    owner: str = ""
    pid: int = 0
    """Process of the owner that is waited for, if it is on this host."""


Emit = Callable[[Event], None]
