"""The positions at which a model is read on a task's examples, and its answers there.

A classifier is read at the last token, a reader at every target, a pointer at the two tokens it points at. A causal
reader sees only the tokens up to that position, so every read is a sequence of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Example, Task
from headtohead.data.tasks.batches import by_length
from headtohead.data.text import Array
from headtohead.evaluation.tasks import supports_padding
from headtohead.mechanisms.contract.base import ForwardState, Frame
from headtohead.model.classifier import Classifier, Pointer
from headtohead.model.decoder import Decoder


@dataclass(frozen=True, eq=False)
class Read:
    """One position at which an example is read."""

    example: int
    """Index of the example in the split."""
    tokens: Array
    """(time,): everything the model sees there."""
    place: int
    """Position from which the answer is read."""
    answer: int
    """The right class, token or position."""
    relevant: Array
    """(annotators, time), True at relevant tokens."""
    end: int = 0
    """For a pointer: 0 for the first token of its answer, 1 for the last."""


@dataclass(frozen=True)
class ReadBatch:
    """A batch of reads, padded on the right."""

    reads: Sequence[Read]
    indices: Sequence[int]
    """Index of each read in the sequence that was batched."""
    tokens: Tensor
    """(batch, time)"""
    lengths: Tensor
    places: Tensor
    ends: Tensor
    answers: Tensor

    @property
    def real(self) -> Tensor:
        """(batch, time), True at real tokens."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    @property
    def padding(self) -> Tensor | None:
        """The padding mask for a model; None if nothing is padded."""
        return None if int(self.lengths.min()) == self.tokens.shape[1] else self.real


def check_task_matches(model: Decoder, task: Task) -> None:
    """Raise if the model cannot answer a task: larger vocabulary, different classes, longer examples."""
    size, classes, problem = model.size, len(task.classes), ""
    if task.vocabulary > size.vocabulary:
        problem = f"has a vocabulary of {task.vocabulary:,}, the model of {size.vocabulary:,}"
    elif task.longest > size.context:
        problem = f"has examples of {task.longest} tokens; the model's context is {size.context}"
    elif isinstance(model, Classifier) and classes != model.outputs:
        problem = f"has {classes} classes, the model has {model.outputs}"
    elif classes and not isinstance(model, Classifier):
        problem = f"needs a classifier, got a {type(model).__name__}"
    if problem:
        raise UserError(f"task '{task.name}' {problem}")


def reads_of(
    model: Decoder,
    examples: Sequence[Example],
    most: int,
    batch: int,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Read]:
    """Return the reads of examples in order, at most `most` of each, spread evenly over its targets."""
    if isinstance(model, Pointer):
        return _pointed(model, examples, batch, progress)
    causal = bool(getattr(model, "causal", True))
    reads = []
    for number, example in enumerate(examples):
        if example.targets is None:
            last = len(example.tokens) - 1
            reads.append(Read(number, example.tokens, last, example.label, example.relevant))
            continue
        positions = np.flatnonzero(example.targets >= 0)
        count = min(most, len(positions))
        for chosen in sorted({len(positions) * step // count for step in range(count)}):
            position = int(positions[chosen])
            stop = position + 1 if causal else len(example.tokens)
            row = example.relevant[[chosen if len(example.relevant) > 1 else 0], :stop]
            reads.append(Read(number, example.tokens[:stop], position, int(example.targets[position]), row))
    return reads


@torch.no_grad()
def _pointed(
    model: Pointer, examples: Sequence[Example], batch: int, progress: Callable[[float], None]
) -> list[Read]:
    """Return two reads per example, at the tokens the model points at; an example without a span has no right answer.

    The answer text is not part of the input, because a pointer is trained and scored without it.
    """
    plain = []
    for number, row in enumerate(examples):
        stop = row.prompt or len(row.tokens)
        plain.append(Read(number, row.tokens[:stop], 0, 0, row.relevant[:1, :stop]))
    found: dict[int, list[Read]] = {}
    for rows in batched(model, plain, batch):
        for read, span in zip(rows.reads, model.spans(rows.tokens, rows.padding).tolist(), strict=True):
            gold = examples[read.example].span
            right = (gold[0], gold[1] - 1) if gold else (-1, -1)
            found[read.example] = [
                Read(read.example, read.tokens, span[end], right[end], read.relevant, end) for end in (0, 1)
            ]
        progress(len(found) / len(examples))
    return [read for number in sorted(found) for read in found[number]]


def batched(model: Decoder, reads: Sequence[Read], tokens: int) -> Iterator[ReadBatch]:
    """Yield batches of reads of similar length, at most `tokens` tokens in each.

    If a mechanism does not support padding, a batch has reads of equal length.
    """
    device = model.readout.device

    def tensor(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), device=device)

    for indices in by_length([len(read.tokens) for read in reads], tokens, supports_padding(model)):
        chosen = [reads[index] for index in indices]
        lengths = [len(read.tokens) for read in chosen]
        rows = np.zeros((len(chosen), max(lengths)), dtype=np.int64)
        for row, read in zip(rows, chosen, strict=True):
            row[: len(read.tokens)] = read.tokens
        yield ReadBatch(
            chosen,
            indices,
            torch.from_numpy(rows).to(device),
            tensor(lengths),
            tensor(read.place for read in chosen),
            tensor(read.end for read in chosen),
            tensor(read.answer for read in chosen),
        )


def chances(model: Decoder, tokens: Tensor, padding: Tensor | None, places: Tensor, ends: Tensor) -> Tensor:
    """Return the probability of every answer (batch, answers): classes, tokens, or positions for the pointer's end."""
    if isinstance(model, Pointer):
        return model.ends(tokens, padding)[torch.arange(len(tokens), device=tokens.device), ends].softmax(-1)
    # On CPU, mixing one row instead of all halves the time of a one-layer model; on a GPU all rows are one fast kernel.
    frame = Frame(state=ForwardState(narrow=not tokens.is_cuda))
    if isinstance(model, Classifier):
        scores = model.scores(tokens, places, padding, frame)
    else:
        scores = model.logits(tokens, padding=padding, rows=places, frame=frame).squeeze(1)
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def cut(share: float, length: Tensor) -> Tensor:
    """Return k = ceil(share x length), limited so that at least one token is left."""
    # In floating point, 0.05 x 20 is slightly above 1.
    return torch.minimum((share * length.double() - 1e-9).ceil().long().clamp_min(1), length - 1)


def budget(model: Decoder, longest: int) -> int:
    """Return the number of tokens per pass: about four million entries of a layer's maps.

    Eight times as many on a GPU, so that small models are not bound by launches.
    """
    cells = 2**25 if model.readout.is_cuda else 2**22
    return max(longest, math.ceil(cells / (model.size.heads * max(1, longest))))
