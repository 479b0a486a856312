"""Forecasts of studies, and verdicts on runs trained elsewhere."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from headtohead.api.checked import checked
from headtohead.api.result import StudyResult, report_skipped
from headtohead.api.study import Study, open_study, processes, study_devices
from headtohead.common.errors import UserError, unknown
from headtohead.common.files import write_json
from headtohead.common.progress import progress_bar
from headtohead.study.config.folder import check_no_study, given_folder
from headtohead.study.judge.forecast import Forecast, forecast_plan, seen_spread
from headtohead.study.judge.runs_csv import Columns, Judged, judge_table
from headtohead.study.judge.schedule import Cluster
from headtohead.study.plan.execution import ExecutionSettings, current_device
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
        check_no_study(self.path, "the verdicts of a table")
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


@checked
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
    folder = Path(table).parent if out is None else given_folder(out)
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


@checked
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
    on: str = "local",
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpus_per_run: float | None = None,
    cpus_per_node: int | None = None,
    cpus_per_run: float | None = None,
    quiet: bool = False,
) -> Forecast:
    """Return the predicted cost and statistical power of a study; only a few steps per arm are run.

    `out` is a directory with finished runs of this study or another. Their results give the spread over seeds, their
    step times replace the measurement, and finished runs of this study are not counted again. `spread` is the standard
    deviation over seeds of the paired difference, in bits per byte or a task's metric.
    `on="ray"` forecasts the study on a cluster of `nodes` like this machine, or with `gpus_per_node` or `cpus_per_node`,
    of which each run reserves `gpus_per_run` and `cpus_per_run`. Nothing is started there: the devices of the cluster are
    assumed to be as fast as the one of this machine.
    """
    if spread is not None and not 0 < spread < math.inf:
        raise UserError(
            f"spread must be a number above 0, in bits per byte or a task's metric, got {spread!r}"
        )
    devices = study_devices(study.spec, device)
    chosen, count = devices[0], processes(devices, workers, threads)
    request = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "gpus_per_run": gpus_per_run,
        "cpus_per_node": cpus_per_node,
        "cpus_per_run": cpus_per_run,
    }
    given = {name: value for name, value in request.items() if value is not None}
    cluster = _cluster(on, given, devices, workers, threads)
    execution = ExecutionSettings(device=str(chosen), threads=threads)
    if chosen.type == "cpu":
        torch.set_num_threads(threads)
    folder = None if out is None else given_folder(out)
    source = "given" if spread is not None else ""
    if folder is not None and (folder / "study.json").is_file() and spread is None:
        spread = seen_spread(open_study(folder).verdicts)
        source = f"seen in {folder}" if spread is not None else ""
    trials: frozenset[str] = frozenset()
    with (
        current_device(chosen),
        progress_bar("forecasting", quiet) as progress,
        TemporaryDirectory() as scratch,
    ):
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
            trials = frozenset(tuning.runs)
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
            devices=min(count, len(devices)),
            cluster=cluster,
            tuning=trials,
            spread=spread,
            spread_source=source,
            keep_weights=keep_weights,
            progress=progress,
        )


def _cluster(
    on: str, given: dict[str, Any], devices: Sequence[torch.device], workers: int, threads: int
) -> Cluster | None:
    """Return the cluster to forecast for, or None for this machine; nodes are like this machine unless given."""
    if on not in ("local", "ray"):
        raise unknown("value for on", on, ("local", "ray"))
    if on == "local":
        if given:
            raise UserError(f"{', '.join(given)}: of a cluster only; add --on ray (on='ray')")
        return None
    if workers:
        raise UserError(
            f"workers={workers} counts processes of this machine; with --on ray, nodes and resources are given"
        )
    here = (
        {"cpus_per_node": os.cpu_count() or 1}
        if devices[0].type == "cpu"
        else {"gpus_per_node": len(devices)}
    )
    usual = {} if {"gpus_per_node", "cpus_per_node"} & given.keys() else here
    if "gpus_per_run" in given and not (usual | given).get("gpus_per_node"):
        raise UserError("gpus_per_run needs gpus_per_node: this machine has no GPU to count")
    return Cluster(**({"nodes": 1, "cpus_per_run": float(threads)} | usual | given))
