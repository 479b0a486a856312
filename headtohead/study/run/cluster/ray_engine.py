"""The engine on Ray: Ray places and starts tasks and moves bytes; it retries nothing and keeps nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headtohead.common.errors import UserError, first_line
from headtohead.common.files import open_regular
from headtohead.common.worker_process import library_environment
from headtohead.study.run.cluster.engine import Node, Resources
from headtohead.study.run.cluster.mailbox import Mailbox
from headtohead.study.run.cluster.messages import Instructions, NodeFacts, Order, Post, Reply, TaskEnd
from headtohead.study.run.cluster.node import DriverGone, node_facts, run_task

INSTALL = "pip install 'headtohead[ray]'"
_CHUNK = 2**26
"""Bytes of a file in one object of Ray."""
_CONNECT_SECONDS = 5.0
_FACTS_SECONDS = 120.0
_SETTLE_SECONDS = 2.0
"""How long the cause of a dead process is looked for: it may have died with its node."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def _import_ray() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UserError(f"--on ray needs Ray, which is not installed: {INSTALL}") from None
    return ray


class _Link:
    """The connection of a task to its driver through the mailbox."""

    def __init__(self, mailbox: Any) -> None:
        import ray

        self.ray, self.mailbox = ray, mailbox
        self.node = str(ray.get_runtime_context().get_node_id())

    def post(self, post: Post) -> Reply:
        """Send news and return the answer."""
        try:
            reply: Reply = self.ray.get(self.mailbox.post.remote(post))
        except self.ray.exceptions.ActorDiedError as error:
            raise DriverGone from error
        return reply

    def fetch(self, offer: list[Any]) -> Iterator[bytes]:
        """Yield the content of an offered file, one object at a time."""
        for part in offer:
            yield self.ray.get(part)


def _run(order: Order, mailbox: Any) -> TaskEnd:
    return run_task(order, _Link(mailbox))


