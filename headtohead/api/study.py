"""Run, open, watch and examine studies."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch

from headtohead.api.checked import checked
from headtohead.api.cluster import check_backend
from headtohead.api.cluster.ray import ray_cluster
from headtohead.api.cluster.slurm import JobRequest, planning_device, write_study_job
from headtohead.api.result import StudyResult, judge_study
from headtohead.api.runner import RunSettings, StudyRunner
from headtohead.common.deprecation import old_names
from headtohead.common.errors import MissingFile, UserError
from headtohead.common.numbers import parse_duration
from headtohead.common.progress import progress_bar
from headtohead.common.terminal import say
from headtohead.common.text import check_plain
from headtohead.integrations.sinks import Sink, find_sinks
from headtohead.mechanisms.contract.score import Score
from headtohead.study.config.folder import check_same_study, default_folder, given_folder
from headtohead.study.config.settings import Arms, StudySettings
from headtohead.study.config.shipped import find_study
from headtohead.study.config.spec import (
    StudySpec,
    build_study,
    changed_settings,
    read_study,
    with_stored_names,
)
from headtohead.study.environment import check_one_type, choose_devices
from headtohead.study.plan.execution import ExecutionSettings, current_device
from headtohead.study.run.slurm import SlurmJob, check_shared, check_submittable
from headtohead.study.store import doctor
from headtohead.study.store.copies import Source
from headtohead.study.store.doctor import Finding
from headtohead.study.store.manifest import read_manifest
from headtohead.study.store.run_store import Store


class Study:
    """Arms x seeds x datasets x sizes x rules; `run` does the missing runs and returns the verdicts.

    >>> Study(arms=["standard", "sharing:tie=kv"], tokens="500k").run(out="races/mine").verdicts
    """

    def __init__(self, arms: Arms | None = None, **settings: Unpack[StudySettings]) -> None:
        """`settings` are those that `h2h settings` lists."""
        if isinstance(arms, set | frozenset):
            raise UserError("arms is a set, which has no order; give a list: its first arm is the baseline")
        given = list(arms) if isinstance(arms, Iterable) and not isinstance(arms, str | Mapping) else arms
        self.values: dict[str, Any] = with_stored_names(
            dict(settings) | ({} if given is None else {"arms": given})
        )
        self.spec: StudySpec = build_study(self.values)
        self.planned_with: Sequence[Source] = ()
        """Studies planned together with this one, such as those of a paper; their finished runs are copied."""

    def __repr__(self) -> str:
        spec, seeds = self.spec, f"{len(self.spec.seeds)} seed{'s' if len(self.spec.seeds) > 1 else ''}"
        parts = ([arm.label for arm in spec.arms], spec.tasks or spec.corpora, spec.sizes)
        arms, data, sizes = (", ".join(part[:4]) + (", ..." if len(part) > 4 else "") for part in parts)
        return f"Study({spec.name!r}: {arms}; {seeds}; {data}; {sizes})"

    @classmethod
    @checked
    def from_file(cls, path: str | Path, arms: Arms | None = None, **changes: Unpack[StudySettings]) -> Study:
        """Return the study of a TOML file, or a shipped one by name; `arms` and `changes` override its settings."""
        file = find_study(path)
        own = {} if arms is None else {"arms": arms}
        return cls(**{"name": file.stem, **changed_settings(read_study(file), {**changes, **own})})

    @old_names(seconds="time_limit", stack="population")
    @checked
    def run(
        self,
        out: str | Path | None = None,
        *,
        device: str = "auto",
        workers: int = 0,
        threads: int = 1,
        data_dir: str | Path | None = None,
        time_limit: float | str = math.inf,
        retry_failed: bool = False,
        keep_weights: bool = True,
        save_every: float = 60.0,
        compile: bool | None = None,
        population: bool | None = None,
        quiet: bool = False,
        track: str | Sink | Sequence[str | Sink] = (),
        extend: bool = False,
        allow_failed_check: bool = False,
        reuse: str | Path | Sequence[str | Path] = (),
        on: Literal["local", "ray", "slurm"] = "local",
        cpus_per_run: float | None = None,
        gpus_per_run: float | None = None,
        slurm: SlurmJob | None = None,
    ) -> StudyResult:
        """Run everything that has no result yet, then judge and write the report.

        `device="cuda"`, and `auto` if there is a GPU, uses all GPUs of this machine, `cuda:1` only that one.
        `workers=0` means one process per core on CPU and one per GPU; more are distributed over the GPUs. `time_limit`
        saves and stops after seconds, or a time such as `8m`.
        `compile=None` compiles single runs on a GPU from size 5m. Populations are compiled on request.
        `population` trains the seeds of an arm, and the rates of a tuning, in one pass; None does so on a GPU where that is
        faster, which is measured once. A study continues the way it was started.
        `track` is a tracker or the names of trackers (`tensorboard`, `wandb`); a failing tracker never fails a run.
        `extend` continues a study in `out` with other datasets, sizes or rules, which is rejected otherwise.
        `allow_failed_check` trains user code that fails the causality check; its verdict is never `better`.
        `reuse` are directories of other studies: their finished runs are copied instead of trained again.
        `on="ray"` executes the runs on the Ray cluster at RAY_ADDRESS, or on a Ray started here. `on="slurm"` checks and
        plans the study, writes a job array for it as `slurm` says and returns without verdicts; `job` of the result is
        what was written. `cpus_per_run` (default: `threads`) and `gpus_per_run` (default: 1 on GPUs) are what each run
        or population gets there.
        """
        check_backend(on, workers, cpus_per_run, gpus_per_run, slurm)
        store = Store(default_folder(self.spec) if out is None else given_folder(out))
        if on == "slurm":
            check_shared(store.path)
            check_submittable(slurm or SlurmJob())
        if not extend:
            check_same_study(store.path, self.spec)
        limit = parse_duration(time_limit)
        devices = study_devices(self.spec, device) if on == "local" else (planning_device(device),)
        count = processes(devices, workers, threads)
        used = tuple(map(str, devices[:count]))
        execution = ExecutionSettings(
            device=used[0],
            devices=used if len(used) > 1 else (),
            threads=threads,
            data_dir=str(Path(data_dir).resolve()) if data_dir else os.environ.get("H2H_DATA", ""),
            save_every=save_every,
            keep_weights=keep_weights,
            compile=compile,
            log_circuits=self.spec.log_circuits,
        )
        how = RunSettings(
            workers=count,
            deadline=time.monotonic() + limit,
            retry_failed=retry_failed,
            population=population,
            quiet=quiet,
            sinks=find_sinks(track),
            allow_failed_check=allow_failed_check,
            reuse=(*self.planned_with, *(Source(store) for store in _stores(reuse))),
        )
        values = plain(self.values)
        if on == "local":
            with current_device(devices[0]):
                return StudyRunner(self.spec, values, store, execution, how).run()
        if on == "slurm":
            runner = StudyRunner(self.spec, values, store, execution, how)
            request = JobRequest(
                slurm or SlurmJob(), device, workers, cpus_per_run, gpus_per_run, limit, extend, track
            )
            return write_study_job(runner, self.portable_values(), request)
        with ray_cluster(self.spec, execution, device, cpus_per_run, gpus_per_run, quiet) as cluster:
            how = dataclasses.replace(
                how, workers=cluster.slots, engine=cluster.engine, planning=cluster.planning
            )
            return StudyRunner(self.spec, values, store, cluster.execution, how).run()

    def portable_values(self) -> dict[str, Any]:
        """Return the settings as a study file holds them; raise UserError for an arm that no file contains."""
        given = self.values["arms"]
        arms = []
        for one, arm in zip(given if isinstance(given, list) else [given], self.spec.arms, strict=True):
            if not arm.layout.portable:
                raise UserError(
                    f"arm '{arm.label}' is a class that no file contains; save it as mine.py and give ./mine.py:{arm.label}"
                )
            table = isinstance(one, Mapping)
            arms.append({**one, "arm": arm.text} if table else one if isinstance(one, str) else arm.text)
        settings: dict[str, Any] = plain({**self.values, "arms": arms})
        return settings


def study_devices(spec: StudySpec, given: str) -> tuple[torch.device, ...]:
    """Return the devices that train a study; those of a study under length=time are of one type."""
    devices = choose_devices(given)
    if any(length.startswith("time") for length in spec.lengths):
        check_one_type(devices)
    return devices


def processes(devices: Sequence[torch.device], workers: int, threads: int = 1) -> int:
    """Return the number of training processes: `workers`, or one per GPU; on CPU `workers`, or the cores, over `threads`."""
    if workers < 0:
        raise UserError(f"workers={workers} must be 0 (one per core on CPU, one per GPU) or more")
    if devices[0].type != "cpu":
        return workers or len(devices)
    return max(1, (workers or os.cpu_count() or 1) // max(1, threads))  # ExecutionSettings checks threads


@checked
def open_study(path: str | Path) -> StudyResult:
    """Return a finished study's result, read from its directory."""
    folder = Path(path)
    try:
        manifest, added = read_manifest(folder / "study.json")
    except MissingFile:
        raise UserError(f"no study in {folder}: study.json is missing") from None
    return judge_study(Store(folder), manifest, added, {})


