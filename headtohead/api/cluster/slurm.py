"""Write, and submit, the SLURM job array of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headtohead.api.result import StudyResult
from headtohead.api.runner import RunSettings, StudyRunner
from headtohead.common.errors import UserError
from headtohead.integrations.sinks import Sink
from headtohead.study.config.toml_text import toml_text
from headtohead.study.environment import choose_device
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.run.execute import Summary
from headtohead.study.run.slurm import MAX_TASKS, SlurmJob, TaskResources, write_job


@dataclass(frozen=True)
class JobRequest:
    """What the tasks of a job array are given, as in the call of `Study.run`."""

    job: SlurmJob
    device: str
    workers: int
    cpus_per_run: float | None
    gpus_per_run: float | None
    seconds: float
    """Time limit."""
    extend: bool
    track: str | Sink | Sequence[str | Sink]


def write_study_job(runner: StudyRunner, settings: dict[str, Any], given: JobRequest) -> StudyResult:
    """Write, and submit if asked to, the job array of what is left; a study with nothing left is judged at once.

    `settings` are those of the study, as its file holds them.
    """
    execution, job = runner.execution, given.job
    if execution.save_every != ExecutionSettings().save_every:
        raise UserError("save_every does not apply to --on slurm; its tasks save every minute")
    on_gpu = torch.device(execution.device).type == "cuda"
    at_once = max(1, given.workers // execution.threads)
    resources = TaskResources.of_runs(
        at_once,
        execution.threads if given.cpus_per_run is None else given.cpus_per_run,
        float(on_gpu or given.device.startswith("cuda"))
        if given.gpus_per_run is None
        else given.gpus_per_run,
    )
    options = ["--device", given.device, "--workers", str(max(1, given.workers))]
    options += [*_race_options(execution, runner.how), *(["--extend"] if given.extend else [])]
    options += _tracker_options(given.track)
    text = toml_text(settings)
    preview = runner.preview()
    timed = any(length.startswith("time") for length in runner.spec.lengths)
    if not preview.left and not timed:
        return runner.run()
    tasks = job.jobs or max(1, min(MAX_TASKS, math.ceil(preview.passes / at_once)))
    if on_gpu == bool(resources.gpus):
        runner.note_forecast(preview, tasks * at_once)
    if (seconds := min(given.seconds, job.task_seconds)) < math.inf:
        options += ["--time-limit", f"{seconds:.0f}s"]
    folder = runner.store.path
    written = write_job(folder, text, ["--out", str(folder.resolve()), *options], job, tasks, resources)
    left = Summary(left=len(preview.left))
    job_written = written.submitted() if job.submit else written
    return StudyResult(folder, preview.plan.manifest, [], left, job=job_written)


def planning_device(given: str) -> torch.device:
    """Return the device to plan on for machines that train on `given`: the CPU if this machine has no GPU."""
    kind = given.partition(":")[0]
    return choose_device("cpu" if kind == "cuda" and not torch.cuda.is_available() else given)


def _switch(name: str, value: bool | None) -> list[str]:
    """Return a switch as words of the command line."""
    return [] if value is None else [f"--{name}" if value else f"--no-{name}"]


def _race_options(execution: ExecutionSettings, how: RunSettings) -> list[str]:
    """Return the options of `h2h race` for these settings; failed runs are reset once, not by every task."""
    return [
        *("--threads", str(execution.threads)),
        *(["--data-dir", execution.data_dir] if execution.data_dir else []),
        *([] if execution.keep_weights else ["--no-keep-weights"]),
        *_switch("compile", execution.compile),
        *_switch("population", how.population),
        *(["--allow-failed-check"] if how.allow_failed_check else []),
        *(["--reuse", *(str(source.store.path) for source in how.reuse)] if how.reuse else []),
        *(["--quiet"] if how.quiet else []),
    ]


def _tracker_options(track: str | Sink | Sequence[str | Sink]) -> list[str]:
    """Return trackers as words of the command line; raise UserError for one that is not given by name."""
    given = [track] if isinstance(track, str) or not isinstance(track, Sequence) else list(track)
    for one in given:
        if not isinstance(one, str):
            raise UserError(f"--on slurm takes trackers by name, got {one!r}")
    return ["--track", *map(str, given)] if given else []
