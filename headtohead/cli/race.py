"""h2h race."""

from __future__ import annotations

from typing import Annotated

from headtohead.cli.shared.exit_codes import ExitCode
from headtohead.cli.shared.options import RunOptions, SlurmOptions, StudyOptions, flag
from headtohead.cli.shared.results import show_left, show_result
from headtohead.common.terminal import say


def command(
    study: Annotated[str | None, flag("STUDY")] = None,
    *,
    settings: StudyOptions = StudyOptions(),  # noqa: B008  frozen
    run: RunOptions = RunOptions(),  # noqa: B008  frozen
    slurm: SlurmOptions = SlurmOptions(),  # noqa: B008  frozen
    out: Annotated[str | None, flag("DIR")] = None,
    extend: bool = False,
    track: Annotated[tuple[str, ...], flag("TRACKER")] = (),
) -> int:
    """Run or continue a study: train every arm on every seed, judge, report. Exit code 3: work is left.

    Example: h2h race --arms standard sharing:tie=kv ./mine.py:Mine --tokens 500k --out races/mine

    Args:
        study: study file, or a shipped study: h2h list studies (default: none)
        out: directory of runs and report (default: races/NAME or races/ARMS-on-DATASET)
        extend: continue the study in --out with other datasets, sizes or rules
        track: trackers that receive the metrics: tensorboard, wandb (default: none)
    """
    result = settings.study(study).run(out, extend=extend, track=track, slurm=slurm.job(), **run.arguments())
    if result.job is not None:
        for line in result.job.lines():
            say(line)
        return ExitCode.DONE
    if result.verdicts:
        show_result(result)
    return show_left(result.summary)
