"""How well a model does the task it was trained on: metrics by name, and what one gets without a model."""

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
from headtohead.data.tasks.batches import Batch, collated
from headtohead.data.tokenizers import Tokenizer
from headtohead.kernels.matmul.loss import IGNORED
from headtohead.model.classifier import Classifier, Pointer, Reader
from headtohead.model.generation import Sampling, generate

Array = np.ndarray[Any, Any]
MARGINS = {"accuracy": 0.01, "macro_f1": 0.01, "exact_match": 0.01, "f1": 0.01, "matthews": 0.02}
"""Every metric is a share or a correlation, higher is better; differences within so much count as none."""
BLOCKS = 64
_TOKENS_PER_PASS = {"cpu": 8192}
_LONGEST_ANSWER = 50
"""Tokens after which a model that writes is stopped."""


def task_metrics(task: Task) -> tuple[str, ...]:
    """Return the metrics that a task is scored by."""
    if task.classes:
        return ("accuracy", "macro_f1", "matthews")
    return ("f1", "exact_match") if as_phrase(task) else ("accuracy", "exact_match")


def chosen_metric(task: Task, given: str = "") -> str:
    """Return the metric a task is judged by: its own, or the one that is asked for."""
    if not given:
        return task.metric
    if given not in task_metrics(task):
        raise unknown(f"metric of task '{task.name}'", given, task_metrics(task))
    return given


def check_answerable(task: Task) -> None:
    """Refuse to point at answers of a task that does not say where they stand."""
    places = [
        example.prompt and example.relevant[0, : example.prompt].any()
        for split in task.splits.values()
        for example in split
    ]
    if not as_phrase(task) or not all(places):
        raise UserError(
            f"task '{task.name}' has no answer to point at in every text; answer = 'write' is what it can be given"
        )


def as_phrase(task: Task) -> bool:
    """Whether answers are texts, of which several may be right."""
    return task.tokenizer is not None and not task.classes


@dataclass
class _Found:
    """What a model made of some examples, by their places in the split."""

    nats: Array
    """Sum over the example's targets."""
    asked: Array
    right: Array
    """How many of its targets are right."""
    guesses: Array
    """Number of the class, where there are classes."""
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

    `metric` is the one the task is judged by when nothing else is said; `blocks` holds, for each metric that is a mean,
    [sum, count] of consecutive examples. `progress` is called with the share done, at every token that is written.
    """
    examples = task.splits[split]
    was_training, count = model.training, len(examples)
    model.eval()
    found = _Found(*(np.zeros(count) for _ in range(5)))
    done = tokens = 0
    for batch in _batches(model, examples):
        shown = part_of(progress, done, done + len(batch.ends), count)
        with torch.autocast(model.readout.device.type, torch.bfloat16, enabled=precision == "bf16"):
            _one(model, task, examples, batch, found, shown)
        done += len(batch.ends)
        tokens += int(batch.ends.sum()) + len(batch.ends)
        shown(1.0)
    model.train(was_training)
    score: dict[str, Any] = {"metric": task.metric, "nats": float(found.nats.sum() / found.asked.sum())}
    score |= _metrics(task, examples, found)
    score |= {"examples": count, "tokens": tokens}
    groups = dict.fromkeys(example.group for example in examples)
    if len(groups) > 1:
        inside = {name: np.array([example.group == name for example in examples]) for name in groups}
        right, asked = _by_example("accuracy" if task.classes else task.metric, found)
        score["groups"] = {
            name: [float(right[here].sum() / asked[here].sum()), int(here.sum())]
            for name, here in inside.items()
        }
    score["blocks"] = {}
    for metric in task_metrics(task):
        values, weights = _by_example(metric, found)
        if len(values):
            parts = np.array_split(np.arange(count), min(BLOCKS, count))
            score["blocks"][metric] = [
                [float(values[part].sum()), float(weights[part].sum())] for part in parts
            ]
    return score


def _by_example(metric: str, found: _Found) -> tuple[Array, Array]:
    """Return sums and counts by example whose ratio is the metric; nothing where it is no mean over examples."""
    ones = np.ones(len(found.asked))
    if metric == "accuracy":
        return found.right, found.asked
    if metric == "exact_match":
        return (found.right == found.asked).astype(float), ones
    return (found.f1, ones) if metric == "f1" else (ones[:0], ones[:0])


def _metrics(task: Task, examples: Sequence[Example], found: _Found) -> dict[str, float]:
    exact = float((found.right == found.asked).mean())
    if as_phrase(task):
        return {"f1": float(found.f1.mean()), "exact_match": exact}
    accuracy = float(found.right.sum() / found.asked.sum())
    if not task.classes:
        return {"accuracy": accuracy, "exact_match": exact}
    table = np.zeros((len(task.classes), len(task.classes)))
    for example, guess in zip(examples, found.guesses, strict=True):
        table[example.label, int(guess)] += 1
    return {"accuracy": accuracy, "macro_f1": macro_f1(table), "matthews": matthews(table)}


def macro_f1(table: Array) -> float:
    """Return the mean over classes of F1, from counts (true class, guessed class); 0 for a class never guessed."""
    both = table.sum(0) + table.sum(1)
    return float(np.mean(np.where(both > 0, 2 * np.diag(table) / np.maximum(both, 1), 0.0)))


def matthews(table: Array) -> float:
    """Return Matthews' correlation, for any number of classes, from counts (true, guessed); 0 where one guess is all."""
    total, right = table.sum(), np.trace(table)
    true, guessed = table.sum(1), table.sum(0)
    spread = (total**2 - (guessed**2).sum()) * (total**2 - (true**2).sum())
    return float((right * total - true @ guessed) / np.sqrt(spread)) if spread > 0 else 0.0


