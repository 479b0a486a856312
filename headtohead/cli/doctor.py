"""h2h doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headtohead.api import examine_study
from headtohead.cli.shared.options import flag
from headtohead.common.terminal import say
from headtohead.study.store.run_store import Store


def command(folder: Annotated[str, flag("DIR")], /, *, dry_run: bool = False) -> int:
    """Check a study directory (checksums, complete files, stale locks, disk space) and repair what is safe.

    Damaged files are renamed, never deleted. The exit code is 1 when something is left to do.

    Args:
        folder: study directory
        dry_run: report what would be repaired and change nothing
    """
    findings = examine_study(folder, repair=not dry_run)
    for finding in findings:
        say(finding)
    left = sum(not finding.repaired for finding in findings)
    count = len(Store(Path(folder)).runs())
    say(f"{count} runs checked: {len(findings)} findings, {len(findings) - left} repaired, {left} left")
    if any(finding.repair and not finding.repaired for finding in findings):
        say(f"h2h doctor {folder} repairs what can be repaired")
    return 1 if left else 0
