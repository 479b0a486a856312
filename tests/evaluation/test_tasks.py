"""Task scores compared with counts by hand, and reference scores."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Example, Material, Task, Text, encoded
from headtohead.data.tasks.registry import prepare_task
from headtohead.data.tokenizers import Bytes
from headtohead.evaluation.tasks import (
    answer_f1,
    check_answerable,
    chosen_metric,
    macro_f1,
    matthews,
    plain_answer,
    score_task,
    task_references,
)
from headtohead.mechanisms.contract.base import Supports
from headtohead.model.classifier import Classifier, Pointer, Reader
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size

TABLE = np.array([[5.0, 1.0, 0.0], [2.0, 3.0, 1.0], [0.0, 0.0, 4.0]])


def size(task: Task) -> Size:
    return Size("t", 32, 2, 2, 64, task.vocabulary, 64).with_settings(init_std=0.3)


def layers() -> list[object]:
    return parse_layout("standard").layers(2)  # type: ignore[return-value]


def test_macro_f1_and_matthews_of_a_table() -> None:
    f1 = [2 * 5 / (6 + 7), 2 * 3 / (6 + 4), 2 * 4 / (4 + 5)]
    assert macro_f1(TABLE) == pytest.approx(sum(f1) / 3)
    # The correlation of the class indicators, pooled over classes (Gorodkin).
    true = np.repeat(np.arange(3), 3)[np.repeat(np.arange(9), TABLE.ravel().astype(int))]
    guess = np.tile(np.arange(3), 3)[np.repeat(np.arange(9), TABLE.ravel().astype(int))]
    x, y = np.eye(3)[true], np.eye(3)[guess]
    covariance = ((x - x.mean(0)) * (y - y.mean(0))).sum()
    norms = ((x - x.mean(0)) ** 2).sum() * ((y - y.mean(0)) ** 2).sum()
    assert matthews(TABLE) == pytest.approx(covariance / np.sqrt(norms))
    assert matthews(np.array([[0.0, 3.0], [0.0, 5.0]])) == 0.0


def test_answers_are_compared_as_squad_does() -> None:
    assert plain_answer("The  Old, man!") == "old man"
    assert answer_f1("an old man", "the old King") == pytest.approx(0.5)
    assert answer_f1("", "") == 1.0
    assert answer_f1("the", "cat") == 0.0


def test_a_classifier_is_scored_by_its_own_guesses() -> None:
    task = prepare_task("grammar:train=300", context=48)
    model = Classifier(size(task), layers(), 2, seed=1).eval()  # type: ignore[arg-type]
    score = score_task(model, task, "test")
    right, labels = [], []
    for example in task.splits["test"]:
        scores = model.scores(torch.tensor(example.tokens)[None], torch.tensor([len(example.tokens) - 1]))
        right.append(int(scores.argmax()) == example.label)
        labels.append(example.label)
    assert score["accuracy"] == pytest.approx(sum(right) / len(right))
    assert score["examples"] == len(right)
    assert score["tokens"] == sum(len(example.tokens) for example in task.splits["test"])
    blocks = np.array(score["blocks"]["accuracy"])
    assert blocks.sum(0) == pytest.approx([sum(right), len(right)])
    assert sum(count for _, count in score["groups"].values()) == len(right)


@pytest.mark.parametrize("name", ["copy:train=60,length=4", "reverse:train=60,length=4,form=place"])
def test_exact_match_requires_every_target(name: str) -> None:
    task = prepare_task(name, context=48)
    causal = "place" not in name
    model = Reader(size(task), layers(), seed=2, causal=causal).eval()  # type: ignore[arg-type]
    score = score_task(model, task, "train")
    every, right = [], 0
    for example in task.splits["train"]:
        guess = model.logits(torch.tensor(example.tokens)[None])[0].argmax(-1).numpy()
        where = example.targets >= 0  # type: ignore[operator]
        hits = guess[where] == example.targets[where]  # type: ignore[index]
        every.append(hits.all())
        right += hits.sum()
    assert score["metric"] == "exact_match"
    assert score["exact_match"] == pytest.approx(np.mean(every))
    assert score["accuracy"] == pytest.approx(right / (4 * len(every)))


def reading() -> Task:
    """Return a task like SQuAD: the answer is a name in the text."""
    material = Material()
    for split, names in (("train", "abcdefgh"), ("valid", "ij"), ("test", "klm")):
        for name in names:
            text, answer = f"who? {name * 3} did it.", name * 3
            material.splits[split].append(
                Text(text, answers=(answer, f"the {answer}"), relevant=(((5, 8),),))
            )
    splits, _ = encoded(material, Bytes(), 64, lambda message, share: None)
    return Task("reading", "", (), 256, splits, {}, "x", Bytes(), "f1")


def test_a_pointers_span_is_compared_as_text() -> None:
    task = reading()
    pointer = Pointer(size(task), layers(), seed=1, causal=False).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        pointer.spans = lambda tokens, padding=None, most=30: torch.tensor([[5, 7]]).repeat(len(tokens), 1)  # type: ignore[method-assign]
        assert score_task(pointer, task, "test")["exact_match"] == 1.0
        pointer.spans = lambda tokens, padding=None, most=30: torch.tensor([[5, 11]]).repeat(len(tokens), 1)  # type: ignore[method-assign]
        found = score_task(pointer, task, "test")
    assert found["exact_match"] == 0.0
    assert found["f1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("kind", [Reader, Pointer])
def test_every_pass_of_the_model_reports_progress(kind: type[Reader], padding: bool) -> None:
    task = reading()
    model = kind(size(task), layers(), seed=1)  # type: ignore[arg-type]
    for block in model.layers:
        block.mechanism.supports = Supports(padding=padding)
    events: list[float | None] = []
    model.embedding.register_forward_hook(lambda *_: events.append(None))
    score_task(model, task, "test", progress=events.append)
    assert len(events) > (2 if kind is Pointer else 50)
    assert all(before is not None or after is not None for before, after in pairwise(events))
    shares = [share for share in events if share is not None]
    assert shares == sorted(shares)
    assert events[-1] == 1.0


def test_a_reader_is_judged_by_the_likeliest_token_at_each_step() -> None:
    """Sampling would differ: at initialization all tokens are about equally likely."""
    task = reading()
    assert task.tokenizer is not None
    model = Reader(size(task), layers(), seed=3).eval()  # type: ignore[arg-type]
    written = [likeliest(model, task, example, 50) for example in task.splits["train"]]
    assert len(set(written)) > 1
    assert all(written)
    assert all_right(model, task, written)


def likeliest(model: Reader, task: Task, example: Example, room: int) -> str:
    """Return a model's greedy continuation of a single prompt, recomputed from the whole text at every token."""
    assert task.tokenizer is not None
    tokens, answer = example.tokens[: example.prompt].tolist(), []
    for _ in range(room):
        answer.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
        tokens.append(answer[-1])
        if answer[-1] == task.tokenizer.separator:
            answer.pop()
            break
    return task.tokenizer.decode(answer)


