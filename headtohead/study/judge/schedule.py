"""Simulate how the passes of a study occupy a machine or a cluster, for the forecast of its wall-clock time.

As the executors do, a free slot takes the first pass in the order of the plan that does not have to wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headtohead.common.errors import UserError
from headtohead.study.run.cluster.engine import slots_of

_NEARLY = 1.05
"""Ratio of wall-clock times up to which fewer nodes are nearly as fast."""
_MOST = 1_000_000
_LEAST_SHARE = 1e-4
"""The smallest share of a resource that Ray counts."""
_FREE = -1


@dataclass(frozen=True)
class Unit:
    """A pass: one run, or the rows of a population."""

    name: str
    contest: str
    seconds: float
    after: tuple[tuple[int, float], ...] = ()
    """The units it waits for, by index, and the share of each that must be done: up to the checkpoint of a branch."""


Stage = Sequence[Unit]
"""Units in the order of the plan. A later stage starts after all units of the earlier ones: contests after tuning."""


@dataclass(frozen=True)
class Step:
    """A unit on the critical path, and the seconds of it that the next one waits for."""

    name: str
    contest: str
    seconds: float


@dataclass(frozen=True)
class Cluster:
    """Nodes that are alike, and what each run reserves of one."""

    nodes: int
    gpus_per_node: int = 0
    cpus_per_node: int = 0
    """0: not a limit, on nodes with GPUs."""
    gpus_per_run: float = 1.0
    cpus_per_run: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("cpus_per_node", 0)):
            given = getattr(self, name)
            if not isinstance(given, int) or not least <= given <= _MOST:
                raise UserError(f"{name}={given} must be a whole number from {least} to {_MOST:,}")
        if not (self.gpus_per_node or self.cpus_per_node):
            raise UserError("a node needs at least one GPU or CPU: gpus_per_node or cpus_per_node")
        for kind in ("gpus", "cpus"):
            name, there = f"{kind}_per_run", getattr(self, f"{kind}_per_node")
            given = getattr(self, name)
            if not _LEAST_SHARE <= given <= _MOST:
                raise UserError(f"{name}={given:g} must be a number from {_LEAST_SHARE:g} to {_MOST:,}")
            if there and given > there:
                raise UserError(f"{name}={given:g} is more than a node has: {kind}_per_node={there}")
        if self.gpus_per_run > 1 and self.gpus_per_run % 1:
            raise UserError(f"gpus_per_run={self.gpus_per_run:g} must be a whole number, or a share below 1")

    @property
    def kind(self) -> str:
        """GPU or CPU: what is counted in hours."""
        return "GPU" if self.gpus_per_node else "CPU"

    @property
    def devices(self) -> int:
        """GPUs, or CPUs, of all nodes."""
        return self.nodes * (self.gpus_per_node or self.cpus_per_node)

    @property
    def per_run(self) -> float:
        """GPUs, or CPUs, that a run reserves."""
        return self.gpus_per_run if self.gpus_per_node else self.cpus_per_run

    @property
    def slots_per_node(self) -> int:
        """Units that train on a node at the same time."""
        needed = [
            per_run if there else 0.0
            for per_run, there in (
                (self.cpus_per_run, self.cpus_per_node),
                (self.gpus_per_run, self.gpus_per_node),
            )
        ]
        return slots_of(self.cpus_per_node, self.gpus_per_node, *needed)

    @property
    def slots(self) -> int:
        """Units that train at the same time."""
        return self.nodes * self.slots_per_node

    @property
    def slowdown(self) -> float:
        """How much longer a unit takes than alone on a device, if runs that share one have their share of its speed."""
        return 1 / min(1.0, self.per_run)


@dataclass(frozen=True)
class ClusterForecast:
    """The cost of a study on a cluster."""

    nodes: int
    slots: int
    kind: str
    """GPU or CPU: what `device_hours` counts."""
    devices: int
    seconds: float
    device_hours: float
    """Hours that the runs occupy."""
    reserved_hours: float
    """Hours of all nodes, from the start of the first run to the end of the last."""
    utilization: float
    critical_path: list[Step]
    critical_seconds: float
    """The wall-clock time with any number of nodes."""
    enough_nodes: int
    """The smallest number of nodes with nearly the same wall-clock time."""
    enough_seconds: float
    measured_on: str
    """The device whose throughput was measured; those of the cluster are assumed to be equally fast."""
    shared: bool
    """Whether several runs share a device."""


def forecast_cluster(stages: Sequence[Stage], cluster: Cluster, measured_on: str) -> ClusterForecast:
    """Return the cost of passes on a cluster; their seconds are those on a device of their own."""
    slow = cluster.slowdown

    def seconds(nodes: int) -> float:
        return slow * wall_clock(stages, nodes * cluster.slots_per_node)

    whole = seconds(cluster.nodes)
    most = min(cluster.nodes, max(1, max(map(len, stages), default=1)))
    counts = range(1, most + 1)
    enough = counts[
        bisect_left(counts, True, hi=most - 1, key=lambda nodes: seconds(nodes) <= _NEARLY * whole)
    ]
    used = slow * cluster.per_run * sum(unit.seconds for stage in stages for unit in stage) / 3600
    reserved = cluster.devices * whole / 3600
    path = [step for stage in stages for step in _critical_path(stage)]
    return ClusterForecast(
        nodes=cluster.nodes,
        slots=cluster.slots,
        kind=cluster.kind,
        devices=cluster.devices,
        seconds=whole,
        device_hours=used,
        reserved_hours=reserved,
        utilization=used / reserved if reserved else 0.0,
        critical_path=[Step(step.name, step.contest, slow * step.seconds) for step in path],
        critical_seconds=slow * sum(step.seconds for step in path),
        enough_nodes=enough,
        enough_seconds=seconds(enough),
        measured_on=measured_on,
        shared=slow > 1,
    )


def wall_clock(stages: Sequence[Stage], slots: int) -> float:
    """Return the seconds from the start of the first unit to the end of the last."""
    return sum(
        max(
            (start + unit.seconds for start, unit in zip(_starts(stage, slots), stage, strict=True)),
            default=0.0,
        )
        for stage in stages
    )


def _starts(units: Stage, slots: int) -> list[float]:
    """Return when each unit starts: a free slot takes the first one that is ready."""
    waits = [len(unit.after) for unit in units]
    followers: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for index, unit in enumerate(units):
        for before, share in unit.after:
            followers[before].append((index, share))
    ready = [index for index, count in enumerate(waits) if not count]
    starts = [0.0] * len(units)
    free, now = slots, 0.0
    # When a slot becomes free, or a checkpoint that a unit waits for is saved.
    events: list[tuple[float, int]] = []
    while ready or events:
        while ready and free:
            index = heapq.heappop(ready)
            free, starts[index] = free - 1, now
            heapq.heappush(events, (now + units[index].seconds, _FREE))
            for follower, share in followers[index]:
                heapq.heappush(events, (now + share * units[index].seconds, follower))
        now = events[0][0]
        while events and events[0][0] == now:
            _, index = heapq.heappop(events)
            if index == _FREE:
                free += 1
                continue
            waits[index] -= 1
            if not waits[index]:
                heapq.heappush(ready, index)
    return starts


def _critical_path(units: Stage) -> list[Step]:
    """Return the units that decide when the last one ends if none waits for a slot."""
    if not units:
        return []
    starts = _starts(units, len(units))
    index = max(range(len(units)), key=lambda one: starts[one] + units[one].seconds)
    path, share = [Step(units[index].name, units[index].contest, units[index].seconds)], 1.0
    while units[index].after:
        index, share = max(
            units[index].after, key=lambda wait: starts[wait[0]] + wait[1] * units[wait[0]].seconds
        )
        path.insert(0, Step(units[index].name, units[index].contest, share * units[index].seconds))
    return path
