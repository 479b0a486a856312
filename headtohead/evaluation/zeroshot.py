"""Zero-shot scoring: which choice a model finds likeliest, or whether it generates the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from headtohead.common.schema import Plain
from headtohead.common.typed import Number
from headtohead.data.tasks.zeroshot import Task
from headtohead.data.text import Array
from headtohead.data.tokenizers import Tokenizer
from headtohead.evaluation.loss import evaluating, tokens_per_pass
from headtohead.model.decoder import Decoder

# Likelihoods that differ by less differ only by rounding.
_TIE = 1e-9


@dataclass(frozen=True)
class TaskScore(Plain):
    """A model's accuracy on a task, with the accuracy of guessing."""

    task: str
    n: int
    accuracy: Number
    """Fraction of examples whose answer is the likeliest choice or is generated exactly; a tie of k counts 1/k."""
    standard_error: Number | None
    """Over examples; None for one example."""
    accuracy_by_bytes: Number | None
    """Accuracy with each choice's log-likelihood divided by its bytes; None for exact tasks."""
    standard_error_by_bytes: Number | None
    chance: Number
    """Accuracy of a uniform guess among the choices, or of every token of the answer to generate."""
    one_answer: Number | None
    """Accuracy of the best constant answer; None if examples differ in their choices."""
    nats: Number
    """Mean nats of the complete right answer."""
    cut: int
    """Examples whose context was truncated on the left to fit the model's."""


@dataclass(frozen=True)
class _Piece:
    """Tokens whose last `count` are predicted, for one choice."""

    choice: int
    tokens: Array
    count: int


@dataclass(frozen=True)
class _Batch:
    """Pieces of similar length."""

    tokens: torch.Tensor
    """(pieces, time), padded on the right, where a causal model does not attend."""
    scored: torch.Tensor
    """(pieces, time): where the next token belongs to a choice."""
    wanted: torch.Tensor
    """(scored,): the tokens of the choices."""
    choice: Array
    """(scored,): the choice that each belongs to."""


@dataclass(frozen=True)
class _Encoded:
    """A task's choices as batches for models of one context length."""

    batches: tuple[_Batch, ...]
    lengths: tuple[int, ...]
    """Tokens of each choice."""
    cut: Array
    """(choices,): whether its context was truncated on the left."""


def score_examples(
    model: Decoder, task: Task, tokenizer: Tokenizer, *, progress: Callable[[float], None] | None = None
) -> TaskScore:
    """Return the model's score on a task.

    Every context starts with a separator, as documents do in training. A context longer than the model's is truncated on
    the left; each token of a choice sees at least half of the model's context, or everything before it.
    """
    limit = tokens_per_pass(model.readout.device)
    size = model.size
    encoded = _encode(task, tokenizer, size.context, limit, size.vocabulary)
    nats, hits = _judge(model, encoded, progress)
    ends = np.cumsum([len(example.choices) for example in task.examples])[:-1]
    answers = [example.answer for example in task.examples]
    parts = np.split(nats, ends)
    by_bytes: list[float] = []
    if task.exact:
        credits = [float(hit) for hit in hits]
        guesses = [float(tokenizer.vocabulary) ** -length for length in encoded.lengths]
    else:
        texts = [choice.text.encode("utf-8") for example in task.examples for choice in example.choices]
        credits = list(map(_credit, parts, answers))
        by_bytes = list(map(_credit, np.split(nats / np.array(list(map(len, texts))), ends), answers))
        guesses = [1 / len(part) for part in parts]
    right = [part[answer] for part, answer in zip(parts, answers, strict=True)]
    return TaskScore(
        task=task.name,
        n=len(task.examples),
        accuracy=float(np.mean(credits)),
        standard_error=_standard_error(credits),
        accuracy_by_bytes=float(np.mean(by_bytes)) if by_bytes else None,
        standard_error_by_bytes=_standard_error(by_bytes),
        chance=float(np.mean(guesses)),
        one_answer=_one_answer(task),
        nats=float(np.mean(right)),
        cut=sum(bool(part.any()) for part in np.split(encoded.cut, ends)),
    )


