"""Judged claims of a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, ValidationError, convert, structs

from headtohead.common.errors import UserError
from headtohead.common.files import read_json
from headtohead.report.panels.base import Chip, Figure, Table, View

FILE = "claims.json"
"""Written by `reproduce` in the study's directory."""
_HEAD = ("claim", "statement", "direction", "size", "published", "measured and reason", "scale")
_MAX_OPEN = 6
"""More claims than this are folded, so that the verdicts below stay visible."""
_CHIPS = ("supported", "contradicted", "open")


class _Claim(Struct, frozen=True):
    """What the table shows of a claim."""

    id: str
    statement: str
    direction: str
    size: str
    published: str
    reason: str
    scale: str


def figure(views: Sequence[View]) -> Figure | None:
    """Return the claims of the paper, if the study reproduces one."""
    if not views:
        return None
    try:
        claims = convert(read_json(views[0].path / FILE), list[_Claim])
    except (UserError, ValidationError):
        return None
    if not claims:
        return None
    count = {word: sum(claim.direction == word for claim in claims) for word in _CHIPS}
    words = (
        "Direction: "
        + ", ".join(f"{number} {word}" for word, number in count.items() if number)
        + ". Size: whether the effect is as large as published."
    )
    rows = [
        [
            _chip(value) if name in ("direction", "size") else value
            for name, value in structs.asdict(claim).items()
        ]
        # Decided claims first.
        for claim in sorted(claims, key=lambda claim: claim.direction not in _CHIPS[:2])
    ]
    folded = f"All {len(rows)} claims" if len(rows) > _MAX_OPEN else ""
    table = Table(_HEAD, rows, left=len(_HEAD), folded=folded)
    links = linked_pages(views[0].path)
    if links:
        words += " Pages of the paper's other studies:"
    return Figure("Claims of the paper.", words, table=table, links=links)


def linked_pages(path: Path) -> list[tuple[str, str]]:
    """Return the pages of the paper's other studies, in subdirectories of this one, and of its toy."""
    pages = [page.relative_to(path).as_posix() for page in sorted(path.glob("*/report.html"))]
    found = [(page.partition("/")[0], page) for page in pages]
    return found + ([("toy", "toy.html")] if (path / "toy.html").is_file() else [])


def _chip(word: str) -> Chip:
    return Chip(word, word if word in _CHIPS else "open")
