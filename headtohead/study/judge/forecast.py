"""Forecast a study before it runs: its cost and the differences it can detect."""

from __future__ import annotations

import dataclasses
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from headtohead.common.errors import UnreadableFile
from headtohead.common.files import canonical_json
from headtohead.common.schema import Plain
from headtohead.common.text import counted
from headtohead.study.environment import device_name
from headtohead.study.judge.schedule import (
    Cluster,
    ClusterForecast,
    Stage,
    Unit,
    forecast_cluster,
    wall_clock,
)
from headtohead.study.judge.statistics import POWER, detectable_difference
from headtohead.study.judge.verdict import Verdict
from headtohead.study.plan.execution import ExecutionSettings, cpu_threads
from headtohead.study.plan.plan import Plan
from headtohead.study.plan.population import group_populations
from headtohead.study.plan.step_timing import same_speed, trial
from headtohead.study.store.manifest import METRIC
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store
from headtohead.training.checkpoint import KEPT
from headtohead.training.population import PopulationTrainer
from headtohead.training.trainer import LOGGED_POINTS, Runs, timed_step

Progress = Callable[[str, float], None]
_STEPS = 5
"""The first step is a warm-up, the others are measured."""
_SECONDS = 4.0
"""Limit per arm; at least two steps are measured."""
_QUICK_FLOPS = (5e13, 2e10)
"""FLOPs of a step that `quick_seconds` times at most, on a GPU and on a CPU core: about a second."""
_ROW_BYTES = 200
_RESULT_BYTES = 40_000
"""Size of a run's JSON files: spec, environment, cost, and the result with its blocks."""
_SEEDS_SHOWN = (3, 5, 8, 12, 20)
_MAX_SEEDS = 1000


@dataclass(frozen=True)
class ArmForecast:
    """Cost of the unfinished runs of one arm in one contest."""

    label: str
    contest: str
    runs: int
    tokens: int
    flops: float
    """FLOPs of training, three times the forward pass."""
    tokens_per_second: float
    seconds: float
    """For all its runs in sequence, including scoring."""
    source: str
    """measured (on this device, now) or seen (in the directory's finished runs)."""
    rows: int = 1
    """Runs trained in one pass."""


@dataclass(frozen=True)
class Detectable:
    """The difference that a number of seeds detects with the stated power."""

    seeds: int
    alone: float | None
    """With two arms, two-sided 5 %."""
    holm: float | None
    """With all arms of the study, at the first and strictest step of Holm's correction."""


@dataclass(frozen=True)
class Forecast(Plain):
    """The cost of a study and the differences it can detect."""

    runs: int
    done: int
    tokens: int
    flops: float
    seconds: float
    workers: int
    device: str
    disk_bytes: int
    """Disk space after the study: weights, curves, results."""
    working_bytes: int
    """Additional disk space for checkpoints while runs are training."""
    arms: list[ArmForecast]
    spread: float | None
    """Standard deviation over seeds of the paired difference, in the metric; None: unknown."""
    spread_source: str
    seeds: int
    """Seeds planned per arm."""
    power: float
    margin: float
    compared: int
    """Arms compared with the baseline."""
    detectable: list[Detectable]
    """In the metric, or in units of the spread if the spread is unknown."""
    seeds_for_margin: int | None
    """Seeds needed to detect a difference as large as the margin; None if unknown or above 1000."""
    metric: str = METRIC
    """The metric of spread, margin and differences: that of the first contest."""
    cluster: ClusterForecast | None = None
    """If the study is to run on a cluster; `seconds` is then its wall-clock time there, and `workers` its slots."""


def seen_spread(verdicts: Sequence[Verdict]) -> float | None:
    """Return the standard deviation over seeds of paired differences, pooled over arms; None with fewer than two pairs.

    Tasks judged by another metric than the first are left out.
    """
    weights, total = 0, 0.0
    for row in [row for row in verdicts if row.metric == verdicts[0].metric]:
        differences = [a - b for a, b in zip(row.values, row.baseline_values, strict=True)]
        # Arms that share the baseline's runs have zero differences and carry no information about the spread.
        if len(differences) > 1 and any(differences):
            weights += len(differences) - 1
            total += (len(differences) - 1) * statistics.variance(differences)
    return math.sqrt(total / weights) if weights else None