@checked
def watch_study(path: str | Path, *, port: int = 8642, quiet: bool = False) -> None:
    """Serve a live page of a running study on 127.0.0.1 until Ctrl-C; a study that has not begun is waited for."""
    if not 0 <= port <= 65535:
        raise UserError(f"port {port} is out of range; allowed: 0 to 65535, where 0 picks a free port")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; a study is a directory")
    try:
        from headtohead.report.dashboard.server import serve
    except ImportError as error:
        raise UserError(f"watching needs {error.name}: pip install altair vl-convert-python jinja2") from None
    serve(folder, port, (lambda text: None) if quiet else (lambda text: say(text, flush=True)))


@checked
def examine_study(path: str | Path, *, repair: bool = False, quiet: bool = False) -> list[Finding]:
    """Return what is damaged in a study's directory; `repair` repairs what is safe to repair."""
    with progress_bar("examining", quiet) as progress:
        findings = doctor.examine(Path(path), progress)
    if repair:
        doctor.repair(findings)
    return findings


def _stores(folders: str | Path | Sequence[str | Path]) -> tuple[Store, ...]:
    """Return the stores of existing study directories."""
    given = [folders] if isinstance(folders, str | Path) else folders
    if "" in given:
        raise UserError("reuse: the name of a directory is empty")
    paths = [Path(check_plain(str(folder), "reuse")).resolve() for folder in given]
    for path in paths:
        if not (path / "runs").is_dir():
            raise MissingFile(f"reuse: {path} is not the directory of a study: it has no runs")
    return tuple(map(Store, paths))


def plain(value: Any) -> Any:
    """Return settings as JSON-ready values; a class or score function given as an arm becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    return value.name if isinstance(value, Score) else getattr(value, "__name__", str(value))
