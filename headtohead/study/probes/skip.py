"""Probe `skip`: a hybrid's loss with its variant layers or its standard layers skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.progress import part_of
from headtohead.evaluation.loss import score_split
from headtohead.model.decoder import Decoder
from headtohead.model.layout import skipped_layers
from headtohead.study.probes.base import NUMBER, Found, Probe, Subject, whole_number

TOKENS = 2**17
PARTS = {"block": False, "attention": True}
"""The skipped part of a layer: the whole block, or only its attention; the value is whether the FFN is kept."""


def _measure(subject: Subject, argument: str) -> Found:
    model = subject.model
    try:
        groups = {name: skipped_layers(model.arms, name) for name in ("variant", "standard")}
    except UserError:
        return {"none": "the layout does not mix standard layers with others"}
    test = subject.corpus.splits["test"]
    count = min(int(argument or TOKENS), len(test.tokens))
    part = replace(test, tokens=test.tokens[:count], documents=test.documents[test.documents < count])
    steps = 1 + len(groups) * len(PARTS)

    def score(done: int) -> float:
        shown = part_of(subject.progress, done, done + 1, steps)
        lengths = subject.tokenizer.token_bytes()
        return score_split(model, part, lengths, precision=subject.precision, progress=shown).bits_per_byte

    found: Found = {"tokens": count, "whole": score(0)}
    for name, layers in groups.items():
        row: dict[str, Any] = {"layers": layers}
        for skipped, keep_ffn in PARTS.items():
            with _skipping(model, layers, keep_ffn):
                value = score(len(found) - 1 + len(row))
            row[skipped] = {"bits_per_byte": value, "rise": value - found["whole"]}
        found[name] = row
    return found


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


_ROW = {"layers": [int]} | {name: {"bits_per_byte": NUMBER, "rise": NUMBER} for name in PARTS}
PROBE = Probe(
    f"bits per byte on the first {TOKENS:,} tokens of the test split with a hybrid's variant layers skipped, and "
    "with its standard layers skipped, as whole blocks or attention only",
    _measure,
    {"tokens": int, "whole": float, "variant": _ROW, "standard": _ROW},
    lambda text: whole_number(text, "skip", "tokens", TOKENS, 2**40),
    "number of tokens",
    amount=True,
)
