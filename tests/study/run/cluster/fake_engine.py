"""An engine without a cluster: tasks run one after another in a thread, and tests decide what goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headtohead.study.run.cluster.engine import Node, Resources
from headtohead.study.run.cluster.mailbox import Mailbox
from headtohead.study.run.cluster.messages import (
    Instructions,
    NodeFacts,
    Order,
    Post,
    Reply,
    TaskEnd,
    Versions,
)
from headtohead.study.run.cluster.node import Link, node_facts, run_task

Fault = Callable[[Post, int], str]
"""Returns how the task of a post ends now (`TaskEnd.how`), or an empty string; also given the number of the task."""


class _Link:
    """The link of a task; after a fault the task is asked to stop, and what it sends is dropped."""

    node = "node"

    def __init__(self, engine: FakeEngine, number: int) -> None:
        self.engine, self.number, self.fault = engine, number, ""

    def post(self, post: Post) -> Reply:
        self.fault = self.fault or self.engine.fault(post, self.number)
        return Reply(stop=True) if self.fault else self.engine.mailbox.post(post)

    def fetch(self, offer: bytes) -> Iterator[bytes]:
        yield offer


class FakeEngine:
    """One node that takes one task at a time."""

    def __init__(
        self,
        fault: Fault = lambda post, number: "",
        facts: Callable[[str, str], NodeFacts | str] | None = None,
        task: Callable[[Order, Link], TaskEnd] = run_task,
    ) -> None:
        self.needed, self.fault, self.task = Resources(), fault, task
        self.found = facts or (lambda store, nonce: node_facts(store, nonce, False))
        self.mailbox = Mailbox()
        self.orders: list[Order] = []
        self.offered: list[str] = []
        self.size = Node("node", "host", 1.0, 0.0)
        self.more: list[Node] = []
        self.avoided: set[str] = set()
        self._queue: list[tuple[int, Order]] = []
        self._ends: list[TaskEnd] = []
        self._thread: threading.Thread | None = None

    def nodes(self) -> list[Node]:
        return [node for node in (self.size, *self.more) if node.name not in self.avoided]

    def avoid(self, node: str) -> None:
        self.avoided.add(node)

    def facts(self, nodes: Sequence[Node], store: str, nonce: str) -> dict[str, NodeFacts | str]:
        return {node.name: self.found(store, nonce) for node in nodes}

    def start(self, order: Order) -> None:
        self.orders.append(order)
        self._queue.append((len(self.orders), order))

    def cancel(self, task: str) -> None:
        if any(order.task == task for _, order in self._queue):
            self._queue = [(number, order) for number, order in self._queue if order.task != task]
            self._ends.append(TaskEnd(task, "cancelled"))

    def ended(self, timeout: float) -> list[TaskEnd]:
        if self._queue and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._work, args=self._queue.pop(0))
            self._thread.start()
        if self._thread is not None:
            self._thread.join(0.02)
        else:
            time.sleep(0.001)
        ends, self._ends = self._ends, []
        return ends

    def _work(self, number: int, order: Order) -> None:
        link = _Link(self, number)
        end = self.task(order, link)
        self._ends.append(TaskEnd(order.task, link.fault, "was killed") if link.fault else end)  # type: ignore[arg-type]

    def exchange(self, instructions: Instructions) -> list[Post]:
        return self.mailbox.exchange(instructions)

    def offer(self, path: Path) -> Any:
        self.offered.append(path.name)
        return path.read_bytes()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()


def other_versions(store: str, nonce: str) -> NodeFacts:
    """Return the facts of a node with another torch."""
    here = Versions.here()
    return NodeFacts("far", Versions(here.headtohead, here.commit, "1.0", here.numerics), "cpu", True)