def forecast_plan(
    plan: Plan,
    *,
    store: Store | None = None,
    device: torch.device,
    workers: int = 1,
    devices: int = 1,
    cluster: Cluster | None = None,
    tuning: Collection[str] = (),
    spread: float | None = None,
    spread_source: str = "",
    keep_weights: bool = True,
    progress: Progress = lambda message, share: None,
) -> Forecast:
    """Return the cost of the unfinished runs of a plan and the differences that the study can detect.

    It runs on `devices` of this machine, or on a cluster. `tuning` are the ids of runs that come before all others.
    """
    runs = list(plan.runs.values())
    entries = {entry.run: entry for entry in reversed((*plan.trunks, *plan.entries))}
    left = [run for run in runs if store is None or not store.run(run.id).finished()]
    groups: dict[tuple[str, str], list[RunSpec]] = {}
    for run in left:
        groups.setdefault((entries[run.id].contest.title, run.label), []).append(run)
    seen = _seen_rates(store, device) if store is not None else {}
    slots = workers if cluster is None else cluster.slots
    # Passes are divided until every device has one; there are never more than runs.
    used = min(len(left), devices if cluster is None else slots)
    execution = ExecutionSettings(device=str(device), devices=(str(device),) * used)
    stages = [
        group_populations([run for run in left if (run.id in tuning) is first], execution)
        for first in (True, False)
    ]
    passes = {run.id: group for stage in stages for group in stage for run in group}
    measured: dict[str, float] = {}
    seconds: dict[str, float] = {}
    arms = []
    for index, ((contest, label), members) in enumerate(groups.items()):
        first = members[0]
        key = _kind(first, len(passes[first.id]))
        if key not in seen and key not in measured:
            progress(f"measuring {label}", index / len(groups))
            measured[key] = _measure(passes[first.id], plan, device)
        rate = seen.get(key) or measured[key]
        tokens = plan.tokens(first) * len(members)
        # A forward pass is a third of a training step.
        each = (plan.tokens(first) + plan.dataset(first).scored_tokens() / 3) / rate
        seconds |= dict.fromkeys((run.id for run in members), each)
        arms.append(
            ArmForecast(
                label=label,
                contest=contest,
                runs=len(members),
                tokens=tokens,
                flops=3 * first.flops_per_token * tokens,
                tokens_per_second=rate,
                seconds=each * len(members),
                source="seen" if key in seen else "measured",
                rows=len(passes[first.id]),
            )
        )
    titles = {run: entry.contest.title for run, entry in entries.items()}
    units = [_units(stage, seconds, titles) for stage in stages]
    on_cluster = None if cluster is None else forecast_cluster(units, cluster, device_name(device))
    weights = [4 * run.parameters for run in runs]
    compared = len(plan.spec.arms) - 1
    counts = sorted({*_SEEDS_SHOWN, len(plan.spec.seeds)} - {1})
    measure = plan.measure(plan.entries[0].contest)
    margin = plan.spec.margin if measure.margin is None else measure.margin
    unit = spread if spread is not None else 1.0
    return Forecast(
        runs=len(runs),
        done=len(runs) - len(left),
        tokens=sum(arm.tokens for arm in arms),
        flops=sum(arm.flops for arm in arms),
        seconds=wall_clock(units, slots) if on_cluster is None else on_cluster.seconds,
        workers=slots,
        device=str(device) if devices == 1 else device.type,
        disk_bytes=(sum(weights) if keep_weights else 0)
        + len(runs) * (LOGGED_POINTS * _ROW_BYTES + _RESULT_BYTES),
        # A checkpoint holds the weights and AdamW's two moments; a trunk keeps one checkpoint per branch.
        working_bytes=min(slots, len(left))
        * (KEPT + 1 + max((len(run.branches) for run in left), default=0))
        * 3
        * max(weights, default=0),
        arms=arms,
        spread=spread,
        spread_source=spread_source,
        seeds=len(plan.spec.seeds),
        power=POWER,
        margin=margin,
        compared=compared,
        detectable=[
            Detectable(
                count,
                detectable_difference(unit, count),
                detectable_difference(unit, count, arms=max(1, compared)),
            )
            for count in counts
        ],
        seeds_for_margin=_seeds_for(margin, spread),
        metric=measure.name,
        cluster=on_cluster,
    )


