"""Check the causality of arms with user code before a study trains anything.

A passed check is cached by source, options, size, precision, batch and package version. A failed check is repeated at
every start, because a file that the arm imports may have been fixed.
"""

from __future__ import annotations

import dataclasses
import queue
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, convert

from headtohead.common import VERSION
from headtohead.common.errors import UserError, first_line
from headtohead.common.files import canonical_json, digest, read_json, write_json
from headtohead.common.stop import STOPS
from headtohead.common.worker_process import WorkerProcess
from headtohead.data.shards import cache_dir
from headtohead.mechanisms.contract.terms import Composed
from headtohead.mechanisms.contract.user_code import located, user_frame
from headtohead.model.check.gate import GateResult
from headtohead.study.environment import alone_with
from headtohead.study.numerics import NUMERICS
from headtohead.study.plan.dataset import dataset_of
from headtohead.study.plan.execution import ExecutionSettings, cpu_threads, micro_batch
from headtohead.study.plan.plan import Plan
from headtohead.study.run.gate import check_causality_halving, has_user_code, trial_of
from headtohead.study.run.training import out_of_memory
from headtohead.study.store.manifest import Check
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import RunDirectory

RULES = 2
"""Version of the gate's rules. Results cached under another version are not used."""


def check_plan(
    plan: Plan,
    execution: ExecutionSettings,
    *,
    allow: bool = False,
    apart: bool = False,
    progress: Callable[[str, float], None] = lambda message, share: None,
) -> tuple[Check, ...]:
    """Return the gate's findings for each arm with user code, by contest. Raise if an arm fails, unless `allow` is set.

    With `apart` the checks run in a separate process, so code that kills its process ends only that one.
    """
    entries = [(entry, run) for entry, run in plan.first_seed() if has_user_code(plan.composed(run))]
    keys = {run.id: _key(plan, run, execution) for _, run in entries}
    by_key = {keys[run.id]: run for _, run in reversed(entries)}
    paths = {key: _cached(key, plan.composed(run)) for key, run in by_key.items()}
    known = {key: found for key, path in paths.items() if (found := _kept(path)) is not None}
    missing = {key: run for key, run in by_key.items() if key not in known}
    apart = apart and all(composed.portable for run in missing.values() for composed in plan.composed(run))
    inspect = _checked_apart if apart else _checked_here
    results = inspect(plan, [*missing.values()], execution)
    for index, (key, found) in enumerate(zip(missing, results, strict=True)):
        progress(f"checking {missing[key].label}", index / len(missing))
        known[key] = found
        _keep(paths[key], found)
    checks = [
        Check(entry.label, entry.contest, found.failed, found.marks, found.warnings)
        for entry, found in ((entry, known[keys[run.id]]) for entry, run in entries)
    ]
    failed = {check.label: check for check in reversed(checks) if check.failed}
    if failed and not allow:
        texts = {arm.label: arm.text for arm in plan.spec.arms}
        raise UserError(
            "; ".join(f"arm '{texts[label]}': {'; '.join(check.failed)}" for label, check in failed.items())
            + ". Nothing was trained. Inspect the arm with h2h check; --allow-failed-check (allow_failed_check=True) "
            "trains it anyway, but no verdict will call it better or equivalent"
        )
    return tuple(checks)


def check_lines(checks: tuple[Check, ...]) -> list[str]:
    """Return the lines about checked arms that are printed when a study starts, without duplicates."""
    return list(
        dict.fromkeys(
            f"{check.label}: {message}"
            for check in checks
            for message in (*(f"failed check: {one}" for one in check.failed), *check.marks, *check.warnings)
        )
    )


