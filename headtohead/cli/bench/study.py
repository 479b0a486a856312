"""h2h bench study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headtohead import api
from headtohead.cli.shared.options import RunOptions, StudyOptions, flag
from headtohead.cli.shared.tables import print_table
from headtohead.common.numbers import short_count, short_time
from headtohead.common.terminal import say, say_json


def command(
    study: Annotated[str | None, flag("STUDY")] = None,
    *,
    settings: StudyOptions = StudyOptions(),  # noqa: B008  frozen
    run: RunOptions = RunOptions(),  # noqa: B008  frozen
    out: Annotated[Path | None, flag("DIR")] = None,
) -> int:
    """Run a whole study and show where its time went: wall-clock by phase, tokens/s, share of time the device worked.

    Args:
        study: study file, or a shipped study: h2h list studies (default: none)
        out: new directory that keeps the study (default: a temporary one)
    """
    document = api.bench_study(settings.study(study), out=out, **run.arguments())
    rows = [(name, f"{seconds:.1f}") for name, seconds in document["phases"].items()]
    print_table(
        f"{document['study']}: {document['runs']} runs", ("phase", "seconds"), rows, right=("seconds",)
    )
    busy = document["device_busy"]
    say(
        f"{short_count(document['tokens'])} tokens in {short_time(document['seconds'])}: "
        f"{short_count(document['tokens_per_second'])} tokens/s"
        + ("" if busy is None else f", the device worked {busy:.0%} of the time")
    )
    say_json(document)
    return 3 if document["left"] else 0
