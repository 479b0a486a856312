"""Passes are scheduled as the executors do it: a free slot takes the first pass that is ready."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from headtohead.common.errors import UserError
from headtohead.study.judge.schedule import Cluster, Unit, forecast_cluster, wall_clock


def units(*seconds: float) -> list[Unit]:
    return [Unit(str(index), "", one) for index, one in enumerate(seconds)]


TRUNK = [
    Unit("trunk", "", 10.0),
    Unit("other", "", 4.0),
    Unit("short branch", "", 5.0, ((0, 0.3),)),
    Unit("long branch", "", 2.0, ((0, 1.0),)),
]


def test_a_free_slot_takes_the_next_pass_in_the_order_of_the_plan() -> None:
    assert wall_clock([units(3, 1, 1, 4)], 2) == 6, "the longest starts last"
    assert wall_clock([units(4, 3, 1, 1)], 2) == 5
    assert wall_clock([units(3, 1, 1, 4)], 1) == 9
    assert wall_clock([units(3, 1, 1, 4)], 99) == 4, "the longest pass bounds"
    assert wall_clock([[], []], 3) == 0


def test_a_branch_waits_for_the_checkpoint_of_its_trunk() -> None:
    assert wall_clock([TRUNK], 1) == 21
    # The second slot: other until 4, short branch until 9; the long branch waits for the end of the trunk.
    assert wall_clock([TRUNK], 2) == 12
    late = [dataclasses.replace(TRUNK[0], seconds=20.0), *TRUNK[1:]]
    assert wall_clock([late], 2) == 22, "a slot is idle from 4 to 6, when the checkpoint is saved"
    starved = [late[0], dataclasses.replace(late[2], after=((0, 0.9),))]
    assert wall_clock([starved], 2) == 23


def test_contests_start_after_the_tuning() -> None:
    assert wall_clock([units(5, 1), units(2, 2)], 2) == 7
    assert wall_clock([units(5, 1, 2, 2)], 2) == 5


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_beats_its_bounds(seed: int) -> None:
    """Between the longest chain or the mean load, and Graham's bound for list scheduling, their sum."""
    draw = random.Random(seed)
    given: list[Unit] = []
    for index in range(40):
        parents = draw.sample(range(index), min(index, draw.randrange(3)))
        given.append(
            Unit(str(index), "", draw.uniform(0.1, 9), tuple((one, draw.random()) for one in parents))
        )
    slots = draw.randrange(1, 9)
    whole, chain = wall_clock([given], slots), wall_clock([given], len(given))
    load = sum(unit.seconds for unit in given) / slots
    assert max(chain, load) <= whole + 1e-9
    assert whole <= chain + load + 1e-9


def test_a_cluster_counts_hours_utilization_and_the_nodes_that_suffice() -> None:
    found = forecast_cluster([units(*[3600.0] * 10)], Cluster(nodes=8, gpus_per_node=2), "H200")
    assert (found.slots, found.devices, found.seconds) == (16, 16, 3600.0)
    assert (found.device_hours, found.reserved_hours, found.utilization) == (10.0, 16.0, 0.625)
    assert (found.enough_nodes, found.enough_seconds) == (5, 3600.0)
    assert [step.name for step in found.critical_path] == ["0"]
    alone = forecast_cluster([units(*[3600.0] * 10)], Cluster(nodes=1, gpus_per_node=2), "H200")
    assert (alone.seconds, alone.enough_nodes, alone.utilization) == (5 * 3600, 1, 1.0)
    assert forecast_cluster([[]], Cluster(nodes=8, gpus_per_node=2), "H200").utilization == 0


def test_the_critical_path_leads_through_the_trunk_and_the_tuning() -> None:
    cluster = Cluster(nodes=100, gpus_per_node=1)
    found = forecast_cluster([units(1, 3), TRUNK], cluster, "H200")
    assert [(step.name, step.seconds) for step in found.critical_path] == [
        ("1", 3.0),
        ("trunk", 10.0),
        ("long branch", 2.0),
    ]
    assert found.critical_seconds == found.seconds == 15
    longer = [*TRUNK[:2], dataclasses.replace(TRUNK[2], seconds=50.0), TRUNK[3]]
    path = forecast_cluster([longer], cluster, "H200").critical_path
    assert [(step.name, step.seconds) for step in path] == [("trunk", 3.0), ("short branch", 50.0)]


@pytest.mark.parametrize(
    ("given", "slots"),
    [
        ({"gpus_per_node": 8}, 8),
        ({"gpus_per_node": 8, "gpus_per_run": 2}, 4),
        ({"gpus_per_node": 8, "gpus_per_run": 3}, 2),
        ({"gpus_per_node": 2, "gpus_per_run": 0.3}, 6),
        ({"gpus_per_node": 2, "gpus_per_run": 0.6}, 2),
        ({"gpus_per_node": 8, "cpus_per_node": 16, "cpus_per_run": 4}, 4),
        ({"cpus_per_node": 64}, 64),
        ({"cpus_per_node": 64, "cpus_per_run": 6}, 10),
    ],
)
def test_a_node_has_as_many_slots_as_its_scarcest_resource(given: dict[str, Any], slots: int) -> None:
    assert Cluster(nodes=3, **given).slots == 3 * slots


def test_runs_that_share_a_gpu_share_its_speed() -> None:
    whole = forecast_cluster([units(*[10.0] * 8)], Cluster(nodes=2, gpus_per_node=2), "H200")
    shared = forecast_cluster([units(*[10.0] * 8)], Cluster(2, gpus_per_node=2, gpus_per_run=0.5), "H200")
    assert (whole.slots, shared.slots) == (4, 8)
    assert whole.seconds == shared.seconds == 20
    assert whole.device_hours == pytest.approx(shared.device_hours)
    assert (whole.shared, shared.shared) == (False, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, "nodes=0 must be a whole number from 1"),
        ({"nodes": 10**400}, "nodes=10+ must be a whole number"),
        ({"nodes": 1.5}, "nodes=1.5 must be a whole number"),
        ({"gpus_per_node": -1}, "gpus_per_node=-1 must be a whole number from 0"),
        ({"gpus_per_node": 0}, "at least one GPU or CPU"),
        ({"gpus_per_node": 4, "gpus_per_run": 5}, "gpus_per_run=5 is more than a node has: gpus_per_node=4"),
        ({"gpus_per_run": 0.0}, "gpus_per_run=0 must be a number from 0.0001"),
        ({"gpus_per_run": 1e-320}, "must be a number from 0.0001"),
        ({"gpus_per_run": 1.5}, "must be a whole number, or a share below 1"),
        ({"cpus_per_node": 4, "cpus_per_run": 8}, "cpus_per_run=8 is more than a node has: cpus_per_node=4"),
        ({"cpus_per_run": float("nan")}, "cpus_per_run=nan must be a number"),
    ],
)
def test_an_impossible_cluster_is_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Cluster(**({"nodes": 2, "gpus_per_node": 8} | given))
