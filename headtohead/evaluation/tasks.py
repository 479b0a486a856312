"""Scores of a model on the task it was trained on: metrics by name, and reference scores without a model."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from headtohead.common.errors import UserError, unknown
from headtohead.common.progress import part_of
from headtohead.data.tasks.base import Example, Task
from headtohead.data.tasks.batches import Batch, by_length, collated
from headtohead.data.text import Array
from headtohead.evaluation.loss import evaluating, tokens_per_pass
from headtohead.kernels.matmul.loss import IGNORED
from headtohead.model.classifier import Classifier, Pointer, Reader
from headtohead.model.decoder import Decoder
from headtohead.model.generation import Sampling, generate

MARGINS = {"accuracy": 0.01, "macro_f1": 0.01, "exact_match": 0.01, "f1": 0.01, "matthews": 0.02}
"""Equivalence margin of each metric; every metric is a fraction or a correlation, higher is better."""
BLOCKS = 64
_LONGEST_ANSWER = 50
"""Maximum number of generated tokens."""


def task_metrics(task: Task) -> tuple[str, ...]:
    """Return the metrics of a task."""
    if task.classes:
        return ("accuracy", "macro_f1", "matthews")
    return ("f1", "exact_match") if as_phrase(task) else ("accuracy", "exact_match")


def chosen_metric(task: Task, given: str = "") -> str:
    """Return the metric by which a task is judged: its default, or the given one."""
    if not given:
        return task.metric
    if given not in task_metrics(task):
        raise unknown(f"metric of task '{task.name}'", given, task_metrics(task))
    return given


def check_answerable(task: Task) -> None:
    """Raise if a model cannot point at the answers of a task, because it does not mark their positions."""
    examples = [example for split in task.splits.values() for example in split]
    if not as_phrase(task) or not all(row.prompt and row.relevant[0, : row.prompt].any() for row in examples):
        raise UserError(
            f"task '{task.name}' does not have an answer to point at in every text; use answer = 'write'"
        )


def as_phrase(task: Task) -> bool:
    """Return whether answers are texts, of which several may be right."""
    return task.tokenizer is not None and not task.classes


@dataclass
class _Found:
    """Results by example, in the order of the split."""

    nats: Array
    """Sum over the example's targets."""
    total: Array
    """Number of targets."""
    right: Array
    """Number of right targets."""
    guesses: Array
    """Predicted class, for a task with classes."""
    f1: Array


