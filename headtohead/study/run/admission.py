"""Check the causality of arms with user code before a study trains anything.

A passed check is cached by source, options, size, precision, batch and package version. A failed check is repeated at
every start, because a file that the arm imports may have been fixed.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from headtohead.common.errors import UserError, first_line
from headtohead.common.files import canonical_json, digest, read_json, write_json
from headtohead.common.version import VERSION
from headtohead.data.shards import cache_dir
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.check.gate import GateResult, gate_result_from
from headtohead.study.numerics import NUMERICS
from headtohead.study.plan.dataset import dataset_of
from headtohead.study.plan.execution import ExecutionSettings, micro_batch
from headtohead.study.plan.run_spec import Plan, Run
from headtohead.study.run.gate import check_causality_halving, has_user_code, trial_of
from headtohead.study.store.manifest import Check
from headtohead.study.store.run_store import RunDirectory
from headtohead.study.store.validation import size_of, training_of

RULES = 1
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
    first = plan.spec.seeds[0]
    runs = [run for run in plan.runs if run.seed == first and has_user_code(run.layers)]
    by_key = {_key(run, execution): run for run in reversed(runs)}
    known = {key: found for key, run in by_key.items() if (found := _kept(key, run)) is not None}
    missing = {key: run for key, run in by_key.items() if key not in known}
    apart = apart and all(composed.portable for run in missing.values() for composed in run.layers)
    inspect = _checked_apart if apart else _checked_here
    for index, (key, found) in enumerate(zip(missing, inspect([*missing.values()], execution), strict=True)):
        progress(f"checking {missing[key].arm.label}", index / len(missing))
        known[key] = found
        _keep(key, missing[key], found)
    found_in = [(run, known[_key(run, execution)]) for run in runs]
    checks = [Check(run.arm.label, run.contest, one.failed, one.marks, one.warnings) for run, one in found_in]
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


def check_record(
    record: dict[str, Any], execution: ExecutionSettings, layers: Sequence[Composed]
) -> GateResult:
    """Return the gate's findings for the model of a run's record at its initial values."""
    device = torch.device(execution.device)
    size, training, seed = size_of(record), training_of(record), int(record["seed"])
    try:
        with _threads(execution.threads, device):
            # The run has no directory yet. Its tokenizer is read from there only if the original file has moved.
            dataset = dataset_of(RunDirectory(Path(record["id"])), record, execution.data_dir)
            model = dataset.model(size, layers, seed).to(device)
            batches = dataset.batches(size, training, seed)
            micro = execution.micro or micro_batch(size, batches.sequences, device)
            trial = trial_of(dataset, batches, size.context, training.precision, micro, device)
            return check_causality_halving(model, trial, shake=True)
    except Exception as error:  # its runs will fail the same way and be recorded as failed
        return _unchecked(first_line(error))


def _unchecked(reason: str) -> GateResult:
    return GateResult(warnings=(f"it could not be checked before training: {reason}",))


def _checked_here(runs: list[Run], execution: ExecutionSettings) -> Iterator[GateResult]:
    for run in runs:
        yield check_record(run.record(), execution, run.layers)


def _checked_apart(runs: list[Run], execution: ExecutionSettings) -> Iterator[GateResult]:
    """Yield the same from another process. If it dies, a new one continues with the next run."""
    records = [run.record() for run in runs]
    while records:
        order = json.dumps({"conditions": dataclasses.asdict(execution), "records": records})
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "headtohead.study.run.gate_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                with suppress(OSError):  # it died at once
                    process.stdin.write(order + "\n")
                    process.stdin.close()
                for line in process.stdout:
                    if line.startswith(ANSWER):
                        yield gate_result_from(json.loads(line.removeprefix(ANSWER)))
                        records = records[1:]
            finally:
                process.kill()
                code = process.wait()
            if records:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["no message"])[-1]
                yield _unchecked(f"signal {-code} ended its process" if code < 0 else last)
                records = records[1:]


ANSWER = "headtohead-gate "
"""Prefix of result lines from the other process; user code may print lines of its own."""


def _cached(key: str, run: Run) -> Path | None:
    """Return the cache path of the gate's result, or None for a class passed in Python: it has no file to hash."""
    if not all(term.path or not term.source for composed in run.layers for term in composed.terms):
        return None
    return cache_dir() / "checks" / f"{key}.json"


def _kept(key: str, run: Run) -> GateResult | None:
    try:
        return gate_result_from(read_json(path)) if (path := _cached(key, run)) else None
    except (UserError, KeyError, TypeError, ValueError):  # missing or damaged
        return None


def _keep(key: str, run: Run, found: GateResult) -> None:
    unchecked = any("could not be checked" in text for text in found.warnings)
    path = _cached(key, run)
    if path is None or found.failed or unchecked:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found.as_dict())


def _key(run: Run, execution: ExecutionSettings) -> str:
    """Return a hash of everything that the gate's result depends on."""
    return digest(
        canonical_json(
            {
                "rules": RULES,
                "version": [VERSION, NUMERICS, torch.__version__],
                "layers": run.identity["layers"],
                "names": [composed.text for composed in run.layers],
                # Classes without a file may share a name; their results are not cached beyond this process.
                "classes": [
                    id(term.kind)
                    for composed in run.layers
                    if not composed.portable
                    for term in composed.terms
                ],
                "size": run.identity["size"],
                "precision": run.training.precision,
                "batch": run.training.batch,
                "data": run.corpus["content"],
                "task": run.identity.get("task"),
                "device": torch.device(execution.device).type,
            }
        )
    )[:32]


@contextmanager
def _threads(count: int, device: torch.device) -> Iterator[None]:
    """Use as many torch threads as a run does: more threads slow small models down."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
