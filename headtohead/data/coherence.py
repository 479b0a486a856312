"""The coherence dial: the same pieces of several domains, in an order between mixed (0) and coherent (1).

    coherence:DIAL(CORPUS,CORPUS,...)          coherence:0(wiki-prose,pubmed,code)
    coherence:DIAL/PIECE(CORPUS,...)           coherence:0.5/64(stdlib)

1. Each corpus is a domain; a corpus that knows topics of its own (stdlib) gives one domain for each.
2. Documents are cut into pieces of about PIECE bytes, at line ends or spaces, and of each domain as many are taken, in
   reading order, as the smallest domain has bytes: split by split, so that splits stay what they were.
3. Two pieces that follow each other in a domain are joined. The dial is the share of joins that are kept. At 1 a domain
   stands in reading order, document by document; at 0 every piece stands alone.
4. What is joined stays together; the rest is dealt so that neighbours come from different domains.

Every setting of the dial holds the same pieces, a separator behind each, and so the same bytes: order is all that
differs. A model sees what stands inside its window, so a window must hold several pieces: two at least, four or more
for a dial that is felt.
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
from headtohead.data.corpora import SPLITS, Corpus, Documents, Progress

PIECE = 64
_PREFIX = "coherence:"
_GRAMMAR = re.compile(r"coherence:([0-9]*\.?[0-9]+)(?:/([0-9]+))?\((.+)\)")
_SHORTEST, _LONGEST = 16, 2**20
_MAX_DOMAINS = 26
"""Domains are told apart by a letter."""
Piece = tuple[str, bytes]


@dataclass(frozen=True)
class Dial:
    """What a name of this kind says."""

    setting: float
    piece: int
    sources: tuple[str, ...]

    def text(self, sources: tuple[str, ...]) -> str:
        """Return the name, with other words for the sources."""
        return f"{_PREFIX}{self.setting:g}/{self.piece}({','.join(sources)})"


def parse_dial(name: str) -> Dial:
    """Return what `coherence:DIAL/PIECE(CORPUS,...)` says."""
    match = _GRAMMAR.fullmatch(name)
    if match is None:
        raise UserError(
            f"corpus '{name}' is not written coherence:DIAL(CORPUS,...) or coherence:DIAL/PIECE(CORPUS,...), "
            f"such as coherence:0.5/{PIECE}(stdlib)"
        )
    setting, piece = float(match[1]), int(match[2] or PIECE)
    if setting > 1:
        raise UserError(f"corpus '{name}': the dial lies between 0 (mixed) and 1 (coherent), got {match[1]}")
    if not _SHORTEST <= piece <= _LONGEST:
        raise UserError(f"corpus '{name}': a piece has {_SHORTEST} to {_LONGEST:,} bytes, got {piece:,}")
    sources = tuple(split_outside(match[3], ","))
    if any(source.startswith(_PREFIX) for source in sources):
        raise UserError(f"corpus '{name}': a domain is a corpus as it is, not one that is mixed already")
    if len(set(sources)) != len(sources) or not all(sources):
        raise UserError(f"corpus '{name}': its corpora must be given once each")
    return Dial(setting, piece, sources)


def coherence_corpus(name: str, find: Callable[[str], Corpus]) -> Corpus:
    """Return the corpus of a dial's setting; `find` gives the corpora it is made of."""
    dial = parse_dial(name)
    found = [find(source) for source in dial.sources]
    if len(found) == 1 and found[0].topic is None:
        raise UserError(f"corpus '{name}': one domain cannot be mixed; give two corpora or more, or stdlib")
    return Corpus(
        dial.text(dial.sources),
        dial.text(tuple(corpus.label for corpus in found)),
        f"pieces of {dial.piece} bytes, {dial.setting:.0%} of their joins kept",
        tuple(file for corpus in found for file in corpus.files),
        lambda progress: _read(dial, found, progress),
        canonical_json(["dial1", dial.setting, dial.piece, [[corpus.name, corpus.rule] for corpus in found]]),
    )


def check_piece_length(label: str, notes: dict[str, object], window_bytes: float) -> None:
    """Refuse pieces of which a window does not hold two: the dial would turn nothing that a model can see."""
    piece = notes.get("piece")
    if isinstance(piece, int) and 2 * piece > window_bytes:
        raise UserError(
            f"corpus {label}: its pieces of {piece} bytes are longer than half a window of about {window_bytes:.0f} bytes, "
            f"in which the dial acts; write DIAL/{max(_SHORTEST, int(window_bytes / 4))} or give a longer context"
        )