class RayEngine:
    """Tasks on the cluster at RAY_ADDRESS, or on a Ray that is started on this machine."""

    def __init__(self, threads: int = 1, task: Any = _run) -> None:
        """`task` is what runs on the nodes."""
        self.ray = _import_ray()
        self.needed = Resources()
        self._refs: dict[Any, str] = {}
        self._nodes_of: dict[str, str] = {}
        """The node of each task that has started."""
        self._died: list[tuple[float, TaskEnd]] = []
        self._avoided: set[str] = set()
        self._connect(threads)
        try:
            self._prepare(task)
        except BaseException:
            self.close()
            raise

    def _prepare(self, task: Any) -> None:
        ray = self.ray
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self.mailbox = (
            ray.remote(Mailbox).options(num_cpus=0, max_concurrency=64, scheduling_strategy=here).remote()
        )
        # A process that had a GPU ends after its task, which frees the GPU's memory. Others serve the next task.
        self._kinds = {True: ray.remote(max_calls=1)(task), False: ray.remote(task)}

    def _connect(self, threads: int) -> None:
        address = os.environ.get("RAY_ADDRESS", "")
        if address.startswith("ray://"):
            raise UserError(
                f"RAY_ADDRESS={address} is the address of a Ray client; run h2h on a node of the cluster, for example "
                "with: ray job submit -- h2h race ... --on ray"
            )
        if address and address not in ("auto", "local"):
            _check_reachable(address)
        joined = {} if address and address != "local" else {"include_dashboard": False}
        try:
            self.ray.init(
                address=address or "local",
                namespace="headtohead",
                log_to_driver=False,
                logging_level="critical",
                runtime_env={"env_vars": library_environment(threads)},
                **joined,
            )
        except Exception as error:
            where = f"the Ray cluster at {address}" if address else "Ray on this machine"
            raise UserError(f"cannot connect to {where}: {first_line(error)}") from None

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive, without those to avoid."""
        return [node for node in self._alive() if node.name not in self._avoided]

    def _alive(self) -> list[Node]:
        with self._connection():
            listed = [node for node in self.ray.nodes() if node["Alive"]]
        has = [node["Resources"] for node in listed]
        return [
            Node(node["NodeID"], node["NodeManagerHostname"], own.get("CPU", 0.0), own.get("GPU", 0.0))
            for node, own in zip(listed, has, strict=True)
        ]

    @contextmanager
    def _connection(self) -> Iterator[None]:
        """Turn errors of Ray itself into one line."""
        try:
            yield
        except self.ray.exceptions.RayError as error:
            raise UserError(
                f"the connection to Ray was lost ({type(error).__name__}); the same command continues the study"
            ) from None

    def avoid(self, node: str) -> None:
        """Start no further task on a node."""
        self._avoided.add(node)

    def facts(self, nodes: Sequence[Node], store: str, nonce: str) -> dict[str, NodeFacts | str]:
        """Return the facts of each node by name, or why it has none."""
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        ask = self.ray.remote(node_facts)
        refs = {
            node.name: ask.options(
                num_cpus=0, max_retries=0, scheduling_strategy=strategy(node.name, soft=False)
            ).remote(store, nonce, self.needed.gpus > 0)
            for node in nodes
        }
        end = time.monotonic() + _FACTS_SECONDS
        found: dict[str, NodeFacts | str] = {}
        for node in nodes:
            try:
                found[node.name] = self.ray.get(refs[node.name], timeout=max(0.1, end - time.monotonic()))
            except self.ray.exceptions.GetTimeoutError:
                found[node.name] = f"node {node.host} did not answer within {_FACTS_SECONDS:g} s"
            except Exception as error:
                found[node.name] = _problem(node, error)
        return found

    def start(self, order: Order) -> None:
        """Start a task as soon as a node has room for it."""
        needed = self.needed
        selector = {"ray.io/node-id": f"!in({','.join(sorted(self._avoided))})"} if self._avoided else None
        kind = self._kinds[needed.gpus > 0].options(
            name=f"h2h {order.task}",
            num_cpus=needed.cpus,
            num_gpus=needed.gpus,
            max_retries=0,
            label_selector=selector,
        )
        self._refs[kind.remote(order, self.mailbox)] = order.task

    def cancel(self, task: str) -> None:
        """Cancel a task that has not started."""
        for ref, name in self._refs.items():
            if name == task:
                self.ray.cancel(ref)

    def ended(self, timeout: float) -> list[TaskEnd]:
        """Return the tasks that ended since the last call; wait for one at most `timeout` seconds."""
        if not self._refs:
            time.sleep(timeout)
            return self._settled()
        ready, _ = self.ray.wait(list(self._refs), num_returns=1, timeout=timeout)
        if ready:
            ready, _ = self.ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0)
        ends = [self._end(ref) for ref in ready]
        self._died += [(time.monotonic(), end) for end in ends if end.how == "process died"]
        return [end for end in ends if end.how != "process died"] + self._settled()

    def _end(self, ref: Any) -> TaskEnd:
        errors, name = self.ray.exceptions, self._refs.pop(ref)
        try:
            end: TaskEnd = self.ray.get(ref)
            return end
        except errors.TaskCancelledError:
            return TaskEnd(name, "cancelled")
        except errors.OutOfMemoryError:
            return TaskEnd(name, "process died", "was killed because the memory of its node ran out")
        except errors.WorkerCrashedError:
            return TaskEnd(name, "process died", "was killed, often because memory ran out")
        except errors.RayTaskError as error:
            return TaskEnd(name, "raised", first_line(error.cause or error))
        except errors.NodeDiedError:
            return TaskEnd(name, "node lost")
        except errors.RayError as error:
            lost = self._nodes_of.get(name, "") not in {"", *(node.name for node in self._alive())}
            return TaskEnd(name, "node lost" if lost else "raised", first_line(error))

    def _settled(self) -> list[TaskEnd]:
        """Return the ends of processes whose cause is known: a process of a dead node did not die by itself."""
        if not self._died:
            return []
        alive = {node.name for node in self._alive()}
        found = []
        for died, end in list(self._died):
            node = self._nodes_of.get(end.task, "")
            lost = bool(node) and node not in alive
            if lost or time.monotonic() - died > _SETTLE_SECONDS:
                self._died.remove((died, end))
                found.append(TaskEnd(end.task, "node lost") if lost else end)
        return found

    def exchange(self, instructions: Instructions) -> list[Post]:
        """Return the posts of tasks since the last call and leave instructions for them."""
        with self._connection():
            posts: list[Post] = self.ray.get(self.mailbox.exchange.remote(instructions))
        self._nodes_of |= {post.task: post.node for post in posts if post.node}
        return posts

    def offer(self, path: Path) -> list[Any]:
        """Return the objects of a file's content; the driver owns them, so they outlive any node but its own."""
        found = []
        with open_regular(path) as stream:
            while chunk := stream.read(_CHUNK):
                found.append(self.ray.put(chunk))
        return found

    def close(self) -> None:
        """End every task and leave the cluster."""
        self.ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise UserError if nothing listens at an address HOST:PORT; Ray itself tries for half a minute."""
    parts = urlsplit(f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise UserError(f"RAY_ADDRESS={address} is not an address HOST:PORT")
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster at RAY_ADDRESS={address}: {error.strerror or error}; start one with: ray start --head"
        ) from None


def _problem(node: Node, error: Exception) -> str:
    """Return why a node has no facts."""
    text = str(error)
    if "No module named" in text and "headtohead" in text:
        return f"node {node.host} does not have headtohead: install it there, in the Python that runs Ray ({INSTALL})"
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return f"node {node.host} cannot run headtohead: {lines[-1] if lines else type(error).__name__}"