# Kept, since the runs of a study are scored on the same tasks one after the other.
@lru_cache(maxsize=32)
def _encode(task: Task, tokenizer: Tokenizer, room: int, limit: int, vocabulary: int) -> _Encoded:
    """Return a task for models with a context of `room` tokens, in batches of at most `limit` tokens."""
    choices = [choice for example in task.examples for choice in example.choices]
    contexts = tokenizer.encode_all(choice.context.encode("utf-8") for choice in choices)
    texts = list(tokenizer.encode_all(choice.text.encode("utf-8") for choice in choices))
    pieces: list[_Piece] = []
    cut = np.zeros(len(choices), dtype=bool)
    for index, (context, text) in enumerate(zip(contexts, texts, strict=True)):
        found, cut[index] = _pieces(index, context, text, tokenizer.separator, room)
        pieces += found
    batches = tuple(_batch(rows, tokenizer.separator) for rows in _batches(pieces, limit, vocabulary))
    return _Encoded(batches, tuple(map(len, texts)), cut)


def _pieces(choice: int, context: Array, text: Array, separator: int, room: int) -> tuple[list[_Piece], bool]:
    """Return pieces that predict each token of a choice once, and whether text was truncated on the left."""
    whole = np.concatenate([[separator], context, text]).astype(np.int32)
    stride = max(1, room // 2)
    found, first = [], 0
    for start in range(len(whole) - len(text), len(whole), stride):
        stop = min(start + stride, len(whole))
        first = max(0, stop - room - 1)
        found.append(_Piece(choice, whole[first:stop], stop - start))
    return found, first > 1  # the separator is not text


def _batches(pieces: list[_Piece], limit: int, vocabulary: int) -> Iterator[list[_Piece]]:
    """Yield pieces of similar length together: at most `limit` tokens and 128 MB of logits."""
    rows: list[_Piece] = []
    scored = 0
    for piece in sorted(pieces, key=lambda piece: len(piece.tokens), reverse=True):
        widest = len(rows[0].tokens) if rows else 0
        if rows and ((len(rows) + 1) * widest > limit or (scored + piece.count) * vocabulary > 2**25):
            yield rows
            rows, scored = [], 0
        rows.append(piece)
        scored += piece.count
    if rows:
        yield rows


def _batch(rows: Sequence[_Piece], filler: int) -> _Batch:
    """Return pieces as one batch."""
    lengths, counts = (
        np.array(values) for values in zip(*((len(row.tokens) - 1, row.count) for row in rows), strict=True)
    )
    place = np.arange(lengths.max())[None, :]
    inside = place < lengths[:, None]
    tokens = np.full(inside.shape, filler, dtype=np.int32)
    tokens[inside] = np.concatenate([row.tokens[:-1] for row in rows])
    return _Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(inside & (place >= (lengths - counts)[:, None])),
        torch.from_numpy(np.concatenate([row.tokens[-row.count :] for row in rows])).long(),
        np.repeat([row.choice for row in rows], counts),
    )


@torch.no_grad()
def _judge(
    model: Decoder, encoded: _Encoded, progress: Callable[[float], None] | None
) -> tuple[Array, Array]:
    """Return two arrays (choices,): the nats of a choice, and whether each of its tokens is the likeliest."""
    device = model.readout.device
    choices = len(encoded.lengths)
    nats, misses = np.zeros(choices), np.zeros(choices)
    with evaluating(model):
        for index, batch in enumerate(encoded.batches):
            tokens, scored, wanted = (
                values.to(device) for values in (batch.tokens, batch.scored, batch.wanted)
            )
            logits = model.logits(tokens.long(), where=scored).float()
            found = F.cross_entropy(logits, wanted, reduction="none").double().cpu().numpy()
            missed = (logits.argmax(-1) != wanted).cpu().numpy()
            nats += np.bincount(batch.choice, found, choices)
            misses += np.bincount(batch.choice, missed, choices)
            if progress:
                progress((index + 1) / len(encoded.batches))
    return nats, misses == 0


def _credit(nats: Array, answer: int) -> float:
    """Return 1 if the answer is the likeliest, 1/k if k choices tie for that, else 0."""
    tied = nats <= nats.min() + _TIE * max(1.0, abs(float(nats.min())))
    return float(tied[answer]) / int(tied.sum())


def _standard_error(credits: list[float]) -> float | None:
    return float(np.std(credits, ddof=1)) / math.sqrt(len(credits)) if len(credits) > 1 else None


def _one_answer(task: Task) -> float | None:
    if task.exact or len({tuple(choice.text for choice in example.choices) for example in task.examples}) > 1:
        return None
    answers = [example.answer for example in task.examples]
    return max(map(answers.count, set(answers))) / len(answers)