def _units(
    groups: Sequence[Sequence[RunSpec]], seconds: Mapping[str, float], contests: Mapping[str, str]
) -> Stage:
    """Return the passes as units of a schedule, from the seconds and the contest of each run."""
    places = {run.id: (index, run) for index, group in enumerate(groups) for run in group}
    units = []
    for group in groups:
        first, more = group[0], len(group) - 1
        # A trunk that is not among the passes has ended.
        parents = [run.parent for run in group if run.parent and run.parent.run in places]
        waits = {(places[one.run][0], one.step / places[one.run][1].own_steps) for one in parents}
        units.append(
            Unit(
                name=f"{first.label}, seed {first.seed}"
                + (f" and {counted(more, 'row')} more" if more else ""),
                contest=contests.get(first.id, ""),
                seconds=sum(seconds[run.id] for run in group),
                after=tuple(sorted(waits)),
            )
        )
    return units


def training_flops(plan: Plan, runs: Sequence[RunSpec]) -> float:
    """Return the FLOPs of training runs: three times the forward pass."""
    return sum(3 * run.flops_per_token * plan.tokens(run) for run in runs)


def quick_seconds(
    plan: Plan, runs: Sequence[RunSpec], execution: ExecutionSettings, workers: int
) -> float | None:
    """Return a rough time of runs, from a few short steps of the first one and the FLOPs of all.

    None if even one window of that run would take long here; `forecast_plan` measures every arm with its own steps.
    """
    device, first = torch.device(execution.device), runs[0]
    windows = int(_QUICK_FLOPS[device.type == "cpu"] / (3 * first.flops_per_token * first.size.context))
    if windows < 1:
        return None
    batch = min(first.training.batch, windows * first.size.context)
    short = dataclasses.replace(
        first, training=dataclasses.replace(first.training, batch=batch), stacked=False, parent=None
    )
    with cpu_threads(execution.threads, device):
        rate = _measure([short], plan, device, compile=False)
    flops_per_second = 3 * first.flops_per_token * rate
    seconds = {
        run.id: (training_flops(plan, [run]) + run.flops_per_token * plan.dataset(run).scored_tokens())
        / flops_per_second
        for run in runs
    }
    return wall_clock([_units([[run] for run in runs], seconds, {})], workers)


def _seeds_for(margin: float, spread: float | None) -> int | None:
    """Return the smallest number of seeds that detects a difference of `margin`, by bisection."""
    if spread is None or margin <= 0:
        return None
    counts = range(2, _MAX_SEEDS + 1)
    index = bisect_left(counts, -margin, key=lambda count: -(detectable_difference(spread, count) or 0.0))
    return counts[index] if index < len(counts) else None


def _kind(run: RunSpec, rows: int) -> str:
    return canonical_json([rows, *same_speed(run.identity)])


def _seen_rates(store: Store, device: torch.device) -> dict[str, float]:
    """Return tokens per second by kind of run, from finished runs in a directory on the same kind of device."""
    found: dict[str, list[float]] = {}
    for run in store.runs():
        rate = run.costs().tokens_per_second
        here = any(start.device == device_name(device) for start in run.environments())
        if not here or not run.finished() or not rate:
            continue
        try:
            found.setdefault(_kind(run.spec(), int(run.costs().stacked or 1)), []).append(float(rate))
        except UnreadableFile:  # a damaged run is skipped
            continue
    return {key: statistics.median(rates) for key, rates in found.items()}


def _measure(runs: Sequence[RunSpec], plan: Plan, device: torch.device, compile: bool | None = None) -> float:
    """Return tokens per second over a few training steps of a pass on this device, in this process."""
    execution = ExecutionSettings(device=str(device), compile=compile)
    rows = len(runs) if runs[0].stacked else 0
    members = [trial(run, plan.composed(run), plan.dataset(run), execution, rows) for run in runs]
    # A population's steps are captured as a CUDA graph at the fourth.
    together: Runs = PopulationTrainer(members, record=True) if rows > 1 else members[0]
    steps = _STEPS + (4 if rows > 1 else 0)
    times: list[float] = []
    while len(times) < steps and (len(times) < 2 or sum(times) < _SECONDS):
        times.append(timed_step(together))
    warm = len(times) - _STEPS + 1 if len(times) > _STEPS else 1  # the first step includes one-time setup
    batches = members[0].batches
    tokens = len(members) * (batches.tokens(len(times)) - batches.tokens(warm))
    return tokens / max(1e-9, sum(times[warm:]))
