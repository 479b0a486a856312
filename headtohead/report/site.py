"""A static site of several studies: one page with a card per study, and the reports it links to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headtohead.common.errors import UnreadableFile, UserError
from headtohead.common.files import read_file, write_atomic
from headtohead.report.facts import listed, study_facts
from headtohead.report.gather import environments
from headtohead.report.panels.verdicts.claims import linked_pages
from headtohead.report.templates import render
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.headline import headline
from headtohead.study.store.manifest import Manifest
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store

_REPORT = "report.html"


@dataclass(frozen=True)
class Card:
    """What the site says about one study."""

    name: str
    headline: str
    arms: str
    facts: Sequence[tuple[str, str]]
    link: str
    """Its report, relative to the site's page."""


def write_site(out: Path, studies: Iterable[tuple[Path, Analysis]], title: str) -> Path:
    """Copy the written reports of studies into `out` and write index.html with a card for each; return its path."""
    cards: list[Card] = []
    try:
        for path, analysis in studies:
            place = _place(path, {card.link for card in cards})
            for page in (_REPORT, *(page for _, page in linked_pages(path))):
                (out / place / page).parent.mkdir(parents=True, exist_ok=True)
                write_atomic(out / place / page, read_file(path / page))
            cards.append(_card(path, analysis, f"{place}/{_REPORT}"))
        page = render("site.html.jinja", ("page.css", "site.css", "theme.js"), cards=cards, title=title)
        write_atomic(out / "index.html", page)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    return out / "index.html"


def _card(path: Path, analysis: Analysis, link: str) -> Card:
    manifest = analysis.manifest
    facts = study_facts(manifest, _specs(Store(path), manifest), environments(path, manifest, []))
    arms = listed([label for _, label in manifest.arms])
    return Card(manifest.name, headline(analysis.verdicts), arms, facts, link)


def _specs(store: Store, manifest: Manifest) -> list[RunSpec]:
    """Return one started run of every arm in every contest."""
    runs = {(entry.contest, entry.label): entry.run for entry in manifest.entries}
    found = []
    for run in runs.values():
        try:
            found.append(store.run(run).spec())
        except UnreadableFile:  # not started, or damaged: the report names it
            continue
    return found


def _place(path: Path, links: set[str]) -> str:
    """Return the folder of a study in the site: its directory's name in letters and digits, with a number if it is taken."""
    name = re.sub(r"[^a-z0-9]+", "-", path.resolve().name.lower()).strip("-") or "study"
    number = 1
    while f"{(place := name if number == 1 else f'{name}-{number}')}/{_REPORT}" in links:
        number += 1
    return place