def _read(dial: Dial, corpora: list[Corpus], progress: Progress) -> Documents:
    domains: dict[str, dict[str, list[Piece]]] = {}
    for corpus in corpora:
        for split, documents in corpus.read(progress).splits.items():
            for name, text in documents:
                domain = corpus.topic(name) if corpus.topic else corpus.name
                domains.setdefault(domain, {}).setdefault(split, []).append((f"{corpus.name}/{name}", text))
    if not 2 <= len(domains) <= _MAX_DOMAINS:
        raise UserError(f"a dial mixes 2 to {_MAX_DOMAINS} domains, here are {len(domains)}")
    whole: dict[str, list[Piece]] = {}
    splits: dict[str, list[Piece]] = {}
    order: dict[str, str] = {}
    for place, split in enumerate(SPLITS):
        progress(f"cutting the {split} split", place / len(SPLITS))
        parts = [domains[domain].get(split, []) for domain in domains]
        limit = min(sum(len(text) for _, text in documents) for documents in parts)
        taken = [_taken(documents, dial.piece, limit) for documents in parts]
        if not all(pieces for _, pieces in taken):
            poor = [domain for domain, (_, pieces) in zip(domains, taken, strict=True) if not pieces]
            raise UserError(f"domain {poor[0]} has nothing in the {split} split")
        whole[split] = [document for documents, _ in taken for document in documents]
        dealt = [*_deal([pieces for _, pieces in taken], dial.setting, split)]
        splits[split] = [piece for _, piece in dealt]
        order[split] = "".join(chr(ord("A") + domain) for domain, _ in dealt)
    notes = {"piece": dial.piece, "dial": dial.setting, "domains": list(domains), "order": order}
    return Documents(splits, notes, whole)


def _taken(documents: list[Piece], size: int, limit: int) -> tuple[list[Piece], list[Piece]]:
    """Return the documents that `limit` bytes reach, and their pieces up to there."""
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
    """Return a text in pieces of about `size` bytes, cut behind line ends, else behind spaces, never in a character."""
    count = max(1, round(len(text) / size))
    edges = [0]
    for number in range(1, count):
        place = number * len(text) // count
        low, high = max(edges[-1], place - size // 4), place + size // 4
        end = text.rfind(b"\n", low, high) + 1 or text.rfind(b" ", low, high) + 1
        place = end if end > edges[-1] else place
        while place < len(text) and text[place] & 0xC0 == 0x80:
            place += 1
        if edges[-1] < place < len(text):
            edges.append(place)
    edges.append(len(text))
    return [text[a:b] for a, b in pairwise(edges) if b > a]


def _deal(domains: list[list[Piece]], setting: float, split: str) -> Iterator[tuple[int, Piece]]:
    """Yield (domain, piece) in the order of a setting; the same order every time."""
    # Only `random()` gives the same numbers under every Python; what is kept at one setting is kept at all above it.
    waiting = []
    for domain, pieces in enumerate(domains):
        draw = random.Random(f"joins/{split}/{domain}").random
        joins = [draw() for _ in pieces[1:]]
        kept = set(sorted(range(len(joins)), key=joins.__getitem__)[: round(setting * len(joins))])
        runs: list[list[Piece]] = [[]]
        for place, piece in enumerate(pieces):
            runs[-1].append(piece)
            if place not in kept:
                runs.append([])
        draw = random.Random(f"runs/{split}/{domain}").random
        keys = [draw() for _ in runs]
        places = sorted(range(len(runs)), key=keys.__getitem__)
        waiting.append([runs[place] for place in places if runs[place]])
    draw = random.Random(f"deal/{split}").random
    last = -1
    while any(waiting):
        last = _next_domain([len(runs) for runs in waiting], last, draw())
        for piece in waiting[last].pop():
            yield last, piece


def _next_domain(left: list[int], last: int, chance: float) -> int:
    """Return the domain that comes next: another than the last where there is one, by chance in proportion to what is left.

    A domain that holds more than half of what is left is next, or it would have to follow itself at the end.
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
    """Return (bits that the window tells about the domain of a byte in it, bits of the domain itself).

    `order` holds a letter per piece, `lengths` their bytes; a window is a stretch of so many bytes. The first equals the
    second where every window holds one domain, and is near 0 where all hold the same mixture.
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
    return (
        -sum(amount / total * math.log2(amount / total) for amount in amounts if amount > 0) if total else 0.0
    )
