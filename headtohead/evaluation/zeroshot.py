"""Zero-shot scoring: which choice a model finds likeliest, or whether it generates the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from headtohead.common.schema import Plain
from headtohead.common.typed import Number
from headtohead.data.tasks.zeroshot import Task
from headtohead.data.text import Array
from headtohead.data.tokenizers import Tokenizer
from headtohead.evaluation.loss import evaluating, tokens_per_pass
from headtohead.kernels.matmul.loss import IGNORED
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


def score_examples(
    model: Decoder, task: Task, tokenizer: Tokenizer, *, progress: Callable[[float], None] | None = None
) -> TaskScore:
    """Return the model's score on a task.

    Every context starts with a separator, as documents do in training. A context longer than the model's is truncated on
    the left; each token of a choice sees at least half of the model's context, or everything before it.
    """
    choices = [choice for example in task.examples for choice in example.choices]
    contexts = tokenizer.encode_all(choice.context.encode("utf-8") for choice in choices)
    texts = list(tokenizer.encode_all(choice.text.encode("utf-8") for choice in choices))
    pieces: list[_Piece] = []
    cut = np.zeros(len(choices), dtype=bool)
    for index, (context, text) in enumerate(zip(contexts, texts, strict=True)):
        found, cut[index] = _pieces(index, context, text, tokenizer.separator, model.size.context)
        pieces += found
    nats, hits = _judge(model, pieces, len(choices), tokenizer.separator, progress)
    lengths = np.array([len(choice.text.encode("utf-8")) for choice in choices])
    ends = np.cumsum([len(example.choices) for example in task.examples])[:-1]
    answers = [example.answer for example in task.examples]
    parts = np.split(nats, ends)
    by_bytes: list[float] = []
    if task.exact:
        credits = [float(hit) for hit in hits]
        guesses = [float(tokenizer.vocabulary) ** -len(text) for text in texts]
    else:
        credits = list(map(_credit, parts, answers))
        by_bytes = list(map(_credit, np.split(nats / lengths, ends), answers))
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
        cut=sum(bool(part.any()) for part in np.split(cut, ends)),
    )


def _pieces(choice: int, context: Array, text: Array, separator: int, room: int) -> tuple[list[_Piece], bool]:
    """Return pieces that predict each token of a choice once, and whether text was truncated on the left."""
    whole = np.concatenate([[separator], context, text]).astype(np.int64)
    stride = max(1, room // 2)
    found, first = [], 0
    for start in range(len(whole) - len(text), len(whole), stride):
        stop = min(start + stride, len(whole))
        first = max(0, stop - room - 1)
        found.append(_Piece(choice, whole[first:stop], stop - start))
    return found, first > 1  # the separator is not text


@torch.no_grad()
def _judge(
    model: Decoder,
    pieces: list[_Piece],
    choices: int,
    filler: int,
    progress: Callable[[float], None] | None,
) -> tuple[Array, Array]:
    """Return two arrays (choices,): the nats of a choice, and whether each of its tokens is the likeliest."""
    device = model.readout.device
    nats, hits = np.zeros(choices), np.ones(choices, dtype=bool)
    done = 0
    with evaluating(model):
        for rows in _batches(pieces, tokens_per_pass(device), model.size.vocabulary):
            tokens, targets = (values.to(device) for values in _padded(rows, filler))
            where = targets != IGNORED
            logits, wanted = model.logits(tokens, where=where).float(), targets[where]
            found = F.cross_entropy(logits, wanted, reduction="none").double().cpu().numpy()
            likeliest = (logits.argmax(-1) == wanted).cpu().numpy()
            ends = np.cumsum([row.count for row in rows])[:-1]
            for row, part, hit in zip(rows, np.split(found, ends), np.split(likeliest, ends), strict=True):
                nats[row.choice] += part.sum()
                hits[row.choice] &= bool(hit.all())
            done += len(rows)
            if progress:
                progress(done / len(pieces))
    return nats, hits


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


def _padded(rows: Sequence[_Piece], filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets (rows, time), padded on the right, where a causal model does not attend."""
    time = max(len(row.tokens) for row in rows) - 1
    tokens = torch.full((len(rows), time), filler)
    targets = torch.full((len(rows), time), IGNORED)
    for index, row in enumerate(rows):
        stop = len(row.tokens) - 1
        both = torch.from_numpy(row.tokens)
        tokens[index, :stop] = both[:-1]
        targets[index, stop - row.count : stop] = both[-row.count :]
    return tokens, targets


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
