"""The coherence dial: the same pieces of several domains, ordered between mixed (0) and coherent (1).

    coherence:DIAL(CORPUS,CORPUS,...)          coherence:0(wiki-prose,pubmed,code)
    coherence:DIAL/PIECE(CORPUS,...)           coherence:0.5/64(stdlib)

1. Each corpus is a domain; a corpus with topics (stdlib) gives one domain per topic.
2. Documents are cut into pieces of about PIECE bytes, at line ends or spaces. Each domain contributes, in reading order,
   as many bytes as the smallest domain has. This is done per split, so splits stay disjoint.
3. Consecutive pieces of a domain are joined. The dial is the fraction of joins that are kept: at 1 a domain is in
   reading order, document by document; at 0 no pieces are joined.
4. Joined pieces stay together; the resulting runs are ordered so that neighbors come from different domains.

Every setting of the dial has the same pieces, each followed by a separator, and so the same bytes; only the order
differs. A model sees only its window, so a window must hold several pieces: at least two, and four or more for a clear
effect.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from headtohead.common.choices import split_outside
from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json
from headtohead.data.corpora import Corpus, Documents
from headtohead.data.text import SPLITS, Progress

PIECE = 64
_PREFIX = "coherence:"
_GRAMMAR = re.compile(r"coherence:([0-9]*\.?[0-9]+)(?:/([0-9]{1,9}))?\((.+)\)")
_SHORTEST, _LONGEST = 16, 2**20
_MAX_DOMAINS = 26
"""Each domain is denoted by a letter."""
Piece = tuple[str, bytes]


@dataclass(frozen=True)
class Dial:
    """A parsed name of this kind."""

    setting: float
    piece: int
    sources: tuple[str, ...]

    def text(self, sources: tuple[str, ...]) -> str:
        """Return the name with these sources."""
        return f"{_PREFIX}{self.setting:g}/{self.piece}({','.join(sources)})"


def parse_dial(name: str) -> Dial:
    """Parse `coherence:DIAL/PIECE(CORPUS,...)`."""
    match = _GRAMMAR.fullmatch(name)
    if match is None:
        raise UserError(
            f"corpus '{name}' is not of the form coherence:DIAL(CORPUS,...) or coherence:DIAL/PIECE(CORPUS,...), "
            f"such as coherence:0.5/{PIECE}(stdlib)"
        )
    setting, piece = float(match[1]), int(match[2] or PIECE)
    sources = tuple(split_outside(match[3], ","))
    if setting > 1:
        problem = f"the dial must be between 0 (mixed) and 1 (coherent), got {match[1]}"
    elif not _SHORTEST <= piece <= _LONGEST:
        problem = f"a piece has {_SHORTEST} to {_LONGEST:,} bytes, got {piece:,}"
    elif any(source.startswith(_PREFIX) for source in sources):
        problem = "a domain may not be a coherence corpus itself"
    elif len(set(sources)) != len(sources) or not all(sources):
        problem = "every corpus must be given exactly once"
    else:
        return Dial(setting, piece, sources)
    raise UserError(f"corpus '{name}': {problem}")


def coherence_corpus(name: str, find: Callable[[str], Corpus]) -> Corpus:
    """Return the corpus of a dial's setting; `find` returns the corpora it is made of."""
    dial = parse_dial(name)
    found = [find(source) for source in dial.sources]
    if len(found) == 1 and found[0].topic is None:
        raise UserError(f"corpus '{name}': one domain cannot be mixed; give at least two corpora, or stdlib")
    return Corpus(
        dial.text(dial.sources),
        dial.text(tuple(corpus.label for corpus in found)),
        tuple(file for corpus in found for file in corpus.files),
        lambda progress: _read(dial, found, progress),
        canonical_json(["dial1", dial.setting, dial.piece, [[corpus.name, corpus.rule] for corpus in found]]),
    )


def check_piece_length(label: str, notes: dict[str, object], window_bytes: float) -> None:
    """Raise if a window does not hold two pieces, because the dial would then have no visible effect on a model."""
    piece = notes.get("piece")
    if isinstance(piece, int) and 2 * piece > window_bytes:
        raise UserError(
            f"corpus {label}: pieces of {piece} bytes are longer than half a window of about {window_bytes:.0f} bytes, "
            f"so the dial has no effect; use DIAL/{max(_SHORTEST, int(window_bytes / 4))} or a longer context"
        )