@torch.no_grad()
def score_task(
    model: Reader,
    task: Task,
    split: str,
    *,
    precision: str = "float32",
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Return a model's scores on a split, JSON-ready: every metric of the task, by group, and by block of examples.

    `metric` is the task's default metric; `blocks` has [sum, count] of consecutive examples for each metric that is a
    mean. `progress` is called with the fraction done, at every generated token.
    """
    examples = task.splits[split]
    count = len(examples)
    found = _Found(*(np.zeros(count) for _ in range(5)))
    done = tokens = 0
    with evaluating(model):
        for batch in _batches(model, examples):
            shown = part_of(progress, done, done + len(batch.ends), count)
            with torch.autocast(model.readout.device.type, torch.bfloat16, enabled=precision == "bf16"):
                _one(model, task, examples, batch, found, shown)
            done += len(batch.ends)
            tokens += int(batch.ends.sum()) + len(batch.ends)
            shown(1.0)
    # Sums and counts by example, whose ratio is the metric.
    ones = np.ones(count)
    sums = {
        "accuracy": (found.right, found.total),
        "exact_match": ((found.right == found.total).astype(float), ones),
        "f1": (found.f1, ones),
    }
    means = {metric: sums[metric] for metric in task_metrics(task) if metric in sums}
    score: dict[str, Any] = {"metric": task.metric, "nats": float(found.nats.sum() / found.total.sum())}
    if task.classes:
        table = np.zeros((len(task.classes), len(task.classes)))
        for example, guess in zip(examples, found.guesses, strict=True):
            table[example.label, int(guess)] += 1
        score |= _table_metrics(table)
    else:
        score |= {metric: float(right.sum() / total.sum()) for metric, (right, total) in means.items()}
    score |= {"examples": count, "tokens": tokens}
    names = np.array([example.group for example in examples])
    if len(set(names)) > 1:
        right, total = sums["accuracy" if task.classes else task.metric]
        inside = {name: names == name for name in dict.fromkeys(names.tolist())}
        score["groups"] = {
            name: [float(right[here].sum() / total[here].sum()), int(here.sum())]
            for name, here in inside.items()
        }
    parts = np.array_split(np.arange(count), min(BLOCKS, count))
    score["blocks"] = {
        metric: [[float(right[part].sum()), float(total[part].sum())] for part in parts]
        for metric, (right, total) in means.items()
    }
    return score


def _table_metrics(table: Array) -> dict[str, float]:
    """Return the metrics of a task with classes from counts (true class, guessed class)."""
    accuracy = float(np.trace(table) / table.sum())
    return {"accuracy": accuracy, "macro_f1": macro_f1(table), "matthews": matthews(table)}


def macro_f1(table: Array) -> float:
    """Return the mean F1 over classes from counts (true class, guessed class); 0 for a class never guessed."""
    both = table.sum(0) + table.sum(1)
    return float(np.mean(np.where(both > 0, 2 * np.diag(table) / np.maximum(both, 1), 0.0)))


def matthews(table: Array) -> float:
    """Return Matthews' correlation for any number of classes from counts (true, guessed); 0 if all guesses are equal."""
    total, right = table.sum(), np.trace(table)
    true, guessed = table.sum(1), table.sum(0)
    spread = (total**2 - (guessed**2).sum()) * (total**2 - (true**2).sum())
    return float((right * total - true @ guessed) / np.sqrt(spread)) if spread > 0 else 0.0


def supports_padding(model: Decoder) -> bool:
    """Return whether every mechanism of a model supports padding."""
    return all(block.mechanism.supports.padding for block in model.layers)


def _batches(model: Reader, examples: Sequence[Example]) -> list[Batch]:
    """Return batches of about 8k tokens, shortest first; only equal lengths if a mechanism does not support padding."""
    pointing = isinstance(model, Pointer)
    lengths = [example.prompt if pointing else len(example.tokens) for example in examples]
    groups = by_length(lengths, tokens_per_pass(model.readout.device), supports_padding(model))
    return [collated(examples, indices, written=not pointing) for indices in groups]


def _one(
    model: Reader,
    task: Task,
    examples: Sequence[Example],
    batch: Batch,
    found: _Found,
    progress: Callable[[float], None],
) -> None:
    """Store a model's results on a batch at the indices of its examples."""
    device, indices = model.readout.device, batch.places.numpy()
    tokens, padding = batch.tokens.to(device), None if batch.padding is None else batch.padding.to(device)
    chosen = [examples[index] for index in indices]
    if isinstance(model, Pointer):
        chances = model.chances(tokens, padding).gather(-1, batch.spans.to(device).unsqueeze(-1))
        found.nats[indices] = -chances.sum((1, 2)).double().cpu().numpy()
        found.total[indices] = 2
        progress(0.5)
        spans = model.spans(tokens, padding).tolist()
        answers = [row.tokens[first : last + 1] for row, (first, last) in zip(chosen, spans, strict=True)]
        _judge_texts(found, indices, chosen, [_decoded(task, answer) for answer in answers])
        return
    if isinstance(model, Classifier):
        scores = model.scores(tokens, batch.ends.to(device), padding).double()
        guesses, labels = scores.argmax(-1), batch.labels.to(device)
        found.nats[indices] = F.cross_entropy(scores, labels, reduction="none").cpu().numpy()
        found.total[indices] = 1
        found.right[indices] = (guesses == labels).cpu().numpy()
        found.guesses[indices] = guesses.cpu().numpy()
        return
    where = batch.targets != IGNORED
    scores = model.logits(tokens, padding=padding, where=where.to(device)).double().cpu()
    rows, targets = indices[where.nonzero()[:, 0].numpy()], batch.targets[where]
    np.add.at(found.nats, rows, F.cross_entropy(scores, targets, reduction="none").numpy())
    np.add.at(found.total, rows, 1)
    np.add.at(found.right, rows, (scores.argmax(-1) == targets).numpy())
    if as_phrase(task):
        progress(0.0)
        _judge_texts(found, indices, chosen, _generated(model, task, chosen, progress))


def _judge_texts(found: _Found, indices: Array, examples: Sequence[Example], texts: Sequence[str]) -> None:
    """Score texts against every accepted answer; the best counts, as in SQuAD's evaluation script."""
    for index, example, text in zip(indices, examples, texts, strict=True):
        found.f1[index] = max(answer_f1(text, answer) for answer in example.answers)
        exact = any(plain_answer(text) == plain_answer(answer) for answer in example.answers)
        found.right[index] = found.total[index] if exact else 0


def _generated(
    model: Reader, task: Task, examples: Sequence[Example], progress: Callable[[float], None]
) -> list[str]:
    """Return a model's greedy continuation of each prompt."""
    padded = supports_padding(model)
    groups: dict[tuple[int, int], list[int]] = {}
    for index, example in enumerate(examples):
        groups.setdefault((_room(model, example), 0 if padded else index), []).append(index)
    texts, done = [""] * len(examples), 0
    for (room, _), indices in groups.items():
        shown = part_of(progress, done, done + len(indices), len(examples))
        done += len(indices)
        found = _generate(model, task, [examples[index] for index in indices], room, shown)
        for index, text in zip(indices, found, strict=True):
            texts[index] = text
    return texts


def _room(model: Reader, example: Example) -> int:
    """Return how many tokens may be generated after an example's prompt, independent of the rest of its batch."""
    if model.size.settings.positions == "learned" or model.companion_spec:
        return max(1, min(_LONGEST_ANSWER, model.size.context - example.prompt + 1))
    return _LONGEST_ANSWER


def _generate(
    model: Reader, task: Task, examples: Sequence[Example], room: int, progress: Callable[[float], None]
) -> list[str]:
    assert task.tokenizer is not None
    device, longest = model.readout.device, max(example.prompt for example in examples)
    prompts = torch.zeros(len(examples), longest, dtype=torch.long)
    for row, example in enumerate(examples):
        prompts[row, longest - example.prompt :] = torch.from_numpy(example.tokens[: example.prompt])
    real = torch.arange(longest) >= longest - torch.tensor([[example.prompt] for example in examples])
    padding = None if bool(real.all()) else real.to(device)
    generated: list[list[int]] = [[] for _ in examples]
    open_rows = set(range(len(examples)))
    likeliest = Sampling(temperature=0)
    for count, step in enumerate(generate(model, prompts.to(device), room, likeliest, padding), 1):
        progress(count / room)
        tokens = step[:, 0].tolist()  # one transfer, because each one synchronizes with the GPU
        for row in sorted(open_rows):
            token = tokens[row]
            if token == task.tokenizer.separator:
                open_rows.discard(row)
            else:
                generated[row].append(token)
        if not open_rows:
            break
    return [_decoded(task, tokens) for tokens in generated]


def _decoded(task: Task, tokens: Sequence[int] | Array) -> str:
    assert task.tokenizer is not None
    return task.tokenizer.decode([int(token) for token in tokens])


def plain_answer(text: str) -> str:
    """Return an answer in lower case without punctuation, articles and extra spaces, as SQuAD compares them."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def answer_f1(text: str, answer: str) -> float:
    """Return the word F1 of a text compared with an answer."""
    mine, theirs = plain_answer(text).split(), plain_answer(answer).split()
    if not mine or not theirs:
        return float(mine == theirs)
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs))


def task_references(task: Task, metric: str = "") -> dict[str, float]:
    """Return the test scores of guessing, and of always answering train's most common class or answer."""
    chosen, train, test = chosen_metric(task, metric), task.splits["train"], task.splits["test"]
    if task.classes:
        usual = Counter(example.label for example in train).most_common(1)[0][0]
        count = len(task.classes)
        table, even = np.zeros((count, count)), np.zeros((count, count))
        for example in test:
            table[example.label, usual] += 1
            even[example.label] += 1 / count
        return {"chance": _table_metrics(even)[chosen], "majority class": _table_metrics(table)[chosen]}
    if as_phrase(task):
        answer = Counter(example.answers[0] for example in train).most_common(1)[0][0]
        judge = answer_f1 if chosen == "f1" else lambda a, b: float(plain_answer(a) == plain_answer(b))
        scores = [max(judge(answer, right) for right in example.answers) for example in test]
        return {"chance": 0.0, "majority class": float(np.mean(scores))}
    counts = Counter(int(value) for example in train for value in _targets(example))
    usual, kinds = counts.most_common(1)[0][0], len(counts)
    rows = [_targets(example) for example in test]
    if chosen == "exact_match":
        chance = float(np.mean([kinds ** -float(len(row)) for row in rows]))
        return {"chance": chance, "majority class": float(np.mean([(row == usual).all() for row in rows]))}
    return {"chance": 1 / kinds, "majority class": float(np.mean(np.concatenate(rows) == usual))}


def _targets(example: Example) -> Array:
    assert example.targets is not None
    return example.targets[example.targets != IGNORED]