def _batches(model: Reader, examples: Sequence[Example]) -> list[Batch]:
    """Return every example once, shortest first, some 8k tokens at a time; one by one where padding cannot be."""
    pointing = isinstance(model, Pointer)
    lengths = [example.prompt if pointing else len(example.tokens) for example in examples]
    order = sorted(range(len(examples)), key=lambda place: lengths[place])
    most = _TOKENS_PER_PASS.get(model.readout.device.type, 65536)
    padded = all(block.mechanism.supports.padding for block in model.layers)
    groups: list[list[int]] = []
    for place in order:
        full = groups and (len(groups[-1]) + 1) * lengths[place] > most
        if not groups or full or (not padded and lengths[groups[-1][0]] != lengths[place]):
            groups.append([])
        groups[-1].append(place)
    return [collated(examples, places, written=not pointing) for places in groups]


def _one(
    model: Reader,
    task: Task,
    examples: Sequence[Example],
    batch: Batch,
    found: _Found,
    progress: Callable[[float], None],
) -> None:
    """Put what a model makes of a batch into the places of its examples."""
    device, places = model.readout.device, batch.places.numpy()
    tokens, padding = batch.tokens.to(device), None if batch.padding is None else batch.padding.to(device)
    chosen = [examples[place] for place in places]
    if isinstance(model, Pointer):
        chances = model.chances(tokens, padding).gather(-1, batch.spans.to(device).unsqueeze(-1))
        found.nats[places] = -chances.sum((1, 2)).double().cpu().numpy()
        found.asked[places] = 2
        progress(0.5)
        texts = [
            _decoded(task.tokenizer, example.tokens[first : last + 1])
            for example, (first, last) in zip(chosen, model.spans(tokens, padding).tolist(), strict=True)
        ]
        _judge_texts(found, places, chosen, texts)
        return
    if isinstance(model, Classifier):
        scores = model.scores(tokens, batch.ends.to(device), padding).double()
        guesses, labels = scores.argmax(-1), batch.labels.to(device)
        found.nats[places] = F.cross_entropy(scores, labels, reduction="none").cpu().numpy()
        found.asked[places] = 1
        found.right[places] = (guesses == labels).cpu().numpy()
        found.guesses[places] = guesses.cpu().numpy()
        return
    where = batch.targets != IGNORED
    scores = model.logits(tokens, padding=padding, where=where.to(device)).double().cpu()
    rows, targets = places[where.nonzero()[:, 0].numpy()], batch.targets[where]
    np.add.at(found.nats, rows, F.cross_entropy(scores, targets, reduction="none").numpy())
    np.add.at(found.asked, rows, 1)
    np.add.at(found.right, rows, (scores.argmax(-1) == targets).numpy())
    if as_phrase(task):
        progress(0.0)
        _judge_texts(found, places, chosen, _written(model, task, chosen, progress))


def _judge_texts(found: _Found, places: Array, examples: Sequence[Example], texts: Sequence[str]) -> None:
    """Score answers in words against all that may be given; the best counts, as in SQuAD's own script."""
    for place, example, text in zip(places, examples, texts, strict=True):
        found.f1[place] = max(answer_f1(text, answer) for answer in example.answers)
        exact = any(plain_answer(text) == plain_answer(answer) for answer in example.answers)
        found.right[place] = found.asked[place] if exact else 0


