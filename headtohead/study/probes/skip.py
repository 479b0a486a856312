"""Probe `skip`: a hybrid's loss with its variant layers or its standard layers skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from msgspec import Struct

from headtohead.common.errors import UserError
from headtohead.common.progress import part_of
from headtohead.common.typed import Count, Number
from headtohead.evaluation.loss import score_split
from headtohead.model.decoder import Decoder
from headtohead.model.layout import skipped_layers
from headtohead.study.probes.base import Found, Maybe, Probe, Subject, Unavailable, whole_number

TOKENS = 2**17
PARTS = {"block": False, "attention": True}
"""The skipped part of a layer: the whole block, or only its attention; the value is whether the FFN is kept."""


class Rise(Struct, frozen=True):
    """The score with something skipped, and its difference from the whole model's."""

    bits_per_byte: Maybe
    rise: Maybe


class SkippedLayers(Struct, frozen=True):
    """The scores with layers skipped as whole blocks, and with their attention skipped."""

    layers: list[int]
    block: Rise
    attention: Rise


class Skipped(Struct, frozen=True):
    """The result."""

    tokens: Count
    whole: Number
    variant: SkippedLayers
    standard: SkippedLayers


def _measure(subject: Subject, argument: str) -> Found:
    model = subject.model
    try:
        groups = {name: skipped_layers(model.arms, name) for name in ("variant", "standard")}
    except UserError:
        return Unavailable("the layout does not mix standard layers with others")
    test = subject.corpus.splits["test"]
    count = min(int(argument or TOKENS), len(test.tokens))
    part = replace(test, tokens=test.tokens[:count], documents=test.documents[test.documents < count])
    steps = 1 + len(groups) * len(PARTS)

    def score(done: int) -> float:
        shown = part_of(subject.progress, done, done + 1, steps)
        lengths = subject.tokenizer.token_bytes()
        return score_split(model, part, lengths, precision=subject.precision, progress=shown).bits_per_byte

    whole, done = score(0), 1
    found = {}
    for name, layers in groups.items():
        parts = {}
        for part_name, keep_ffn in PARTS.items():
            with _skipping(model, layers, keep_ffn):
                value = score(done)
            parts[part_name] = Rise(value, value - whole)
            done += 1
        found[name] = SkippedLayers(layers, **parts)
    return Skipped(count, whole, **found)


@contextmanager
def _skipping(model: Decoder, layers: list[int], keep_ffn: bool) -> Iterator[None]:
    """Skip layers inside the context."""
    before = [(block.mixes, block.feeds) for block in model.layers]
    model.skip(layers, keep_ffn)
    try:
        yield
    finally:
        for block, (mixes, feeds) in zip(model.layers, before, strict=True):
            block.mixes, block.feeds = mixes, feeds


PROBE = Probe(
    f"bits per byte on the first {TOKENS:,} tokens of the test split with a hybrid's variant layers skipped, and "
    "with its standard layers skipped, as whole blocks or attention only",
    _measure,
    Skipped,
    lambda text: whole_number(text, "skip", "tokens", TOKENS, 2**40),
    "number of tokens",
    amount=True,
    words={
        "variant.block.rise": "bits per byte more without the variant's blocks",
        "standard.block.rise": "bits per byte more without the standard blocks",
        "variant.attention.rise": "bits per byte more without the variant's attention",
    },
)
