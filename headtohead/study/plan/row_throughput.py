"""How many rows of a population train fastest: measured once for each device, model and batch, and kept in H2H_CACHE."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import torch

from headtohead.common.errors import UnreadableFile
from headtohead.common.files import canonical_json, digest
from headtohead.common.schema import read_document, write_document
from headtohead.data.shards import cache_dir
from headtohead.mechanisms.contract.terms import Composed
from headtohead.study.environment import device_name
from headtohead.study.plan.dataset import Dataset
from headtohead.study.plan.execution import ExecutionSettings, max_rows
from headtohead.study.plan.step_timing import same_speed, trial
from headtohead.study.store.run_spec import RunSpec
from headtohead.training.acceleration import is_small
from headtohead.training.population import PopulationTrainer
from headtohead.training.trainer import Runs, timed_step

MOST = 16
"""Maximum rows of a population: a GPU gains nothing beyond."""
_GAIN = 1.05
"""Ratio of throughputs from which more rows, or rows at all, are worth it."""
_COMPILED = 1.3
"""How much faster a compiled run is at most than one that is not (docs/speed.md)."""
_WARM, _TIMED = 6, 8
Rates = dict[int, float]
"""Tokens per second by number of rows; 1 is a single run."""


def rows_pay(
    run: RunSpec, layers: Sequence[Composed], dataset: Dataset, execution: ExecutionSettings
) -> bool:
    """Return whether populations of runs like this one are faster than single runs; measures them if that is not known."""
    device = torch.device(execution.device)
    rates = _kept(_path(run, device))
    if not rates:
        rates = measure_rows(run, layers, dataset, execution)
        document = {"device": device_name(device), "rates": {str(rows): rate for rows, rate in rates.items()}}
        path = _path(run, device)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_document(path, document)
        _kept.cache_clear()
    # Single runs of larger models are compiled by default, which is not measured here: it takes half a minute.
    single = rates[1] * (1.0 if is_small(run.size) else _COMPILED)
    return max((rate for rows, rate in rates.items() if rows > 1), default=0.0) > _GAIN * single


def best_passes(run: RunSpec, rows: int, device: torch.device) -> int:
    """Return in how many passes of about equal size that many rows are trained fastest.

    As few as memory allows, unless a throughput measured on this device says that smaller passes are faster.
    """
    most = max(1, min(MOST, max_rows(run.size, run.training, device)))
    fewest = -(-rows // most)
    rates = _kept(_path(run, device))
    if not rates:
        return fewest

    def seconds(passes: int) -> float:
        sizes = [rows * (index + 1) // passes - rows * index // passes for index in range(passes)]
        counts = sorted(rates)
        return sum(
            size / float(np.interp(size, counts, [rates[count] for count in counts])) for size in sizes
        )

    best = min(map(seconds, range(fewest, rows + 1)))
    return next(passes for passes in range(fewest, rows + 1) if seconds(passes) <= _GAIN * best)


def measure_rows(
    run: RunSpec,
    layers: Sequence[Composed],
    dataset: Dataset,
    execution: ExecutionSettings,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Return the throughput of a single run and of populations of 2, 4, 8 and 16 rows, until more rows do not help."""
    device = torch.device(execution.device)
    execution = ExecutionSettings(device=execution.device, compile=False, record=True)
    most = min(MOST, max_rows(run.size, run.training, device))
    rates: Rates = {}
    for rows in (1, 2, 4, 8, 16):
        if rows > max(2, most):
            break
        members = [trial(run, layers, dataset, execution, rows if rows > 1 else 0) for _ in range(rows)]
        runs: Runs = PopulationTrainer(members, record=True) if rows > 1 else members[0]
        rates[rows] = rows * run.training.batch * _steps_per_second(runs, clock)
        if rows > 1 and rates[rows] < _GAIN * max(rate for count, rate in rates.items() if count < rows):
            break
    return rates


def _steps_per_second(runs: Runs, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(_WARM + _TIMED):
        times.append(timed_step(runs, clock))
        for member in runs.members:
            member.step = min(member.step, member.steps - 1)
    return 1 / max(1e-9, statistics.median(times[_WARM:]))


def _path(run: RunSpec, device: torch.device) -> Path:
    """Return the file of a measurement: a model and batch on a device with these versions."""
    known = [device_name(device), torch.__version__, run.identity["numerics"], *same_speed(run.identity)[1:]]
    return cache_dir() / "rows" / f"{digest(canonical_json(known))[:16]}.json"


@lru_cache(maxsize=64)
def _kept(path: Path) -> Rates:
    """Return a kept measurement, empty if there is none."""
    try:
        found = msgspec.convert(read_document(path)["rates"], dict[int, float], strict=False)
    except (UnreadableFile, KeyError, TypeError, msgspec.ValidationError):
        return {}
    return found if 1 in found else {}
