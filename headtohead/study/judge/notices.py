"""What a race says before it starts: that it compares nothing, has no interval, repeats its text, or is long by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headtohead.common.numbers import exact_count, short_count, short_time
from headtohead.common.text import counted
from headtohead.study.config.spec import StudySpec
from headtohead.study.judge.forecast import quick_seconds, training_flops
from headtohead.study.plan.dataset import CorpusDataset
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import Plan
from headtohead.study.store.run_spec import RunSpec

_LARGE_FLOPS = {"cpu": 2e13, "cuda": 1e16}
"""Training FLOPs from which a default budget is announced: several minutes."""

_MANY_PASSES = 4
"""Passes over the text from which they are announced: up to about four, repeated text is worth nearly as much as new."""


def design_notices(spec: StudySpec) -> list[str]:
    """Return a line for a study with one arm, and one for a study with one seed."""
    arm = "one arm: nothing is compared; a second one in --arms gives verdicts"
    seed = "one seed: no interval, so every verdict stays undecided; --seeds 3 or more gives intervals"
    return [*([arm] if len(spec.arms) == 1 else []), *([seed] if len(spec.seeds) == 1 else [])]


def repetition_notices(plan: Plan) -> list[str]:
    """Return a line for each corpus that the longest run sees often."""
    longest: dict[str, int] = {}
    for run in plan.runs.values():
        longest[run.corpus.content] = max(longest.get(run.corpus.content, 0), run.training.tokens)
    notices = []
    for content, tokens in longest.items():
        dataset = plan.datasets[content]
        if not isinstance(dataset, CorpusDataset):  # the examples of a task are repeated as a rule
            continue
        unique = len(dataset.corpus.splits["train"].tokens)
        if (passes := tokens / unique) >= _MANY_PASSES:
            notices.append(
                f"corpus {dataset.label} has {short_count(unique)} tokens to train on: "
                f"{short_count(tokens)} tokens repeat it {passes:,.0f} times"
            )
    return notices


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