def _read(dial: Dial, corpora: list[Corpus], progress: Progress) -> Documents:
    domains: dict[str, dict[str, list[Piece]]] = {}
    for corpus in corpora:
        for split, documents in corpus.read(progress).splits.items():
            for name, text in documents:
                found = domains.setdefault(corpus.topic(name) if corpus.topic else corpus.name, {})
                found.setdefault(split, []).append((f"{corpus.name}/{name}", text[:]))
    if not 2 <= len(domains) <= _MAX_DOMAINS:
        raise UserError(f"a coherence corpus needs 2 to {_MAX_DOMAINS} domains, got {len(domains)}")
    whole: dict[str, list[Piece]] = {}
    splits: dict[str, list[Piece]] = {}
    order: dict[str, str] = {}
    for index, split in enumerate(SPLITS):
        progress(f"cutting the {split} split", index / len(SPLITS))
        parts = [domains[domain].get(split, []) for domain in domains]
        limit = min(sum(len(text) for _, text in documents) for documents in parts)
        taken = [_taken(documents, dial.piece, limit) for documents in parts]
        for domain, (_, pieces) in zip(domains, taken, strict=True):
            if not pieces:
                raise UserError(f"domain {domain} has no text in the {split} split")
        whole[split] = [document for documents, _ in taken for document in documents]
        dealt = [*_deal([pieces for _, pieces in taken], dial.setting, split)]
        splits[split] = [piece for _, piece in dealt]
        order[split] = "".join(chr(ord("A") + domain) for domain, _ in dealt)
    notes = {"piece": dial.piece, "dial": dial.setting, "domains": list(domains), "order": order}
    return Documents(splits, notes, whole)


def _taken(documents: list[Piece], size: int, limit: int) -> tuple[list[Piece], list[Piece]]:
    """Return the documents in the first `limit` bytes, and their pieces up to that limit."""
    used: list[Piece] = []
    pieces: list[Piece] = []
    room = limit
    for name, text in documents:
        used.append((name, text))
        for number, piece in enumerate(cut(text, size)):
            if len(piece) > room:
                return used, pieces
            pieces.append((f"{name}#{number}", piece))
            room -= len(piece)
    return used, pieces


def cut(text: bytes, size: int) -> list[bytes]:
    """Return a text in pieces of about `size` bytes, cut after line ends, else after spaces, never inside a character."""
    count = max(1, round(len(text) / size))
    edges = [0]
    for number in range(1, count):
        edge = number * len(text) // count
        low, high = max(edges[-1], edge - size // 4), edge + size // 4
        end = text.rfind(b"\n", low, high) + 1 or text.rfind(b" ", low, high) + 1
        edge = end if end > edges[-1] else edge
        while edge < len(text) and text[edge] & 0xC0 == 0x80:
            edge += 1
        if edges[-1] < edge < len(text):
            edges.append(edge)
    edges.append(len(text))
    return [text[a:b] for a, b in pairwise(edges) if b > a]


def _deal(domains: list[list[Piece]], setting: float, split: str) -> Iterator[tuple[int, Piece]]:
    """Yield (domain, piece) in the deterministic order of a setting."""
    # Only `random()` is stable across Python versions. A join kept at one setting is kept at every higher setting.
    waiting = []
    for domain, pieces in enumerate(domains):
        draw = random.Random(f"joins/{split}/{domain}").random
        joins = [draw() for _ in pieces[1:]]
        kept = set(sorted(range(len(joins)), key=joins.__getitem__)[: round(setting * len(joins))])
        runs: list[list[Piece]] = [[]]
        for index, piece in enumerate(pieces):
            runs[-1].append(piece)
            if index not in kept:
                runs.append([])
        draw = random.Random(f"runs/{split}/{domain}").random
        keys = [draw() for _ in runs]
        shuffled = sorted(range(len(runs)), key=keys.__getitem__)
        waiting.append([runs[index] for index in shuffled if runs[index]])
    draw = random.Random(f"deal/{split}").random
    last = -1
    while any(waiting):
        last = _next_domain([len(runs) for runs in waiting], last, draw())
        for piece in waiting[last].pop():
            yield last, piece


def _next_domain(left: list[int], last: int, chance: float) -> int:
    """Return the next domain, different from the last if possible, with probability proportional to the runs left.

    A domain with more than half of the remaining runs is next; otherwise it would have to follow itself at the end.
    """
    total = sum(left)
    open_ = [domain for domain, count in enumerate(left) if count and domain != last]
    for domain in open_:
        if 2 * left[domain] > total:
            return domain
    if not open_:
        return last
    mark = chance * sum(left[domain] for domain in open_)
    for domain in open_:
        mark -= left[domain]
        if mark < 0:
            return domain
    return open_[-1]


def domain_information(order: str, lengths: list[int], window: float) -> tuple[float, float]:
    """Return (mutual information in bits of a window and the domain of a byte in it, entropy in bits of the domain).

    `order` has a letter per piece, `lengths` their bytes, and `window` is in bytes. The first equals the second if every
    window has one domain, and is near 0 if all windows have the same mixture.
    """
    letters = sorted(set(order))
    totals = dict.fromkeys(letters, 0.0)
    within, used, here = 0.0, 0.0, dict.fromkeys(letters, 0.0)
    for letter, length in zip(order, lengths, strict=True):
        left = float(length)
        totals[letter] += left
        while left > 0:
            part = min(left, window - used)
            here[letter] += part
            used += part
            left -= part
            if used >= window:
                within += used * _entropy(list(here.values()))
                used, here = 0.0, dict.fromkeys(letters, 0.0)
    within += used * _entropy(list(here.values()))
    whole = _entropy(list(totals.values()))
    return max(0.0, whole - within / max(1.0, sum(totals.values()))), whole


def _entropy(amounts: list[float]) -> float:
    total = sum(amounts)
    return -sum(amount / total * math.log2(amount / total) for amount in amounts if amount > 0)
