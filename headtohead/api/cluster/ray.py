"""The Ray cluster that a study runs on, with the settings that depend on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from headtohead.common.errors import UserError
from headtohead.common.progress import progress_bar
from headtohead.study.config.spec import StudySpec
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.run.cluster.engine import Engine, Resources, able_nodes, check_nodes


@dataclass(frozen=True)
class Cluster:
    """The cluster of a study, and the settings that depend on it."""

    engine: Engine
    execution: ExecutionSettings
    planning: ExecutionSettings
    """The settings for what this machine does: it may lack the device of the nodes."""
    slots: int
    """Runs at the same time."""


@contextmanager
def ray_cluster(
    spec: StudySpec,
    execution: ExecutionSettings,
    device: str,
    cpus_per_run: float | None,
    gpus_per_run: float | None,
    quiet: bool,
) -> Iterator[Cluster]:
    """Yield the Ray cluster that a study runs on, after its nodes were checked; left at the end.

    `device` is the requested one. `auto` means the GPUs of the cluster if it has any.
    """
    from headtohead.study.run.cluster.ray_engine import RayEngine

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device {device}: Ray assigns the devices of its nodes; give cuda, cpu or auto")
    Resources(cpus_per_run or 1.0, gpus_per_run or 0.0)  # before a cluster is started for nothing
    timed = any(length.startswith("time") for length in spec.lengths)
    with progress_bar("connecting to Ray", quiet) as progress:
        engine = RayEngine(execution.threads)
        try:
            gpus = sum(node.gpus for node in engine.nodes())
            chosen = device if device != "auto" else "cuda" if gpus and gpus_per_run != 0 else "cpu"
            if chosen == "cuda" and not gpus:
                raise UserError(
                    "device 'cuda' requested, but no node of the cluster has a GPU; use cpu or auto"
                )
            default = 1.0 if chosen == "cuda" else 0.0
            engine.needed = Resources(
                float(execution.threads) if cpus_per_run is None else cpus_per_run,
                default if gpus_per_run is None else gpus_per_run,
            )
            if chosen == "cuda" and not engine.needed.gpus:
                raise UserError(
                    "device 'cuda' requested with gpus_per_run=0; give a share such as 0.5, or use cpu"
                )
            here = chosen if chosen == "cpu" or torch.cuda.is_available() else "cpu"
            if timed and here != chosen:
                raise UserError(
                    "length=time measures the arms on the device of the cluster, and this machine has no GPU: start "
                    "h2h on a node that has one (ray job submit --entrypoint-num-gpus 1 -- h2h race ... --on ray)"
                )
            progress("checking the nodes", 0.5)
            check_nodes(engine, timed=timed)
            slots = sum(node.slots(engine.needed) for node in able_nodes(engine))
            execution = dataclasses.replace(execution, device=chosen)
            # Populations are divided until every slot has a pass; nodes do not divide theirs again.
            planning = dataclasses.replace(execution, device=here, devices=(here,) * slots)
            cluster = Cluster(engine, execution, planning, slots)
        except BaseException:
            engine.close()
            raise
    try:
        yield cluster
    finally:
        engine.close()