def _written(
    model: Reader, task: Task, examples: Sequence[Example], progress: Callable[[float], None]
) -> list[str]:
    """Return what a model writes behind each prompt, the likeliest token at each step."""
    padded = all(block.mechanism.supports.padding for block in model.layers)
    groups: dict[tuple[int, int], list[int]] = {}
    for place, example in enumerate(examples):
        room = _room(model, example)
        groups.setdefault((room, 0 if padded else place), []).append(place)
    texts, done = [""] * len(examples), 0
    for (room, _), places in groups.items():
        shown = part_of(progress, done, done + len(places), len(examples))
        done += len(places)
        found = _write(model, task, [examples[place] for place in places], room, shown)
        for place, text in zip(places, found, strict=True):
            texts[place] = text
    return texts


def _room(model: Reader, example: Example) -> int:
    """Return how many tokens may be written behind an example's prompt: its own number, whatever stands beside it."""
    if model.size.settings.positions == "learned" or model.companion_spec:
        return max(1, min(_LONGEST_ANSWER, model.size.context - example.prompt + 1))
    return _LONGEST_ANSWER


def _write(
    model: Reader, task: Task, examples: Sequence[Example], room: int, progress: Callable[[float], None]
) -> list[str]:
    assert task.tokenizer is not None
    device, longest = model.readout.device, max(example.prompt for example in examples)
    prompts = torch.zeros(len(examples), longest, dtype=torch.long)
    for row, example in enumerate(examples):
        prompts[row, longest - example.prompt :] = torch.from_numpy(example.tokens[: example.prompt])
    real = torch.arange(longest) >= longest - torch.tensor([[example.prompt] for example in examples])
    padding = None if bool(real.all()) else real.to(device)
    written: list[list[int]] = [[] for _ in examples]
    open_rows = set(range(len(examples)))
    likeliest = Sampling(temperature=0)
    for count, step in enumerate(generate(model, prompts.to(device), room, likeliest, padding), 1):
        progress(count / room)
        tokens = step[:, 0].tolist()  # at once: a GPU is waited for every time it is asked
        for row in sorted(open_rows):
            token = tokens[row]
            if token == task.tokenizer.separator:
                open_rows.discard(row)
            else:
                written[row].append(token)
        if not open_rows:
            break
    return [_decoded(task.tokenizer, tokens) for tokens in written]


def _decoded(tokenizer: Tokenizer | None, tokens: Sequence[int] | Array) -> str:
    assert tokenizer is not None
    return tokenizer.decode([int(token) for token in tokens])


def plain_answer(text: str) -> str:
    """Return an answer without case, punctuation, articles and spare spaces, as SQuAD compares them."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def answer_f1(text: str, answer: str) -> float:
    """Return the F1 of the words of a text against those of an answer."""
    mine, theirs = plain_answer(text).split(), plain_answer(answer).split()
    if not mine or not theirs:
        return float(mine == theirs)
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs))


def task_references(task: Task, metric: str = "") -> dict[str, float]:
    """Return what one gets on the test split by guessing, and by always giving train's commonest class or answer."""
    chosen, train, test = chosen_metric(task, metric), task.splits["train"], task.splits["test"]
    if task.classes:
        usual = Counter(example.label for example in train).most_common(1)[0][0]
        count = len(task.classes)
        table, even = np.zeros((count, count)), np.zeros((count, count))
        for example in test:
            table[example.label, usual] += 1
            even[example.label] += 1 / count
        return {
            name: {
                "accuracy": float(np.trace(rows) / rows.sum()),
                "macro_f1": macro_f1(rows),
                "matthews": matthews(rows),
            }[chosen]
            for name, rows in (("chance", even), ("majority class", table))
        }
    if as_phrase(task):
        answer = Counter(example.answers[0] for example in train).most_common(1)[0][0]
        judge = answer_f1 if chosen == "f1" else lambda a, b: float(plain_answer(a) == plain_answer(b))
        scores = [max(judge(answer, right) for right in example.answers) for example in test]
        return {"chance": 0.0, "majority class": float(np.mean(scores))}
    asked = [_asked(example) for example in train]
    counts = Counter(int(value) for row in asked for value in row)
    usual, kinds = counts.most_common(1)[0][0], len(counts)
    rows = [_asked(example) for example in test]
    if chosen == "exact_match":
        chance = float(np.mean([kinds ** -float(len(row)) for row in rows]))
        return {"chance": chance, "majority class": float(np.mean([(row == usual).all() for row in rows]))}
    return {"chance": 1 / kinds, "majority class": float(np.mean(np.concatenate(rows) == usual))}


def _asked(example: Example) -> Array:
    assert example.targets is not None
    return example.targets[example.targets != IGNORED]
