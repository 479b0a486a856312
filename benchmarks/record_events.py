"""Run a study as `h2h bench study` does, and record what its runs report to the estimate of the time left, with the time of each report.

    python benchmarks/record_events.py STUDY.toml FILE.json [--workers 3]

`tests/common/test_estimate.py` replays such a file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from headtohead import Study, bench_study
from headtohead.common.estimate import Estimate, Work

EVENTS: list[list[object]] = []
_BEGAN = time.monotonic()


def _record(*event: object) -> None:
    EVENTS.append([round(time.monotonic() - _BEGAN, 2), *event])


class Recorded(Estimate):
    """An estimate that records its events."""

    def begin(self, work: Sequence[Work], later: Sequence[Work] = ()) -> None:
        """Record the work of an execution."""
        rows = [[[one.run, str(one.kind), one.tokens, one.flops] for one in part] for part in (work, later)]
        _record("begin", *rows)
        super().begin(work, later)

    def enter(self, run: str, phase: str) -> None:
        """Record a phase."""
        _record("enter", run, phase)
        super().enter(run, phase)

    def trained(self, run: str, share: float) -> None:
        """Record a step."""
        _record("trained", run, share)
        super().trained(run, share)

    def end(self, run: str) -> None:
        """Record the end of a run."""
        _record("end", run)
        super().end(run)


def main() -> None:
    """Run the study and write the events."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("file", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    given = parser.parse_args()
    import headtohead.common.progress as progress

    progress.Estimate = Recorded  # type: ignore[misc]
    document = bench_study(Study.from_file(given.study), workers=given.workers, keep_weights=False)
    given.file.write_text(json.dumps(EVENTS, separators=(",", ":")))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
