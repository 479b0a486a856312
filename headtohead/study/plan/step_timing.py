"""Seconds per step, for length = time: measured once, then frozen in study.lock.json.

All arms of a contest run in one process on one device and take turns, step by step, so that a machine that slows
down slows all of them. The first steps, which include compilation and allocator warm-up, are not counted. The result is
the median: of the seconds for the first arm, of the ratio to the first arm in the same round for the others. A
measurement in the lock is never repeated, so a resumed study has the same runs. An arm added later is timed together
with a known one and scaled by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json, digest
from headtohead.kernels import plain
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.sizes import Size
from headtohead.study.environment import device_name
from headtohead.study.plan.dataset import Dataset
from headtohead.study.plan.execution import ExecutionSettings, micro_batch
from headtohead.study.plan.plan import LayerTable, StepTime
from headtohead.study.store.frozen import NAME, FrozenSeconds, changing_lock, read_lock
from headtohead.study.store.lease import LeaseManager
from headtohead.study.store.run_spec import RunSpec
from headtohead.training.acceleration import compiles
from headtohead.training.trainer import Trainer

_WARM = 2
"""Warm-up steps of each arm, not counted."""
_FEWEST, _MOST = 8, 40
"""Counted steps of each arm: a twentieth of a run, within these limits."""
_POLL_SECONDS = 0.5


class FrozenStepTimes:
    """Returns the seconds per step in study.lock.json, and measures the missing ones."""

    def __init__(
        self,
        folder: Path,
        execution: ExecutionSettings,
        *,
        progress: Callable[[str, float], None] = lambda message, share: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.folder, self.execution, self.progress, self.clock = folder, execution, progress, clock

    def __call__(
        self, runs: list[RunSpec], layers: LayerTable, dataset: Dataset, path: str
    ) -> list[StepTime]:
        """Return the step time of each run. Measurements are written to the lock before they are used."""
        keys = [_key(run, path) for run in runs]
        if any(key not in read_lock(self.folder).seconds for key in keys):
            self.folder.mkdir(parents=True, exist_ok=True)
            leases = LeaseManager()
            # Two executors timing at once would slow each other down and plan different runs.
            while not self._measured_alone(leases, keys, runs, layers, dataset, path):
                self.progress("waiting for another process that is timing the arms", 0.0)
                time.sleep(_POLL_SECONDS)
        known = read_lock(self.folder).seconds
        return [StepTime(row.seconds, row.spread, row.where) for row in (known[key] for key in keys)]

    def _measured_alone(
        self,
        leases: LeaseManager,
        keys: list[str],
        runs: list[RunSpec],
        layers: LayerTable,
        dataset: Dataset,
        path: str,
    ) -> bool:
        with leases.acquire(self.folder) as lease:
            if lease is None:
                return False
            known = read_lock(self.folder).seconds
            by_key = dict(zip(keys, runs, strict=True))
            missing = [key for key in by_key if key not in known]
            if missing:
                self._freeze(known, by_key, missing, layers, dataset, path)
        return True

    def _freeze(
        self,
        known: dict[str, FrozenSeconds],
        runs: dict[str, RunSpec],
        missing: list[str],
        layers: LayerTable,
        dataset: Dataset,
        path: str,
    ) -> None:
        where = self._where(path, next(iter(runs.values())).size)
        anchor = [key for key in runs if key in known][:1]
        for key in anchor:
            if known[key].where != where:
                raise UserError(
                    f"the seconds per step of this study were measured on {known[key].where}; {where} is not comparable: "
                    f"continue there, or remove {self.folder / NAME} to measure and plan again"
                )
        names = [*anchor, *missing]
        samples = self._measure([runs[key] for key in names], layers, dataset, path)
        # The known arm keeps its value; the others are scaled by it.
        whole = known[anchor[0]].seconds if anchor else float(np.median(samples[0]))
        measured = {}
        for index, key in enumerate(names):
            if key not in missing:
                continue
            first = samples[0] if index else np.median(samples[0])
            low, ratio, high = (float(share) for share in np.percentile(samples[index] / first, (25, 50, 75)))
            spread = (high - low) / 2 / ratio
            run = runs[key]
            measured[key] = FrozenSeconds(
                whole * ratio, spread, where, run.arm, run.size.dims, samples.shape[1]
            )
        with changing_lock(self.folder) as lock:
            lock.seconds.update(measured)

    def _where(self, path: str, size: Size) -> str:
        device = torch.device(self.execution.device)
        count = self.execution.threads
        threads = f", {count} thread{'s' if count > 1 else ''}" if device.type == "cpu" else ""
        compiled = ", compiled" if compiles(self.execution.compile, size, device) else ""
        return f"{device_name(device)}{threads}, {path} path{compiled}"

    def _measure(
        self, runs: list[RunSpec], layers: LayerTable, dataset: Dataset, path: str
    ) -> np.ndarray[Any, Any]:
        """Return the seconds of each run's counted steps, shape (runs, steps)."""
        device = torch.device(self.execution.device)
        steps = max(run.steps for run in runs)
        rounds = _WARM + min(_MOST, max(_FEWEST, steps // 20))
        threads = torch.get_num_threads()
        if device.type == "cpu":
            torch.set_num_threads(self.execution.threads)
        samples: list[list[float]] = [[] for _ in runs]
        arm = runs[0].arm
        try:
            with plain() if path == "plain" else nullcontext():
                trainers = []
                for run in runs:
                    arm = run.arm
                    trainers.append(trial(run, layers[run.layers], dataset, self.execution))
                for round_index in range(rounds):
                    self.progress(
                        f"timing {len(runs)} arms, step {round_index + 1} of {rounds}", round_index / rounds
                    )
                    for index, trainer in enumerate(trainers):
                        arm = runs[index].arm
                        seconds = trainer.timed_step(self.clock)
                        if round_index >= _WARM:
                            samples[index].append(seconds)
        except (OSError, UserError):
            raise
        except Exception as error:
            lines = str(error).strip().splitlines()
            cause = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
            raise UserError(
                f"length=time cannot be met: timing a step of arm '{arm}' failed: {cause}"
            ) from error
        finally:
            torch.set_num_threads(threads)
        taken = np.array(samples)
        if taken.min() <= 0:
            raise UserError("length=time cannot be met: the clock measured 0 seconds for a step")
        return taken


def trial(
    run: RunSpec, layers: Sequence[Composed], dataset: Dataset, execution: ExecutionSettings, rows: int = 0
) -> Trainer:
    """Return a trainer of a run, or of one of the rows of a population, for a few steps; nothing is saved."""
    device = torch.device(execution.device)
    torch.manual_seed(run.seed)
    batches = dataset.batches(run.size, run.training, run.seed)
    return Trainer(
        dataset.model(run.size, layers, run.seed).to(device),
        batches,
        run.training,
        micro=execution.micro or micro_batch(run.size, batches.sequences, device, rows),
        compile=not rows and not dataset.task and compiles(execution.compile, run.size, device),
        record=not rows and bool(execution.record),
    )


def same_speed(identity: Mapping[str, Any]) -> list[Any]:
    """Return the parts of an identity that determine the step time: model and step, not seed or length."""
    step = {key: identity["training"][key] for key in ("batch", "precision")}
    # Example lengths differ between tasks; windows of corpora are always as long as the context.
    task = [[identity["task"], identity["corpus"]]] if "task" in identity else []
    return [identity["layers"], identity["size"], step, *task]


def _key(run: RunSpec, path: str) -> str:
    return digest(canonical_json([*same_speed(run.identity), path]))[:16]
