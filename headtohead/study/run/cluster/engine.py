"""The engine of a cluster: what a study needs from Ray, or from another system that starts tasks on nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headtohead.common.errors import UserError
from headtohead.study.run.cluster.messages import Instructions, NodeFacts, Order, Post, TaskEnd, Versions
from headtohead.study.run.cluster.node import device_type


@dataclass(frozen=True)
class Resources:
    """What a task needs on a node."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("cpus_per_run", self.cpus), ("gpus_per_run", self.gpus)):
            whole = value <= 1 or value == int(value)
            if not (0 <= value < math.inf and whole):
                raise UserError(f"{name}={value:g}: give a share of one such as 0.5, or a whole number")
        if not (self.cpus or self.gpus):
            raise UserError("cpus_per_run=0 and gpus_per_run=0: a run needs a share of a CPU or of a GPU")

    def __str__(self) -> str:
        parts = ((self.cpus, "CPU"), (self.gpus, "GPU"))
        return " and ".join(f"{n:g} {unit}{'s' if n > 1 else ''}" for n, unit in parts if n)


@dataclass(frozen=True)
class Node:
    """A node that is alive."""

    name: str
    """The engine's name of it."""
    host: str
    cpus: float
    gpus: float

    def slots(self, needed: Resources) -> int:
        """Return how many tasks fit on it at the same time."""
        return slots_of(self.cpus, self.gpus, needed.cpus, needed.gpus)


def slots_of(cpus: float, gpus: float, cpus_per_run: float, gpus_per_run: float) -> int:
    """Return how many runs fit on a node at the same time; a resource of which a run needs none is no limit."""
    # A share is of one GPU: three of 0.3 fit on each, none over two.
    per_gpu = int(1 / gpus_per_run + 1e-9) if 0 < gpus_per_run < 1 else 1
    on_gpus = gpus * per_gpu / max(1.0, gpus_per_run) if gpus_per_run else math.inf
    on_cpus = cpus / cpus_per_run if cpus_per_run else math.inf
    return int(min(on_gpus, on_cpus) + 1e-9)


class Engine(Protocol):
    """Starts tasks on the nodes of a cluster and carries messages between them and the driver."""

    needed: Resources

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive, without those to avoid."""
        ...

    def avoid(self, node: str) -> None:
        """Start no further task on a node."""
        ...

    def facts(self, nodes: Sequence[Node], store: str, nonce: str) -> dict[str, NodeFacts | str]:
        """Return the facts of each node by name, or why it has none."""
        ...

    def start(self, order: Order) -> None:
        """Start a task as soon as a node has room for it."""
        ...

    def cancel(self, task: str) -> None:
        """Cancel a task that has not started."""
        ...

    def ended(self, timeout: float) -> list[TaskEnd]:
        """Return the tasks that ended since the last call; wait for one at most `timeout` seconds."""
        ...

    def exchange(self, instructions: Instructions) -> list[Post]:
        """Return the posts of tasks since the last call and leave instructions for them."""
        ...

    def offer(self, path: Path) -> Any:
        """Return what a task fetches the content of a file of the driver with."""
        ...

    def close(self) -> None:
        """End every task and leave the cluster."""
        ...


def check_nodes(engine: Engine, *, timed: bool) -> None:
    """Raise UserError if the nodes cannot run a study: before anything is planned or trained.

    `timed` studies compare runs at equal time, on whole devices of one type.
    """
    if timed and any(0 < share < 1 for share in (engine.needed.cpus, engine.needed.gpus)):
        raise UserError(f"length=time needs whole devices, and a run would have {engine.needed}")
    nodes = engine.nodes()
    able = able_nodes(engine)
    if not able:
        has = ", ".join(sorted({f"{node.cpus:g} CPUs and {node.gpus:g} GPUs" for node in nodes})) or "nothing"
        raise UserError(
            f"no node of the cluster has {engine.needed} for a run; its nodes have {has}: change --cpus-per-run or "
            "--gpus-per-run, or add a node"
        )
    known = _facts(engine, able, "", "")
    here = Versions.here()
    for facts in known:
        if problem := here.differences(facts.versions):
            raise UserError(
                f"node {facts.host} has {problem}: install the same versions on every node; nothing was trained"
            )
    # Step times are measured where the driver runs.
    devices = sorted({device_type(engine.needed.gpus > 0), *(facts.device for facts in known)})
    if timed and len(devices) > 1:
        raise UserError(
            f"length=time compares runs on devices of one type, and this machine and the nodes have "
            f"{', '.join(devices)}: use machines of one type, or length=tokens or flops"
        )


def able_nodes(engine: Engine) -> list[Node]:
    """Return the nodes that can take a task."""
    return [node for node in engine.nodes() if node.slots(engine.needed)]


def store_is_shared(engine: Engine, store: Path, nonce: str) -> bool:
    """Return whether all nodes that can take tasks see a file in the store."""
    found = engine.facts(able_nodes(engine), str(store), nonce).values()
    return all(isinstance(facts, NodeFacts) and facts.shares_store for facts in found)


def _facts(engine: Engine, nodes: Sequence[Node], store: str, nonce: str) -> list[NodeFacts]:
    """Return the facts of nodes; raise UserError if one has none, unless it was lost meanwhile."""
    found = engine.facts(nodes, store, nonce)
    alive = {node.name for node in engine.nodes()}
    problems = {facts for name, facts in found.items() if isinstance(facts, str) and name in alive}
    if problems:
        raise UserError("; ".join(sorted(problems)))
    return [facts for facts in found.values() if isinstance(facts, NodeFacts)]
