"""Training batches: shares, padding, counts of real tokens, steps as a pure function of their number."""

from __future__ import annotations

import pytest
import torch

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Task
from headtohead.data.tasks.batches import collated
from headtohead.data.tasks.registry import prepare_task
from headtohead.model.classifier import Classifier, Reader
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size
from headtohead.training.batches import TaskBatches, divide
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Trainer


@pytest.fixture(scope="module")
def grammar() -> Task:
    return prepare_task("grammar:train=70", context=48)


def batches(task: Task, tokens: int = 4000, batch: int = 200, seed: int = 1) -> TaskBatches:
    outputs = len(task.classes) or task.vocabulary
    return TaskBatches(task.splits["train"], TrainSettings(tokens=tokens, batch=batch), seed, outputs)


def classifier(task: Task) -> Classifier:
    size = Size("t", 32, 2, 2, 64, task.vocabulary, 48).with_settings(init_std=0.1)
    return Classifier(size, parse_layout("standard").layers(2), 2, seed=3).double()


def test_a_padded_step_has_the_loss_and_gradients_of_its_unpadded_examples(grammar: Task) -> None:
    source, model = batches(grammar), classifier(grammar)
    (part,) = source.parts(0, 1000)
    assert part.padding is not None
    assert not part.padding.all()
    objective, nats, _ = model(part.tokens, part.targets, 0.1, part.padding)
    objective.backward()
    together = {name: row.grad.clone() for name, row in model.named_parameters() if row.grad is not None}
    model.zero_grad()
    indices, total = source.batches.places(0), 0.0
    for index in indices:
        alone = collated(grammar.splits["train"], [index])
        assert alone.padding is None
        objective, one, _ = model(alone.tokens, alone.targets, 0.1)
        (objective / len(indices)).backward()
        total += float(one) / len(indices)
    assert float(nats) == pytest.approx(total, rel=1e-10)
    for name, row in model.named_parameters():
        if row.grad is not None:
            assert torch.allclose(row.grad, together[name], rtol=1e-8, atol=1e-12), name


def test_parts_of_a_step_are_weighted_by_their_targets() -> None:
    task = prepare_task("recall:train=40,pairs=4,queries=3", context=32)
    source = batches(task, batch=120)
    whole = list(source.parts(2, 100))
    parts = list(source.parts(2, 3))
    assert len(whole) == 1
    assert len(parts) > 1
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    size = Size("t", 32, 2, 2, 64, task.vocabulary, 32).with_settings(init_std=0.1)
    model = Reader(size, parse_layout("standard").layers(2), seed=3).double()
    once = model(whole[0].tokens, whole[0].targets)[1]
    split = sum(model(part.tokens, part.targets)[1] * part.share for part in parts)
    assert float(split) == pytest.approx(float(once), rel=1e-12)


def test_only_real_tokens_are_counted(grammar: Task) -> None:
    source = batches(grammar)
    counted = 0
    for step in range(source.steps):
        assert source.tokens(step) == counted
        for part in source.parts(step, 1000):
            counted += part.tokens.numel() if part.padding is None else int(part.padding.sum())
    assert source.tokens(source.steps) == counted
    assert counted == pytest.approx(4000, rel=0.1)
    every = sum(len(example.tokens) for example in grammar.splits["train"])
    assert source.tokens(source.division.per_epoch) == every
    assert source.unique_tokens(10 * source.division.per_epoch) == every


def test_fewer_tokens_than_one_step_are_rejected(grammar: Task) -> None:
    with pytest.raises(UserError, match="do not fill one step"):
        batches(grammar, tokens=100, batch=200)
    division = divide([10, 20, 30], 1)
    assert (division.examples, division.per_epoch) == (1, 3)


def test_a_loss_far_above_a_uniform_guess_counts_as_diverged(grammar: Task) -> None:
    model = classifier(grammar)
    rows: list[dict[str, object]] = []
    trainer = Trainer(
        model, batches(grammar), TrainSettings(tokens=4000, batch=200, lr=1e3, clip=0.0, warmup=0.0)
    )
    outcome = trainer.run()
    assert outcome.status == "diverged", rows
