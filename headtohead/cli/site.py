"""h2h site."""

from __future__ import annotations

from typing import Annotated

from headtohead.api import write_site
from headtohead.cli.shared.options import flag
from headtohead.common.terminal import say


def command(
    folders: Annotated[tuple[str, ...], flag("DIR")],
    *,
    out: Annotated[str, flag("DIR")] = "site",
    title: Annotated[str, flag("TEXT")] = "Studies",
) -> None:
    """Make a static site of several studies: one page with a card per study, linked to its report.

    Example: h2h site races/* --out site --title "Attention at 1M"

    Args:
        folders: study directories; their reports are rebuilt
        out: directory of index.html and the copied reports
        title: heading of the page
    """
    say(f"site: {write_site(folders, out, title=title)}")
