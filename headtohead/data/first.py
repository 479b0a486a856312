"""The first bytes of a corpus, so that corpora of different sizes have equal amounts of unique text.

    first:BYTES(CORPUS)          first:9M(wiki-prose)

The train split has the corpus' documents in reading order up to BYTES; the last one is cut at a line end or space. Valid and
test are those of the corpus.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json
from headtohead.common.numbers import exact_count, parse_count
from headtohead.data.corpora import Corpus, Documents
from headtohead.data.text import Progress, Text, part_of_text

_PREFIX = "first:"
_GRAMMAR = re.compile(r"first:([0-9][0-9.]*[kKMB]?)\((.+)\)")
_NEAR = 4096
"""The last document is cut at a line end or space within this many bytes, else at the exact byte."""


@dataclass(frozen=True)
class First:
    """A parsed name of this kind."""

    size: int
    source: str

    def text(self, source: str) -> str:
        """Return the name with this source."""
        return f"{_PREFIX}{exact_count(self.size)}({source})"


def parse_first(name: str) -> First:
    """Parse `first:BYTES(CORPUS)`."""
    match = _GRAMMAR.fullmatch(name)
    if match is None:
        raise UserError(
            f"corpus '{name}' is not of the form first:BYTES(CORPUS), such as first:9M(wiki-prose)"
        )
    found = First(parse_count(match[1], f"corpus '{name}'"), match[2])
    if not found.size or found.source.startswith(("coherence:", _PREFIX)):
        problem = "takes a plain corpus" if found.size else "takes a count above 0"
        raise UserError(f"corpus '{name}': first: {problem}")
    return found


def first_corpus(name: str, find: Callable[[str], Corpus]) -> Corpus:
    """Return the corpus cut to its first bytes; `find` returns the corpus that is cut."""
    first = parse_first(name)
    whole = find(first.source)
    return replace(
        whole,
        name=first.text(first.source),
        label=first.text(whole.label),
        read=lambda progress: _read(first, whole, progress),
        rule=canonical_json(["first1", first.size, whole.name, whole.rule]),
    )


def _read(first: First, whole: Corpus, progress: Progress) -> Documents:
    found = whole.read(progress)
    train, size = _head(found.splits["train"], first.size)
    if size < first.size - _NEAR:
        raise UserError(f"corpus {whole.label} has {size:,} bytes to train on, fewer than {first.size:,}")
    return replace(found, splits={**found.splits, "train": train})


def _head(documents: Sequence[tuple[str, Text]], size: int) -> tuple[list[tuple[str, Text]], int]:
    """Return the documents in the first `size` bytes and their length."""
    taken: list[tuple[str, Text]] = []
    used = 0
    for name, text in documents:
        if used + len(text) > size:
            if (stop := _cut(text, size - used)) > 0:
                taken.append((name, part_of_text(text, 0, stop)))
                used += stop
            break
        taken.append((name, text))
        used += len(text)
    return taken, used


def _cut(text: Text, stop: int) -> int:
    """Return the end of the last line or word before `stop`."""
    start = max(0, stop - _NEAR)
    near = text[start:stop]
    found = max(near.rfind(b"\n"), near.rfind(b" "))
    return stop if found < 0 else start + found + 1
