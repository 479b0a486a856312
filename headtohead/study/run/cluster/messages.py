"""What the driver of a study, its mailbox and the tasks on the nodes send each other."""

from __future__ import annotations

from typing import Any, Literal

import torch
from msgspec import Struct

from headtohead.common import VERSION
from headtohead.study.environment import commit
from headtohead.study.numerics import NUMERICS
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.run.events import Event


class Versions(Struct, frozen=True):
    """What must be equal on every node, so that the runs of a study can be compared."""

    headtohead: str
    commit: str
    torch: str
    numerics: int

    @classmethod
    def here(cls) -> Versions:
        """Return the versions of this process."""
        return cls(VERSION, commit(), str(torch.__version__), NUMERICS)

    def differences(self, other: Versions) -> str:
        """Return how `other` differs, or an empty string."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return ", ".join(f"{name} {there} instead of {here}" for name, here, there in pairs if here != there)


class NodeFacts(Struct, frozen=True):
    """What a node says about itself before work starts."""

    host: str
    versions: Versions
    device: str
    """The name of its first GPU if runs need one, else its processor."""
    shares_store: bool
    """Whether it sees the directory of the study."""


class ShippedFile(Struct, frozen=True):
    """A file that a task needs; a node that lacks it receives its content from the driver."""

    place: str
    """Path below the directory that the node makes for it."""
    path: str
    """Where the driver has it; a node that has the same content there uses it."""
    sha256: str
    size: int


class Order(Struct, frozen=True):
    """What a task does: one run, or the rows of one population."""

    task: str
    versions: Versions
    execution: ExecutionSettings
    runs: list[dict[str, Any]]
    """Contents of spec.json."""
    probes: tuple[str, ...]
    store: str
    nonce: str
    """A file in the store; a node that does not see it does not share the file system."""
    shared: bool
    """Whether the task works in the store itself. Else it works in a directory of its own and sends its files."""
    gpus: float = 0.0
    """GPUs of the task; of a share, it uses no more than its part of the memory."""
    inputs: tuple[ShippedFile, ...] = ()
    """Prepared corpora, files of tasks, mechanisms and weights. A node keeps them in its cache."""
    moved: dict[str, str] = {}
    """Paths that specs name, and the places of those files among `inputs`."""
    state: tuple[ShippedFile, ...] = ()
    """The files of its runs so far, if the store is not shared."""
    trunks: dict[str, bytes] = {}
    """Files of trunks that still change, as they are now, by their place in a store."""
    device: str = ""
    """The type of device that it needs; empty for any."""


class Unit(Struct, frozen=True):
    """A part of a run's directory that is written as a whole: a file, or a checkpoint with its files."""

    name: str
    files: dict[str, bytes]
    """Contents by path below `name`; the key is empty if `name` is a file."""

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(map(len, self.files.values()))


class Changes(Struct, frozen=True):
    """What changed in a run's directory."""

    run: str
    units: list[Unit]
    present: list[str]
    """The names of its checkpoints and weights; others have been deleted."""


class Post(Struct, frozen=True):
    """News of a task."""

    task: str
    events: list[Event] = []
    changes: list[Changes] = []
    wanted: list[str] = []
    """The sha256 of files that it waits for."""
    host: str = ""
    pid: int = 0
    node: str = ""
    """The engine's name of its node. Host, process and node are in the first post."""

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(unit.size for changes in self.changes for unit in changes.units)


class Reply(Struct, frozen=True):
    """The answer to a post."""

    accepted: bool = True
    """False: the mailbox is full; post the same again later."""
    stop: bool = False
    """Whether to save and end."""
    seconds_left: float | None = None
    """Time until the limit."""
    every: float = 1.0
    """Seconds until the next post."""
    offers: dict[str, Any] = {}
    """What the engine fetches wanted files with, by sha256."""


class Instructions(Struct, frozen=True):
    """What the driver tells the mailbox whenever it takes the posts."""

    stop: frozenset[str] = frozenset()
    """Tasks that save and end now, among them those that count as lost and still run."""
    seconds_left: float | None = None
    every: float = 1.0
    offers: dict[str, Any] = {}
    """New offers."""
    withdrawn: frozenset[str] = frozenset()
    """Offers that nobody needs any more."""


class TaskEnd(Struct, frozen=True):
    """How a task ended: of its own, or according to the engine."""

    task: str
    how: Literal["returned", "unshared", "held", "unfit", "raised", "process died", "node lost", "cancelled"]
    """Returned: its runs have ended. It did nothing if its node does not see the store (unshared), if another executor
    has a run (held), or if its node cannot do the work (unfit)."""
    message: str = ""
    node: str = ""
    """The engine's name of an unfit node."""
