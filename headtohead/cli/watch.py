"""h2h watch."""

from __future__ import annotations

from typing import Annotated

from headtohead.api import watch_study
from headtohead.cli.shared.options import flag


def command(folder: Annotated[str, flag("DIR")], *, port: Annotated[int, flag("NUMBER")] = 8642) -> None:
    """Serve a live page about a running study: learning curves, progress, time left. Ctrl-C stops it.

    The page is read-only and reachable from this machine alone. A study that has not begun is waited for; the page
    of a finished one links to its report.

    Args:
        folder: study directory
        port: port on 127.0.0.1; 0: any free port
    """
    watch_study(folder, port=port)
