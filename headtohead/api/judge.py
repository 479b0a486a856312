"""Forecasts of studies, and verdicts on runs trained elsewhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from headtohead.api.result import StudyResult, report_skipped
from headtohead.api.study import Study, open_study, processes
from headtohead.common.errors import UserError, unknown
from headtohead.common.files import write_json
from headtohead.common.progress import progress_bar
from headtohead.study.environment import choose_device
from headtohead.study.judge.forecast import Forecast, forecast_plan, seen_spread
from headtohead.study.judge.runs_csv import Columns, Judged, judge_table
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.planner import plan_study
from headtohead.study.plan.population import TUNING, PopulationPolicy
from headtohead.study.plan.step_timing import FrozenStepTimes
from headtohead.study.plan.tuning import grid_spec
from headtohead.study.store.frozen import read_lock, write_lock
from headtohead.study.store.run_store import Store


@dataclass
class TableResult(StudyResult):
    """The verdicts of a table of runs trained elsewhere."""

    judged: Judged | None = None
    source: str = ""
    """The table's file name."""

    def write(self, quiet: bool = False, only_if_changed: bool = False) -> None:
        """Write verdicts.json and the page into `path`."""
        assert self.judged is not None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "verdicts.json", [row.as_dict() for row in self.verdicts])
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None
        try:
            from headtohead.report.judge_page import write_judged
        except ImportError as error:
            report_skipped(error, quiet)
            return
        self.report = write_judged(self.path, self.judged, self.source)


def judge(
    table: str | Path,
    *,
    arm: str,
    seed: str,
    metric: str,
    by: Sequence[str] | None = None,
    baseline: str = "",
    primary: str = "",
    margin: float | None = None,
    better: Literal["lower", "higher"] = "lower",
    out: str | Path | None = None,
) -> TableResult:
    """Return the verdicts of runs trained elsewhere, from a CSV file with one row per run and the names of its columns.

    `by` names the columns that define contests; verdicts.json and the page are written to `out`.
    """
    if better not in ("lower", "higher"):
        raise unknown("value for better", str(better), ("lower", "higher"))
    if margin is not None and not 0 <= margin < math.inf:
        raise UserError(f"margin must be a number of 0 or more, got {margin!r}")
    columns = Columns(arm, seed, metric, None if by is None else tuple(by))
    judged = judge_table(
        Path(table), columns, baseline=baseline, primary=primary, margin=margin, better=better
    )
    folder = Path(out) if out is not None else Path(table).parent
    result = TableResult(
        folder,
        judged.manifest,
        judged.verdicts,
        results=judged.results,
        judged=judged,
        source=Path(table).name,
    )
    if out is not None:
        result.write()
    return result


def forecast(
    study: Study,
    out: str | Path | None = None,
    *,
    spread: float | None = None,
    device: str = "auto",
    workers: int = 0,
    threads: int = 1,
    data_dir: str | Path | None = None,
    keep_weights: bool = True,
    quiet: bool = False,
) -> Forecast:
    """Return the predicted cost and statistical power of a study; only a few steps per arm are run.

    `out` is a directory with finished runs of this study or another. Their results give the spread over seeds, their
    step times replace the measurement, and finished runs of this study are not counted again. `spread` is the standard
    deviation over seeds of the paired difference, in bits per byte or a task's metric.
    """
    if spread is not None and not 0 < spread < math.inf:
        raise UserError(
            f"spread must be a number above 0, in bits per byte or a task's metric, got {spread!r}"
        )
    chosen = choose_device(device)
    execution = ExecutionSettings(device=str(chosen), threads=threads)
    if chosen.type == "cpu":
        torch.set_num_threads(threads)
    folder = Path(out) if out is not None else None
    source = "given" if spread is not None else ""
    if folder is not None and (folder / "study.json").is_file() and spread is None:
        spread = seen_spread(open_study(folder).verdicts)
        source = f"seen in {folder}" if spread is not None else ""
    count = processes(chosen, workers, threads)
    with progress_bar("forecasting", quiet) as progress, TemporaryDirectory() as scratch:
        lock = read_lock(folder) if folder is not None else None
        # A forecast uses the study's frozen step times but does not store new ones.
        if lock is not None:
            write_lock(Path(scratch), lock)
        step_times = FrozenStepTimes(Path(scratch), execution, progress=progress)
        plan = plan_study(
            study.spec,
            data_dir=data_dir,
            progress=progress,
            step_times=step_times,
            in_population=PopulationPolicy(None, execution, lock),
        )
        if study.spec.tune is not None:
            tried = grid_spec(study.spec, study.spec.tune.lr)
            tuning = plan_study(
                tried,
                data_dir=data_dir,
                progress=progress,
                in_population=PopulationPolicy(None, execution, lock, TUNING),
            )
            plan = dataclasses.replace(
                plan,
                runs=tuning.runs | plan.runs,
                entries=(*tuning.entries, *plan.entries),
                layers=tuning.layers | plan.layers,
            )
        return forecast_plan(
            plan,
            store=Store(folder) if folder is not None else None,
            device=chosen,
            workers=count,
            spread=spread,
            spread_source=source,
            keep_weights=keep_weights,
            progress=progress,
        )
