"""Loss of a model on a split: nats, perplexity, bits per byte, and nats by block of documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headtohead.common.schema import Plain
from headtohead.data.shards import Split
from headtohead.data.text import Array
from headtohead.data.windows import scoring_windows
from headtohead.model.decoder import Decoder
from headtohead.training.batches import moved

MAX_BLOCKS = 256
MIN_DOCUMENTS = 8
_CUTS_OF_ONE_TEXT = 64
_PASSES_PER_COPY = 32


@dataclass(frozen=True)
class Score(Plain):
    """The loss of a model on a whole split; every token except the first is predicted once."""

    nats: float
    """Mean nats per token."""
    perplexity: float
    bits_per_byte: float
    """Total bits over total bytes of text; a separator counts as one byte under every tokenizer."""
    tokens: int
    bytes: int
    blocks: list[list[float]]
    """[nats, bytes] of each block of whole documents in order, for intervals over the test set."""


def score_split(
    model: Decoder,
    split: Split,
    token_bytes: Array,
    *,
    precision: str = "float32",
    progress: Callable[[float], None] | None = None,
) -> Score:
    """Return the model's score on a whole split, in non-overlapping windows of its context.

    `token_bytes` (vocabulary,) is the tokenizer's table; for a lossy tokenizer the bytes of the text itself count.
    """
    nats = _token_nats(model, split, precision, progress)
    lengths = split.token_lengths(token_bytes)
    lengths[0] = 0  # the first token is given, not predicted
    total, size, count = float(nats.sum()), round(float(lengths.sum())), len(split.tokens) - 1
    mean = total / count
    return Score(
        nats=mean,
        perplexity=math.exp(min(mean, 700.0)),
        bits_per_byte=total / math.log(2) / size,
        tokens=count,
        bytes=size,
        blocks=_blocks(nats, lengths, split.documents),
    )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and back in its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def tokens_per_pass(device: torch.device) -> int:
    """Return the number of tokens per pass: about 8k fit a CPU's caches; a GPU needs more."""
    return 8192 if device.type == "cpu" else 65536


def windows_per_pass(device: torch.device, context: int) -> int:
    """Return the number of windows per pass."""
    return max(1, tokens_per_pass(device) // context)


def nats_by_position(
    model: Decoder,
    split: Split,
    *,
    precision: str = "float32",
    progress: Callable[[float], None] | None = None,
) -> list[list[float]]:
    """Return [first, last, mean nats] of positions in the window, counted from 1, in bins that double in size."""
    context = model.size.context
    nats = _token_nats(model, split, precision, progress)[1:]
    # A shorter last window is dropped.
    whole = nats[: len(nats) // context * context].reshape(-1, context)
    if not len(whole):
        return []
    means = whole.mean(0)
    bins, first = [], 1
    while first <= context:
        last = min(2 * first - 1, context)
        bins.append([first, last, float(means[first - 1 : last].mean())])
        first = last + 1
    return bins


@torch.no_grad()
def _token_nats(
    model: Decoder, split: Split, precision: str, progress: Callable[[float], None] | None
) -> Array:
    """Return the nats of every token of a split, predicted in non-overlapping windows; zero for the first token."""
    device, context = model.readout.device, model.size.context
    nats = np.zeros(len(split.tokens), dtype=np.float64)
    batch = windows_per_pass(device, context)
    # Copying a result waits for the device, which is then idle until the next pass is launched.
    copied = 1 if device.type == "cpu" else _PASSES_PER_COPY
    pending: list[Tensor] = []
    done = 1
    with evaluating(model):
        for tokens, targets, first in scoring_windows(split.tokens, context, batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                pending.append(model.nats(moved(tokens, device), moved(targets, device)).flatten())
            end = first + targets.numel()
            if len(pending) < copied and end < len(nats):
                continue
            nats[done:end] = torch.cat(pending).double().cpu().numpy()
            done, pending = end, []
            if progress:
                progress(first / len(split.tokens))
    return nats


def _blocks(nats: Array, lengths: Array, documents: Array) -> list[list[float]]:
    """Return sums over blocks of whole documents; a split with few documents is cut into equal parts instead."""
    starts = documents.astype(np.int64)
    if len(starts) < MIN_DOCUMENTS:
        starts = np.linspace(0, len(nats), _CUTS_OF_ONE_TEXT, endpoint=False).astype(np.int64)
    elif len(starts) > MAX_BLOCKS:
        wanted = np.linspace(0, len(nats), MAX_BLOCKS, endpoint=False)
        starts = np.unique(starts[np.searchsorted(starts, wanted, "right") - 1])
    starts = np.unique(starts)
    sums = np.add.reduceat(nats, starts), np.add.reduceat(lengths, starts)
    return [[float(a), round(float(b))] for a, b in zip(*sums, strict=True) if b >= 0.5]
