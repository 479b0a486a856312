"""Which arms are admitted to a study: those with user code pass the causality gate before anything is trained.

What passed is kept in the user's cache by source, options, size, precision, batch and package version. What failed is
checked again at every start: a file that it imports may have been repaired.
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
"""The number of the gate's rules; what passed other rules is checked again."""


def check_plan(
    plan: Plan,
    execution: ExecutionSettings,
    *,
    allow: bool = False,
    apart: bool = False,
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> tuple[Check, ...]:
    """Return what the gate found in each arm with user code, by contest; one that fails is rejected unless allowed.

    `apart` checks in another process, as runs are trained in others: code that kills its process ends only that one.
    """
    first = plan.spec.seeds[0]
    runs = [run for run in plan.runs if run.seed == first and has_user_code(run.layers)]
    by_key = {_key(run, execution): run for run in reversed(runs)}
    known = {key: found for key, run in by_key.items() if (found := _kept(key, run)) is not None}
    missing = {key: run for key, run in by_key.items() if key not in known}
    apart = apart and all(composed.portable for run in missing.values() for composed in run.layers)
    inspect = _checked_apart if apart else _checked_here
    for place, (key, found) in enumerate(zip(missing, inspect([*missing.values()], execution), strict=True)):
        progress(f"checking {missing[key].arm.label}", place / len(missing))
        known[key] = found
        _keep(key, missing[key], found)
    found_in = [(run, known[_key(run, execution)]) for run in runs]
    checks = [Check(run.arm.label, run.contest, one.failed, one.marks, one.warnings) for run, one in found_in]
    failed = {check.label: check for check in reversed(checks) if check.failed}
    if failed and not allow:
        texts = {arm.label: arm.text for arm in plan.spec.arms}
        raise UserError(
            "; ".join(f"arm '{texts[label]}': {'; '.join(check.failed)}" for label, check in failed.items())
            + ". Nothing was trained. h2h check examines a mechanism; --allow-failed-check (allow_failed_check=True) "
            "trains it all the same, and no verdict will call it better or equivalent"
        )
    return tuple(checks)


def check_lines(checks: tuple[Check, ...]) -> list[str]:
    """Return what is said of checked arms when a study starts, each thing once."""
    return list(
        dict.fromkeys(
            f"{check.label}: {words}"
            for check in checks
            for words in (*(f"failed check: {one}" for one in check.failed), *check.marks, *check.warnings)
        )
    )


def check_record(
    record: dict[str, Any], execution: ExecutionSettings, layers: Sequence[Composed]
) -> GateResult:
    """Return what the gate finds in the model of a run's record, at its start values."""
    device = torch.device(execution.device)
    size, training, seed = size_of(record), training_of(record), int(record["seed"])
    try:
        with _threads(execution.threads, device):
            # The run has no directory yet; a tokenizer is taken from there only when its file has moved since.
            dataset = dataset_of(RunDirectory(Path(record["id"])), record, execution.data_dir)
            model = dataset.model(size, layers, seed).to(device)
            batches = dataset.batches(size, training, seed)
            micro = execution.micro or micro_batch(size, batches.sequences, device)
            trial = trial_of(dataset, batches, size.context, training.precision, micro, device)
            return check_causality_halving(model, trial, shake=True)
    except Exception as error:  # its runs will fail alike, and are recorded so
        return _unchecked(first_line(error))


def _unchecked(reason: str) -> GateResult:
    return GateResult(warnings=(f"it could not be checked before training: {reason}",))


def _checked_here(runs: list[Run], execution: ExecutionSettings) -> Iterator[GateResult]:
    for run in runs:
        yield check_record(run.record(), execution, run.layers)


def _checked_apart(runs: list[Run], execution: ExecutionSettings) -> Iterator[GateResult]:
    """Yield the same from another process; after one that died a new one goes on with the next run."""
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
"""What a line of the other process begins with: user code may print lines of its own."""


def _cached(key: str, run: Run) -> Path | None:
    """Return where the gate's answer is kept; a class that was handed over in Python has no file whose hash names it."""
    if not all(term.path or not term.source for composed in run.layers for term in composed.terms):
        return None
    return cache_dir() / "checks" / f"{key}.json"


def _kept(key: str, run: Run) -> GateResult | None:
    try:
        return gate_result_from(read_json(path)) if (path := _cached(key, run)) else None
    except (UserError, KeyError, TypeError, ValueError):  # not there, or damaged
        return None


def _keep(key: str, run: Run, found: GateResult) -> None:
    unchecked = any("could not be checked" in words for words in found.warnings)
    path = _cached(key, run)
    if path is None or found.failed or unchecked:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found.as_dict())


def _key(run: Run, execution: ExecutionSettings) -> str:
    """Return what stands for everything that the gate's answer depends on."""
    return digest(
        canonical_json(
            {
                "rules": RULES,
                "version": [VERSION, NUMERICS, torch.__version__],
                "layers": run.identity["layers"],
                "names": [composed.text for composed in run.layers],
                # Classes without a file may share a name; what is found in them is not kept beyond this process.
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
    """Inside, torch uses as many threads as a run: more of them slow small models down."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