def check_run(spec: RunSpec, execution: ExecutionSettings, layers: Sequence[Composed]) -> GateResult:
    """Return the gate's findings for the model of a run at its initial values."""
    device = torch.device(execution.device)
    size, training, seed = spec.size, spec.training, spec.seed
    try:
        with cpu_threads(execution.threads, device):
            # The run has no directory yet. Its tokenizer is read from there only if the original file has moved.
            dataset = dataset_of(RunDirectory(Path(spec.id)), spec, execution.data_dir)
            model = dataset.model(size, layers, seed).to(device)
            batches = dataset.batches(size, training, seed)
            micro = execution.micro or micro_batch(size, batches.sequences, device)
            trial = trial_of(dataset, batches, size.context, training.precision, micro, device)
            return check_causality_halving(model, trial, shake=True)
    except STOPS:
        raise
    except BaseException as error:
        frame = user_frame(error)
        if frame is None or out_of_memory(error):  # its runs may fail the same way and are recorded as failed
            return _unchecked(first_line(error))
        return GateResult(failed=(located(error, frame),))


def _unchecked(reason: str) -> GateResult:
    return GateResult(warnings=(f"it could not be checked before training: {reason}",))


def _checked_here(plan: Plan, runs: list[RunSpec], execution: ExecutionSettings) -> Iterator[GateResult]:
    for run in runs:
        yield check_run(run, execution, plan.composed(run))


class Order(Struct, frozen=True):
    """What a process of the gate checks."""

    execution: ExecutionSettings
    runs: list[dict[str, Any]]
    """Contents of spec.json."""


def _checked_apart(plan: Plan, runs: list[RunSpec], execution: ExecutionSettings) -> Iterator[GateResult]:
    """Yield the same from another process. If it dies, a new one continues with the next run."""
    left = [run.as_dict() for run in runs]
    device, environment = alone_with(execution.device)
    execution = dataclasses.replace(execution, device=device)
    while left:
        events: queue.Queue[tuple[WorkerProcess, GateResult]] = queue.Queue()
        with tempfile.TemporaryFile("w+") as log:
            worker = WorkerProcess(
                "headtohead.study.run.gate_worker",
                Order(execution, left),
                GateResult,
                events,
                log=log,
                environment=environment,
            )
            try:
                while left and (worker.alive or not events.empty()):
                    with suppress(queue.Empty):
                        yield events.get(timeout=0.2)[1]
                        left = left[1:]
            finally:
                worker.process.kill()
                code = worker.process.wait()
            if left:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["no message"])[-1]
                yield _unchecked(f"signal {-code} ended its process" if code < 0 else last)
                left = left[1:]


def _cached(key: str, layers: Sequence[Composed]) -> Path | None:
    """Return the cache path of the gate's result, or None for a class passed in Python: it has no file to hash."""
    if not all(term.path or not term.source for composed in layers for term in composed.terms):
        return None
    return cache_dir() / "checks" / f"{key}.json"


def _kept(path: Path | None) -> GateResult | None:
    try:
        return convert(read_json(path), GateResult) if path else None
    except (UserError, ValueError):  # missing or damaged
        return None


def _keep(path: Path | None, found: GateResult) -> None:
    unchecked = any("could not be checked" in text for text in found.warnings)
    if path is None or found.failed or unchecked:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found.as_dict())


def _key(plan: Plan, run: RunSpec, execution: ExecutionSettings) -> str:
    """Return a hash of everything that the gate's result depends on."""
    return digest(
        canonical_json(
            {
                "rules": RULES,
                "version": [VERSION, NUMERICS, torch.__version__],
                "layers": run.identity["layers"],
                "names": list(run.layers),
                # Classes without a file may share a name; their results are not cached beyond this process.
                "classes": [
                    id(term.kind)
                    for composed in plan.composed(run)
                    if not composed.portable
                    for term in composed.terms
                ],
                "size": run.identity["size"],
                "precision": run.training.precision,
                "batch": run.training.batch,
                "data": run.corpus.content,
                "task": run.identity.get("task"),
                "device": torch.device(execution.device).type,
            }
        )
    )[:32]
