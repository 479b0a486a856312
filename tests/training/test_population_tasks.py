"""Populations on tasks: batches of different lengths and sizes, padded without affecting the objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headtohead.data.tasks.base import Task
from headtohead.data.tasks.registry import prepare_task
from headtohead.model.classifier import Classifier, Pointer, Reader
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size
from headtohead.training.batches import TaskBatches, population_parts
from headtohead.training.population import PopulationTrainer, population_blocker
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Trainer
from tests.training.test_population import SEEDS, assert_same

TASKS = {"grammar": "grammar:train=53", "recall": "recall:train=45,pairs=4,queries=3"}


@pytest.fixture(scope="module", params=list(TASKS))
def task(request: pytest.FixtureRequest) -> Task:
    return prepare_task(TASKS[request.param], context=48)


def trainer(task: Task, seed: int, arm: str = "standard", **given: Any) -> Trainer:
    size = Size("t", 32, 2, 2, 48, task.vocabulary, 48).with_settings(init_std=0.1)
    layers = parse_layout(arm).layers(2)
    model = Classifier(size, layers, len(task.classes), seed) if task.classes else Reader(size, layers, seed)
    settings = TrainSettings(tokens=4000, batch=200, lr=5e-3, smoothing=0.1)
    outputs = len(task.classes) or task.vocabulary
    return Trainer(
        model.double(), TaskBatches(task.splits["train"], settings, seed, outputs), settings, **given
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "given"),
    [
        ("coupled", {"micro": 3}),
        pytest.param("standard", {}, marks=pytest.mark.slow),
        pytest.param("gated_linear", {}, marks=pytest.mark.slow),
        pytest.param("sharing:tie=kv", {}, marks=pytest.mark.slow),
    ],
)
def test_a_population_equals_separate_runs_step_by_step(task: Task, arm: str, given: dict[str, Any]) -> None:
    population = PopulationTrainer([trainer(task, seed, arm, **given) for seed in SEEDS])
    sizes = {
        tuple(part.tokens.shape)
        for member in population.members
        for step in range(population.first.steps)
        for part in member.batches.parts(step, 100)
    }
    assert (
        len({rows for rows, _ in sizes}) > 1
    )  # the smaller last batch of an epoch falls on a different step for each seed
    assert_same(population, [trainer(task, seed, arm) for seed in SEEDS], 1e-7)


def test_task_steps_are_neither_compiled_nor_captured(task: Task) -> None:
    population = PopulationTrainer([trainer(task, seed) for seed in SEEDS], compile=True, record=True)
    assert population._compiled is None
    assert population._graphed is None


def test_padding_does_not_affect_the_objective(task: Task) -> None:
    seeds = [list(trainer(task, seed).batches.parts(1, 4)) for seed in SEEDS]
    seeds[1] = seeds[1][:1]
    found = list(population_parts(seeds))
    assert len(found) == max(len(parts) for parts in seeds)
    for index, part in enumerate(found):
        for row, parts in enumerate(seeds):
            assert isinstance(part.share, torch.Tensor)
            if index >= len(parts):
                assert part.share[row] == 0
                continue
            own = parts[index]
            rows, time = own.tokens.shape
            assert part.share[row] == pytest.approx(own.share)
            assert torch.equal(part.tokens[row, :rows, :time], own.tokens)
            assert torch.equal(part.targets[row, :rows, :time], own.targets)
            assert (part.targets[row, rows:] == -1).all()
            assert (part.targets[row, :, time:] == -1).all()
            if part.padding is not None:
                assert not part.padding[row, :rows, time:].any()


def test_models_that_point_are_rejected() -> None:
    size = Size("t", 32, 2, 2, 48, 64, 48)
    layers = parse_layout("standard").layers(2)
    assert "point" in population_blocker(Pointer(size, layers, 1))
    assert population_blocker(Reader(size, layers, 1)) == ""