def all_right(model: Reader, task: Task, written: list[str]) -> bool:
    """Return whether a model is right on all examples if the right answers are what it generates."""
    task.splits["train"] = [
        dataclasses.replace(example, answers=(text,))
        for example, text in zip(task.splits["train"], written, strict=True)
    ]
    return bool(score_task(model, task, "train")["exact_match"] == 1.0)


def test_a_long_text_in_the_batch_does_not_shorten_an_answer() -> None:
    """Learned positions end at the context; the tokens left depend on a prompt's own length, not the batch's longest."""
    material = Material()
    for split in material.splits:
        material.splits[split] = [
            Text("who? " + "x" * length, answers=("a",), relevant=(((0, 1),),)) for length in (1, 9, 23, 28)
        ]
    splits, _ = encoded(material, Bytes(), 40, lambda message, share: None)
    task = Task("reading", "", (), 256, splits, {}, "x", Bytes(), "f1")
    shape = Size("t", 32, 2, 2, 64, 256, 40).with_settings(init_std=0.3, positions="learned")
    model = Reader(shape, layers(), seed=3).eval()  # type: ignore[arg-type]
    written = [likeliest(model, task, example, 40 - example.prompt + 1) for example in task.splits["train"]]
    assert len(written[0]) > len(written[-1]) > 0
    assert all_right(model, task, written)


def test_chance_and_the_majority_class() -> None:
    task = prepare_task("grammar:train=300", context=48)
    labels = [example.label for example in task.splits["train"]]
    usual = max(set(labels), key=labels.count)
    share = np.mean([example.label == usual for example in task.splits["test"]])
    assert task_references(task) == {"chance": 0.5, "majority class": pytest.approx(share)}
    assert task_references(task, "matthews") == {"chance": 0.0, "majority class": 0.0}
    lists = prepare_task("copy:train=60,length=4,symbols=3", context=48)
    assert task_references(lists)["chance"] == pytest.approx(3**-4)


def test_metrics_a_task_does_not_have_are_rejected() -> None:
    task = prepare_task("recall:train=30", context=48)
    assert chosen_metric(task) == "accuracy"
    with pytest.raises(UserError, match="unknown metric of task 'recall:train=30' 'f1'"):
        chosen_metric(task, "f1")
    with pytest.raises(UserError, match="does not have an answer to point at"):
        check_answerable(task)
