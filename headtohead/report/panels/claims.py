"""What the study says of a paper's claims."""

from __future__ import annotations

from collections.abc import Sequence

from headtohead.common.errors import UserError
from headtohead.common.files import read_json
from headtohead.report.panels.base import Chip, Figure, Table, View
from headtohead.study.probes import fits

FILE = "claims.json"
"""Written by whoever judges claims, in the study's directory."""
_WORDS = ("id", "statement", "published", "direction", "size", "scale", "reason")
_CHIPS = ("supported", "contradicted", "open")
_FORM = [dict.fromkeys(_WORDS, str) | {"measured": [{str: (str, float, None, [(str, float, None)])}]}]


def figure(views: Sequence[View]) -> Figure | None:
    """Return the claims of the paper, where the study is a paper's."""
    if not views:
        return None
    try:
        claims = read_json(views[0].path / FILE)
    except UserError:
        return None
    if not claims or not fits(claims, _FORM):
        return None
    count = {word: sum(claim["direction"] == word for claim in claims) for word in _CHIPS}
    words = (
        "By direction "
        + ", ".join(f"{number} {word}" for word, number in count.items() if number)
        + ". Size: whether the effect is as large as published. What decides, and at which scale, stands beside each."
    )
    rows = [
        (
            claim["id"],
            claim["statement"],
            claim["published"],
            _chip(claim["direction"]),
            _chip(claim["size"]),
            claim["scale"],
            claim["reason"],
        )
        for claim in claims
    ]
    head = ("claim", "statement", "published", "direction", "size", "scale", "measured, and why")
    return Figure("What became of the paper's claims.", words, table=Table(head, rows, left=len(head)))


def _chip(word: str) -> Chip:
    return Chip(word, word if word in _CHIPS else "open")
