"""Probe `tasks`: zero-shot scores on tasks, with chance."""

from __future__ import annotations

import math

from msgspec import Struct

from headtohead.common.errors import UserError
from headtohead.common.progress import part_of
from headtohead.common.typed import Number
from headtohead.data.tasks.zeroshot import ALL, chosen_tasks, find_task
from headtohead.evaluation.zeroshot import TaskScore, score_examples
from headtohead.study.probes.base import Found, Maybe, Probe, Subject


class TaskMean(Struct, frozen=True):
    """The mean over tasks and its distance above chance, absolute and in standard errors."""

    accuracy: Number
    chance: Number
    above_chance: Maybe = None
    errors_above_chance: Maybe = None


class TaskScores(Struct, frozen=True):
    """The result."""

    tasks: dict[str, TaskScore]
    mean: TaskMean


def _measure(subject: Subject, argument: str) -> Found:
    # All files are read before scoring, so that a missing one is reported immediately.
    tasks = [find_task(name, subject.data_dir or None) for name in chosen_tasks(argument.split(","))]
    total = sum(len(task.examples) for task in tasks)
    scores: list[TaskScore] = []
    for task in tasks:
        before = sum(score.n for score in scores)
        shown = part_of(subject.progress, before, before + len(task.examples), total)
        scores.append(score_examples(subject.model, task, subject.tokenizer, progress=shown))
    return TaskScores({score.task: score for score in scores}, _mean(scores))


def _mean(scores: list[TaskScore]) -> TaskMean:
    """Return the mean over tasks and its distance above chance, absolute and in standard errors."""
    accuracy, chance = (
        sum(getattr(score, name) for score in scores) / len(scores) for name in ("accuracy", "chance")
    )
    errors = [score.standard_error for score in scores if score.standard_error is not None]
    error = math.sqrt(sum(value**2 for value in errors)) / len(scores) if len(errors) == len(scores) else 0.0
    above = accuracy - chance
    return TaskMean(accuracy, chance, above, above / error if error > 0 else None)


def _check(argument: str) -> str:
    if not argument:
        raise UserError("probe tasks needs task names, such as tasks:lambada,arc_easy, or tasks:all")
    names = [name.strip() for name in argument.split(",")]
    chosen = chosen_tasks(names)
    return ALL if ALL in names else ",".join(chosen)


PROBE = Probe(
    "zero-shot scores on tasks, with chance and standard error",
    _measure,
    TaskScores,
    _check,
    "TASK,... or all; required",
    needs=lambda argument: chosen_tasks(argument.split(",")),
    words={
        "mean.accuracy": "mean accuracy",
        "mean.above_chance": "mean accuracy above chance",
        "tasks.lambada.accuracy": "accuracy on LAMBADA",
    },
)
