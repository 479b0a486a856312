"""Probe `tasks`: zero-shot scores on tasks, with chance."""

from __future__ import annotations

import math

from headtohead.common.errors import UserError
from headtohead.common.progress import part_of
from headtohead.data.tasks.zeroshot import ALL, chosen_tasks, find_task
from headtohead.evaluation.zeroshot import TaskScore, score_examples
from headtohead.study.probes.base import NUMBER, Found, Probe, Subject


def _measure(subject: Subject, argument: str) -> Found:
    # All files are read before scoring, so that a missing one is reported immediately.
    tasks = [find_task(name, subject.data_dir or None) for name in chosen_tasks(argument.split(","))]
    total = sum(len(task.examples) for task in tasks)
    scores: list[TaskScore] = []
    for task in tasks:
        before = sum(score.n for score in scores)
        shown = part_of(subject.progress, before, before + len(task.examples), total)
        scores.append(score_examples(subject.model, task, subject.tokenizer, progress=shown))
    return {
        "tasks": {score.task: score.as_dict() for score in scores},
        "mean": _mean(scores),
    }


def _mean(scores: list[TaskScore]) -> dict[str, float | None]:
    """Return the mean over tasks and its distance above chance, absolute and in standard errors."""
    accuracy, chance = (
        sum(getattr(score, name) for score in scores) / len(scores) for name in ("accuracy", "chance")
    )
    errors = [score.standard_error for score in scores if score.standard_error is not None]
    error = math.sqrt(sum(value**2 for value in errors)) / len(scores) if len(errors) == len(scores) else 0.0
    return {
        "accuracy": accuracy,
        "chance": chance,
        "above_chance": accuracy - chance,
        "errors_above_chance": (accuracy - chance) / error if error > 0 else None,
    }


def _check(argument: str) -> str:
    if not argument:
        raise UserError("probe tasks needs task names, such as tasks:lambada,arc_easy, or tasks:all")
    names = [name.strip() for name in argument.split(",")]
    chosen = chosen_tasks(names)
    return ALL if ALL in names else ",".join(chosen)


PROBE = Probe(
    "zero-shot scores on tasks, with chance and standard error",
    _measure,
    {
        "tasks": {str: {"accuracy": float, "standard_error": NUMBER, "chance": float, "n": int}},
        "mean": {"accuracy": float, "chance": float},
    },
    _check,
    "TASK,... or all; required",
)
