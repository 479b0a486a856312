"""The first bytes of a corpus, so that corpora of different sizes have equal amounts of unique text.

    first:BYTES(CORPUS)          first:9M(wiki-prose)
    first:BYTES/HELD(CORPUS)     first:20M/1M(enwik8)

The train split has the corpus' documents in reading order up to BYTES; the last one is cut at a line end or space. Valid and
test are those of the corpus, or their first HELD bytes each: on a CPU, scoring all 10M held-out bytes of enwik8 takes as long as
training a small model on 4M.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json
from headtohead.common.numbers import exact_count, parse_count
from headtohead.data.corpora import Corpus, Documents
from headtohead.data.lines import text_lengths
from headtohead.data.text import Progress, Text, part_of_text

_PREFIX = "first:"
_COUNT = r"[^()/]+"
_GRAMMAR = re.compile(rf"first:({_COUNT})(?:/({_COUNT}))?\((.+)\)")
_NEAR = 4096
"""The last document is cut at a line end or space within this many bytes, else at the exact byte."""


@dataclass(frozen=True)
class First:
    """A parsed name of this kind."""

    size: int
    held: int | None
    """Bytes of valid and of test, or None for all of them."""
    source: str

    def text(self, source: str) -> str:
        """Return the name with this source."""
        held = "" if self.held is None else f"/{exact_count(self.held)}"
        return f"{_PREFIX}{exact_count(self.size)}{held}({source})"


def parse_first(name: str) -> First:
    """Parse `first:BYTES(CORPUS)` or `first:BYTES/HELD(CORPUS)`."""
    match = _GRAMMAR.fullmatch(name)
    if match is None:
        raise UserError(
            f"corpus '{name}' is not of the form first:BYTES(CORPUS) or first:BYTES/HELD(CORPUS), "
            "such as first:9M(wiki-prose) or first:20M/1M(enwik8)"
        )
    size = parse_count(match[1], f"corpus '{name}'")
    held = parse_count(match[2], f"corpus '{name}'") if match[2] else None
    if 0 in (size, held):
        raise UserError(f"corpus '{name}': first: takes counts above 0")
    if match[3].startswith(("coherence:", _PREFIX)):
        raise UserError(f"corpus '{name}': first: takes a plain corpus")
    return First(size, held, match[3])


def first_corpus(name: str, find: Callable[[str], Corpus]) -> Corpus:
    """Return the corpus cut to its first bytes; `find` returns the corpus that is cut."""
    first = parse_first(name)
    whole = find(first.source)
    return replace(
        whole,
        name=first.text(first.source),
        label=first.text(whole.label),
        read=lambda progress: _read(first, whole, progress),
        rule=canonical_json(
            ["first1", first.size, whole.name, whole.rule, *([first.held] if first.held else [])]
        ),
    )


def _read(first: First, whole: Corpus, progress: Progress) -> Documents:
    found = whole.read(progress)
    lengths = {"train": first.size} | ({"valid": first.held, "test": first.held} if first.held else {})
    splits = dict(found.splits)
    for split, size in lengths.items():
        available = sum(text_lengths(found.splits[split]))
        if available < size - (_NEAR if split == "train" else 0):
            purpose = "to train on" if split == "train" else f"in {split}"
            raise UserError(f"corpus {whole.label} has {available:,} bytes {purpose}, fewer than {size:,}")
        splits[split] = _head(found.splits[split], size)
    return replace(found, splits=splits)


def _head(documents: Sequence[tuple[str, Text]], size: int) -> list[tuple[str, Text]]:
    """Return the documents in the first `size` bytes."""
    taken: list[tuple[str, Text]] = []
    used = 0
    for name, text in documents:
        if used + len(text) > size:
            if (stop := _cut(text, size - used)) > 0:
                taken.append((name, part_of_text(text, 0, stop)))
            break
        taken.append((name, text))
        used += len(text)
    return taken


def _cut(text: Text, stop: int) -> int:
    """Return the end of the last line or word before `stop`."""
    start = max(0, stop - _NEAR)
    near = text[start:stop]
    found = max(near.rfind(b"\n"), near.rfind(b" "))
    return stop if found < 0 else start + found + 1
