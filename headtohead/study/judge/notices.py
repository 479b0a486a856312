"""What a race says before it starts: that it compares nothing, has no interval, or is long by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headtohead.common.numbers import exact_count, short_time
from headtohead.common.text import counted
from headtohead.study.config.spec import StudySpec
from headtohead.study.judge.forecast import quick_seconds, training_flops
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import Plan
from headtohead.study.store.run_spec import RunSpec

_LARGE_FLOPS = {"cpu": 2e13, "cuda": 1e16}
"""Training FLOPs from which a default budget is announced: several minutes."""


def design_notices(spec: StudySpec) -> list[str]:
    """Return a line for a study with one arm, and one for a study with one seed."""
    arm = "one arm: nothing is compared; a second one in --arms gives verdicts"
    seed = "one seed: no interval, so every verdict stays undecided; --seeds 3 or more gives intervals"
    return [*([arm] if len(spec.arms) == 1 else []), *([seed] if len(spec.seeds) == 1 else [])]


def budget_notices(
    settings: Mapping[str, Any],
    plan: Plan,
    left: Sequence[RunSpec],
    execution: ExecutionSettings,
    workers: int,
) -> list[str]:
    """Return a line about a large budget that nobody asked for, and the time of the runs left where a line calls for it.

    `settings` are those of the study as given.
    """
    device = execution.device.partition(":")[0]
    given = any(name in settings for name in ("tokens", "bytes", "branches"))
    large = not given and training_flops(plan, left) > _LARGE_FLOPS.get(device, _LARGE_FLOPS["cpu"])
    if not left or not (large or design_notices(plan.spec)):
        return []
    notices = []
    if large:
        tokens = dict.fromkeys(exact_count(run.training.tokens) for run in left)
        sizes = ", ".join(plan.spec.sizes)
        each = f"{counted(len(left), 'run')} of {' or '.join(tokens)} tokens"
        notices.append(f"default budget of size {sizes}: {each}; --tokens sets another")
    seconds = quick_seconds(plan, left, execution, workers)
    if seconds is None:
        notices.append(f"forecast: long on {device}; h2h forecast with the same options estimates the time")
    else:
        # A compiled step or a population of seeds is faster than the single step that was timed.
        about = "about" if device == "cpu" else "at most about"
        at_once = f", {workers} runs at the same time" if workers > 1 and len(left) > 1 else ""
        notices.append(f"forecast: {about} {short_time(seconds)} on {device}{at_once}")
    return notices
