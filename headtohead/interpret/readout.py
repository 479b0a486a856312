"""The places at which a model is read on a task's examples, one by one, and what it answers there.

A classifier is read at the last token, a reader wherever a target stands, a pointer at the two tokens it points at. A
causal reader sees the tokens up to that place alone, so that every read is a sequence of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Example, Task
from headtohead.mechanisms.contract.base import Frame
from headtohead.model.classifier import Classifier, Pointer
from headtohead.model.decoder import Decoder

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Read:
    """One place at which an example is read."""

    example: int
    """Which example of the split."""
    tokens: Array
    """(time,): everything the model sees there."""
    place: int
    """The row that the answer is read from."""
    answer: int
    """The class, the token, or the place that is right."""
    relevant: Array
    """(annotators, time), true at relevant tokens."""
    end: int = 0
    """Of a pointer: 0 at the first token of its answer, 1 at the last."""


@dataclass(frozen=True)
class ReadBatch:
    """Reads side by side, padded on the right."""

    reads: Sequence[Read]
    tokens: Tensor
    """(batch, time)"""
    lengths: Tensor
    places: Tensor
    ends: Tensor
    answers: Tensor

    @property
    def real(self) -> Tensor:
        """(batch, time), true at real tokens."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    @property
    def padding(self) -> Tensor | None:
        """The same for a model; None where nothing is padded."""
        return None if int(self.lengths.min()) == self.tokens.shape[1] else self.real


def check_task_matches(model: Decoder, task: Task) -> None:
    """Refuse a task that the model cannot answer: other tokens, other classes, longer examples."""
    if task.vocabulary > model.size.vocabulary:
        raise UserError(
            f"task '{task.name}' has {task.vocabulary:,} tokens, and the model {model.size.vocabulary:,}"
        )
    if task.longest > model.size.context:
        raise UserError(
            f"task '{task.name}' has examples of {task.longest} tokens, and the model's context is {model.size.context}"
        )
    if isinstance(model, Classifier):
        if len(task.classes) != model.outputs:
            raise UserError(
                f"task '{task.name}' has {len(task.classes)} classes, and the model {model.outputs}"
            )
    elif task.classes:
        raise UserError(f"task '{task.name}' asks for a class; a {type(model).__name__} gives none")


def reads_of(
    model: Decoder,
    examples: Sequence[Example],
    most: int,
    batch: int,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Read]:
    """Return the reads of examples in order, at most so many of each, spread evenly over its targets."""
    if isinstance(model, Pointer):
        return _pointed(model, examples, batch, progress)
    causal = bool(getattr(model, "causal", True))
    reads = []
    for number, example in enumerate(examples):
        if example.targets is None:
            reads.append(
                Read(number, example.tokens, len(example.tokens) - 1, example.label, example.relevant)
            )
            continue
        places = np.flatnonzero(example.targets >= 0)
        count = min(most, len(places))
        for chosen in sorted({len(places) * step // count for step in range(count)}):
            place = int(places[chosen])
            stop = place + 1 if causal else len(example.tokens)
            row = example.relevant[[chosen if len(example.relevant) > 1 else 0], :stop]
            reads.append(Read(number, example.tokens[:stop], place, int(example.targets[place]), row))
    return reads


@torch.no_grad()
def _pointed(
    model: Pointer, examples: Sequence[Example], batch: int, progress: Callable[[float], None]
) -> list[Read]:
    """Return two reads per example, at the tokens that the model points at; one without a span has no right answer.

    An answer that could be written out is not shown: a pointer is trained and scored without it.
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
    """Yield every read once, like lengths together, at most so many tokens in one pass.

    Where a mechanism cannot handle padding, only equal lengths stand together.
    """
    padded = all(block.mechanism.supports.padding for block in model.layers)
    device = model.readout.device
    chosen: list[Read] = []
    for read in sorted(reads, key=lambda read: len(read.tokens)):
        full = (len(chosen) + 1) * len(read.tokens) > tokens
        if chosen and (full or (not padded and len(read.tokens) != len(chosen[0].tokens))):
            yield _collated(chosen, device)
            chosen = []
        chosen.append(read)
    if chosen:
        yield _collated(chosen, device)


def _collated(reads: list[Read], device: torch.device) -> ReadBatch:
    rows = np.zeros((len(reads), max(len(read.tokens) for read in reads)), dtype=np.int64)
    for place, read in enumerate(reads):
        rows[place, : len(read.tokens)] = read.tokens

    def of(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    return ReadBatch(
        reads,
        torch.from_numpy(rows).to(device),
        of([len(read.tokens) for read in reads]),
        of([read.place for read in reads]),
        of([read.end for read in reads]),
        of([read.answer for read in reads]),
    )


def chances(model: Decoder, tokens: Tensor, padding: Tensor | None, places: Tensor, ends: Tensor) -> Tensor:
    """Return the probability of every answer: classes, tokens, or places for the pointer's end (batch, answers)."""
    if isinstance(model, Pointer):
        return model.ends(tokens, padding)[torch.arange(len(tokens), device=tokens.device), ends].softmax(-1)
    # One row's mixing takes half of the time of a one-layer model on CPU; on a GPU all rows are one fast kernel.
    frame = Frame(narrow=not tokens.is_cuda)
    if isinstance(model, Classifier):
        return _softmax(model.scores(tokens, places, padding, frame))
    return _softmax(model.logits(tokens, padding=padding, rows=places, frame=frame).squeeze(1))


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def fixed_place(model: Decoder) -> bool:
    """Whether the token that is read must stay when others are deleted; a class is read at the last one left."""
    return not isinstance(model, Classifier)


def cut(share: float, length: Tensor) -> Tensor:
    """Return k = ceil(share x length), at least one token left."""
    # 0.05 x 20 is a little above 1 in binary.
    return torch.minimum((share * length.double() - 1e-9).ceil().long().clamp_min(1), length - 1)


def budget(model: Decoder, longest: int) -> int:
    """Return how many tokens go through the model in one pass: some four million cells of a layer's maps.

    On a GPU eight times as many, so that small models do not wait for the next pass to be asked for.
    """
    cells = 2**25 if model.readout.is_cuda else 2**22
    return max(longest, math.ceil(cells / (model.size.heads * max(1, longest))))
