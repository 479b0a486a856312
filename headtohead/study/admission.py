"""Which arms are admitted to a study: those with user code pass the causality gate before anything is trained.

What passed is kept in the user's cache by source, options, size, precision, batch and package version. What failed is
checked again at every start: a file that it imports may have been repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from headtohead.common.errors import UserError, first_line
from headtohead.common.files import canonical_json, digest, read_json, write_json
from headtohead.common.version import VERSION
from headtohead.data.shards import cache_dir
from headtohead.model.check.gate import Inspection, inspection_from
from headtohead.study.gate import has_user_code, inspect_halving, trial_of
from headtohead.study.numerics import NUMERICS
from headtohead.study.outline import Check
from headtohead.study.perform import Conditions, micro_batch
from headtohead.study.planned import Plan, Run

RULES = 1
"""The number of the gate's rules; what passed other rules is checked again."""


def check_plan(
    plan: Plan,
    conditions: Conditions,
    *,
    allow: bool = False,
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> tuple[Check, ...]:
    """Return what the gate found in each arm with user code, by contest; one that fails is rejected unless allowed."""
    first = plan.spec.seeds[0]
    runs = [run for run in plan.runs if run.seed == first and has_user_code(run.layers)]
    known: dict[str, Inspection] = {}
    checks = []
    for place, run in enumerate(runs):
        progress(f"checking {run.arm.label}", place / len(runs))
        key = _key(run, conditions)
        if key not in known:
            known[key] = _inspected(run, conditions, key)
        found = known[key]
        checks.append(Check(run.arm.label, run.contest, found.failed, found.marks, found.warnings))
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


def _inspected(run: Run, conditions: Conditions, key: str) -> Inspection:
    # A class that was handed over in Python has no file whose hash could stand for it.
    named = all(term.path or not term.source for composed in run.layers for term in composed.terms)
    path = cache_dir() / "checks" / f"{key}.json"
    if named and (found := _kept(path)) is not None:
        return found
    device = torch.device(conditions.device)
    assert run.ground is not None
    try:
        with _threads(conditions.threads, device):
            model = run.ground.model(run.size, run.layers, run.seed).to(device)
            feed = run.ground.feed(run.size, run.training, run.seed)
            micro = conditions.micro or micro_batch(run.size, feed.sequences, device)
            trial = trial_of(run.ground, feed, run.size.context, run.training.precision, micro, device)
            found = inspect_halving(model, trial, shake=True)
    except Exception as error:  # its runs will fail alike, and are recorded so
        return Inspection(warnings=(f"it could not be checked before training: {first_line(error)}",))
    if named and not found.failed:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, found.as_dict())
    return found


def _kept(path: Path) -> Inspection | None:
    try:
        return inspection_from(read_json(path))
    except (UserError, KeyError, TypeError, ValueError):  # not there, or damaged
        return None


def _key(run: Run, conditions: Conditions) -> str:
    """Return what stands for everything that the gate's answer depends on."""
    return digest(
        canonical_json(
            {
                "rules": RULES,
                "version": [VERSION, NUMERICS, torch.__version__],
                "layers": run.identity["layers"],
                "names": [composed.text for composed in run.layers],
                "size": run.identity["size"],
                "precision": run.training.precision,
                "batch": run.training.batch,
                "data": run.corpus["content"],
                "task": run.identity.get("task"),
                "device": torch.device(conditions.device).type,
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
