"""Run the toy model of faster_qk, which has an exact theory, and write its tables and charts."""

from __future__ import annotations

import math
from pathlib import Path

from headtohead.api.result import report_skipped
from headtohead.api.study import processes
from headtohead.common.deprecation import old_names
from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import parse_duration
from headtohead.common.progress import progress_bar
from headtohead.papers.faster_qk.work import Toy, ToyPlan, work_toy
from headtohead.study.claims.paper import find_paper, read_paper
from headtohead.study.environment import choose_device


@old_names(seconds="time_limit")
def run_toy(
    plan: ToyPlan | str,
    out: str | Path,
    *,
    device: str = "auto",
    workers: int = 0,
    time_limit: float | str = math.inf,
    quiet: bool = False,
) -> Toy:
    """Run what is missing of the toy in `out`, write toy.json, toy.html and the charts there, and return the result.

    `plan` may be a scale of `faster_qk`: smoke, small or paper.

    >>> run_toy(ToyPlan(runs=("FAFO", "FACO"), seeds=2, until=0.1), "races/toy").findings
    """
    limit = as_seconds(time_limit)
    if isinstance(plan, str):
        scales = read_paper(find_paper("faster_qk")).toy
        if plan not in scales:
            raise unknown("scale of the toy", plan, scales)
        plan = scales[plan]
    chosen = choose_device(device)
    toy = work_toy(plan, Path(out), chosen, processes(chosen, workers), limit, quiet)
    try:
        from headtohead.report.toy import write_toy
    except ImportError as error:
        report_skipped(error, quiet)
        return toy
    with progress_bar("drawing", quiet) as progress:
        try:
            write_toy(Path(out), toy, progress)
        except OSError as error:
            raise UserError(f"cannot write the toy's page to {out}: {error.strerror}") from None
    return toy


def as_seconds(given: float | str) -> float:
    """Return a duration in seconds, given as a number or as text such as `5m`."""
    return parse_duration(given) if isinstance(given, str) else given
