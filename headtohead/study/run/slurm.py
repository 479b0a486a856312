"""A study as a SLURM job array: every task of the array is one executor of the study in a shared directory.

`slurm/` in the study's directory holds what the tasks need:

study.toml  the settings of the study
job.sh      the script that sbatch takes
nonce       a random number, by which a task recognizes the directory
job_id      the job array submitted last
*.log       what the tasks print
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headtohead.common.errors import UnreadableFile, UserError
from headtohead.common.files import read_text, write_atomic
from headtohead.common.text import check_plain, counted

FOLDER = "slurm"
SHARED = "H2H_SHARED_DIR"
"""Environment variable: 1 says that the study's directory is shared although it does not look so."""
MAX_TASKS = 8
"""Array tasks by default; more only on request, because a cluster has other users."""

_MIN_SECONDS = 300.0
"""Shortest time limit of a job: a shorter one ends before a task has started and saved anything."""
_SIGNAL_SECONDS = 120
"""The signal comes this long before the time limit, which is far more than a checkpoint takes."""
_SPARE_SECONDS = 240.0
"""A task stops itself this long before the time limit: SLURM may signal a minute early, and a task starts slowly."""
_MOUNTS = Path("/proc/mounts")
_NODE_LOCAL = ("tmpfs", "ramfs", "devtmpfs", "overlay", "aufs", "squashfs", "rootfs")
_NODE_LOCAL_PATHS = ("/tmp", "/var/tmp", "/dev", "/run", "/proc", "/sys")
_DIRECTIVE = re.compile(r"[a-z][a-z0-9]+(-[a-z0-9]+)*")
_OURS = {
    "array": "--jobs sets the number of tasks",
    **dict.fromkeys(("requeue", "no-requeue", "signal"), "every task is signaled and requeued"),
    **dict.fromkeys(("output", "error", "open-mode"), "logs are written to slurm/ in the study's directory"),
    **dict.fromkeys(("chdir", "wrap"), "the tasks run in the current directory"),
    **dict.fromkeys(
        ("parsable", "test-only", "wait", "help", "usage", "version"), "it changes what sbatch prints"
    ),
}
"""Directives that the job depends on, and why they cannot be given."""
_GPU_DIRECTIVES = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_TIMES = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")

_BODY = r"""
if ! cd -- "$start"; then
    echo "h2h: $(hostname) has no $start, from which the job was written; it must be on a shared file system" >&2
    exit 2
fi
if [ "$(cat "$study/slurm/nonce" 2>/dev/null)" != "$nonce" ]; then
    echo "h2h: $study on $(hostname) is not the directory that this job was written in; it must be on a shared file system" >&2
    exit 2
fi
echo "$SLURM_ARRAY_JOB_ID" > "$study/slurm/job_id"
task=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}
stalled=$study/slurm/$task.stalled

progress() {  # changes with every saved checkpoint, probe, result and plan
    { find "$study/runs" -name 'step-*' -o -name result.json -o -path '*/probes/*.json' 2>/dev/null | LC_ALL=C sort
      cat "$study/study.lock.json" 2>/dev/null; } | cksum
}

child= stopping= interrupted=
stop() {  # bash runs this between two commands; it also ends `wait` early
    interrupted=yes
    [ -n "$stopping" ] || [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
    stopping=yes
}
trap stop TERM

before=$(progress)
race &
child=$!
[ -z "$stopping" ] || kill -TERM "$child" 2>/dev/null
interrupted=yes
while [ -n "$interrupted" ]; do
    interrupted=
    wait "$child"
    code=$?
done

# Stopped before it could handle the signal: nothing is lost.
[ -n "$stopping" ] && [ "$code" -eq 143 ] && code=3
if [ "$code" -ne 3 ]; then
    rm -f "$stalled"
    exit "$code"
fi
case $(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null) in
    CANCELLED|COMPLETING)
        echo "h2h: SLURM has ended task $task; its work is saved" >&2
        exit 3 ;;
esac
if [ "$(progress)" != "$before" ]; then
    rm -f "$stalled"
else
    echo stalled >> "$stalled"
    if [ "$(wc -l < "$stalled")" -ge 3 ]; then
        rm -f "$stalled"
        echo "h2h: three starts in a row saved nothing, so task $task is not requeued; give the job more time: --sbatch time=HH:MM:SS" >&2
        exit 1
    fi
fi
if ! scontrol requeue "$task"; then
    echo "h2h: task $task was not requeued; continue with: sbatch $study/slurm/job.sh" >&2
    exit 3
fi
"""


@dataclass(frozen=True)
class SlurmJob:
    """How a study is run by SLURM."""

    jobs: int = 0
    """Tasks of the job array; 0: one for each run or population left, at most 8."""
    sbatch: Sequence[str] = ()
    """Further directives, such as `partition=gpu`, `time=8:00:00` or `exclusive`."""
    submit: bool = False
    """Whether to submit the script with sbatch."""

    def __post_init__(self) -> None:
        if self.jobs < 0:
            raise UserError(
                f"jobs={self.jobs} must be 0 (one for each run left, at most {MAX_TASKS}) or more"
            )
        given = [self.sbatch] if isinstance(self.sbatch, str) else self.sbatch
        object.__setattr__(self, "sbatch", tuple(given))
        names = [text.partition("=")[0] for text in self.sbatch]
        for name, text in zip(names, self.sbatch, strict=True):
            _check_directive(text)
            if names.count(name) > 1:
                raise UserError(f"--sbatch {name} is given twice")
        limit = self.seconds
        if limit < _MIN_SECONDS:
            raise UserError(
                f"--sbatch time={self.value('time')}: a task needs at least {_MIN_SECONDS / 60:.0f} minutes, because "
                f"it is stopped {_SPARE_SECONDS / 60:.0f} minutes before the limit"
            )

    def value(self, name: str) -> str | None:
        """Return the value of a directive, or None if it is not given."""
        return next((text.partition("=")[2] for text in self.sbatch if text.partition("=")[0] == name), None)

    @property
    def seconds(self) -> float:
        """The time limit of the job; infinity if none is given."""
        given = self.value("time")
        return math.inf if given is None else slurm_seconds(given)

    @property
    def task_seconds(self) -> float:
        """The time after which a task stops itself."""
        return self.seconds - _SPARE_SECONDS


def _check_directive(text: str) -> None:
    """Raise UserError for a directive that is not KEY=VALUE or KEY, or that the job sets itself."""
    name, sign, value = check_plain(text, "--sbatch").partition("=")
    if not _DIRECTIVE.fullmatch(name):
        raise UserError(
            f"--sbatch takes KEY=VALUE with the long name of an option of sbatch, such as partition=gpu, got '{text}'"
        )
    if name in _OURS:
        raise UserError(f"--sbatch {name} cannot be given: {_OURS[name]}")
    if sign and (not value.strip() or value.startswith("-") or "\\" in value):
        raise UserError(
            f"--sbatch {name} takes a value without a leading '-' and without '\\', got '{value}'"
        )


def check_submittable(job: SlurmJob) -> None:
    """Raise UserError if a job is to be submitted from a machine without sbatch."""
    if job.submit and shutil.which("sbatch") is None:
        raise UserError(
            "--submit needs sbatch, which is not installed here; without --submit the job is only written"
        )


def slurm_seconds(text: str) -> float:
    """Return a time limit in the formats of SLURM in seconds."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    match = _TIME.fullmatch(text)
    if not match:
        raise UserError(f"--sbatch time takes {_TIMES}, got '{text}'")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None:  # D-HH[:MM[:SS]]
        return 86400.0 * days + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)
    if third is not None:  # HH:MM:SS
        return 3600.0 * (first or 0) + 60 * (second or 0) + third
    return 60.0 * (first or 0) + (second or 0)


def check_shared(folder: Path) -> None:
    """Raise UserError if a study's directory is on storage that only this machine has.

    A local disk may be one that the head node of a small cluster exports, so it is accepted; each task compares the nonce.
    """
    place = folder.resolve()
    if os.environ.get(SHARED) == "1":
        return
    kind = _file_system(place)
    local = next((top for top in _NODE_LOCAL_PATHS if place.is_relative_to(top)), "")
    if kind not in _NODE_LOCAL and not local:
        return
    why = f"file system {kind}" if kind in _NODE_LOCAL else f"below {local}"
    raise UserError(
        f"--on slurm needs a directory that all nodes share, and {place} is on this machine only ({why}); give "
        f"another one with --out, or set {SHARED}=1 if it is shared"
    )


def _file_system(place: Path) -> str:
    """Return the type of the file system of a path, as /proc/mounts names it; empty where that is unknown."""
    try:
        rows = [line.split() for line in _MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    found, kind = Path("/"), ""
    for row in rows:
        # Spaces and the like in a mount point are octal escapes; a later mount covers an earlier one.
        top = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), row[1]))
        if place.is_relative_to(top) and len(top.parts) >= len(found.parts):
            found, kind = top, row[2]
    return kind


@dataclass(frozen=True)
class TaskResources:
    """What one task of the array asks for."""

    cpus: int
    gpus: int

    @classmethod
    def of_runs(cls, runs: int, cpus_per_run: float, gpus_per_run: float) -> TaskResources:
        """Return the resources of a task that trains `runs` runs at the same time."""
        for name, value in (("cpus_per_run", cpus_per_run), ("gpus_per_run", gpus_per_run)):
            if not 0 <= value < math.inf:
                raise UserError(f"{name}={value} must be a number from 0 up")
        return cls(max(1, math.ceil(runs * cpus_per_run)), math.ceil(runs * gpus_per_run))

    def __str__(self) -> str:
        return counted(self.cpus, "CPU") + (f" and {counted(self.gpus, 'GPU')}" if self.gpus else "")


@dataclass(frozen=True)
class WrittenJob:
    """A job array that was written for a study, and submitted if `id` is not empty."""

    study: Path
    script: Path
    tasks: int
    resources: TaskResources
    earlier: str = ""
    """What to know about a job array submitted earlier."""
    id: str = ""

    def lines(self) -> list[str]:
        """Return what was written and what to type next."""
        script = shlex.quote(str(self.script))
        watch = f"watch:    h2h watch {shlex.quote(str(self.study))}"
        logs = f"logs:     {self.script.parent}/{self.id or 'JOB'}_*.log"
        written = f"written:  {self.script}: {counted(self.tasks, 'array task')}, {self.resources} each"
        if not self.id:
            next_step = [f"submit:   sbatch {script}"]
        else:
            next_step = [
                f"job:      {self.id}; squeue -j {self.id} lists its tasks, scancel {self.id} ends them"
            ]
        resume = f"continue: sbatch {script}, if tasks ended with work left; finished runs are kept"
        return [*([self.earlier] if self.earlier else []), written, *next_step, watch, logs, resume]

    def submitted(self) -> WrittenJob:
        """Return this job, submitted with sbatch."""
        done = subprocess.run(
            ["sbatch", "--parsable", str(self.script)], capture_output=True, text=True, check=False
        )
        number = done.stdout.strip().partition(";")[0]
        if done.returncode or not number.isdigit():
            lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            raise UserError(f"sbatch rejected {self.script}: {lines[-1].strip() if lines else 'no message'}")
        write_atomic(self.script.parent / "job_id", f"{number}\n")
        return dataclasses.replace(self, id=number)


def write_job(
    study: Path,
    settings: str,
    options: Sequence[str],
    job: SlurmJob,
    tasks: int,
    resources: TaskResources,
) -> WrittenJob:
    """Write `slurm/` in the study's directory; `settings` is a study file and `options` are those of `h2h race`."""
    folder = study.resolve() / FOLDER
    for path in (folder, Path.cwd()):
        if "\\" in check_plain(str(path), "the path of the study"):
            raise UserError(f"{path}: sbatch does not take a path with '\\'")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    earlier = _earlier_job(folder)
    script = folder / "job.sh"
    write_atomic(folder / "study.toml", settings)
    command = [sys.executable, "-m", "headtohead", "race", str(folder / "study.toml")]
    text = _script(study.resolve(), _nonce(folder), [*command, *options], job, tasks, resources)
    write_atomic(script, text)
    return WrittenJob(study, script, tasks, resources, earlier)


def _nonce(folder: Path) -> str:
    """Return the number that marks the directory; it stays, because tasks submitted earlier expect it."""
    with suppress(UnreadableFile):
        if re.fullmatch("[0-9a-f]{32}", found := read_text(folder / "nonce", 1024).strip()):
            return found
    nonce = secrets.token_hex(16)
    write_atomic(folder / "nonce", f"{nonce}\n")
    return nonce


def _earlier_job(folder: Path) -> str:
    """Return a line about a job array submitted earlier, unless SLURM no longer has it."""
    try:
        number = read_text(folder / "job_id", 1024).strip()
    except UnreadableFile:
        return ""
    if not number.isdigit():
        return ""
    running = "may still be in the queue"
    with suppress(OSError):
        done = subprocess.run(["squeue", "-h", "-j", number], capture_output=True, text=True, check=False)
        if not done.stdout.strip() and (done.returncode == 0 or "Invalid job id" in done.stderr):
            return ""
        running = "is still in the queue" if done.stdout.strip() else running
    return f"job {number}, submitted earlier, {running}: its tasks would share the work; scancel {number} ends it"


def _script(
    study: Path,
    nonce: str,
    command: Sequence[str],
    job: SlurmJob,
    tasks: int,
    resources: TaskResources,
) -> str:
    """Return the text of job.sh."""
    given = {text.partition("=")[0] for text in job.sbatch}
    log = str(study / FOLDER).replace("%", "%%")
    directives = [
        f"array=0-{tasks - 1}",
        f"output={log}/%A_%a.log",
        f"chdir={Path.cwd()}",
        "open-mode=append",
        "requeue",
        f"signal=B:TERM@{_SIGNAL_SECONDS}",
    ]
    if "job-name" not in given:
        directives.append(f"job-name=h2h-{re.sub(r'[^A-Za-z0-9_.]+', '-', study.name)[:60]}")
    if "cpus-per-task" not in given:
        directives.append(f"cpus-per-task={resources.cpus}")
    if resources.gpus and not given & set(_GPU_DIRECTIVES):
        directives.append(f"gres=gpu:{resources.gpus}")
    cache = os.environ.get("H2H_CACHE")
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {_directive(text)}" for text in (*directives, *job.sbatch)),
            "",
            "# Written by h2h race --on slurm, which overwrites changes.",
            f"study={shlex.quote(str(study))}",
            f"start={shlex.quote(str(Path.cwd()))}",
            f"nonce={nonce}",
            *([f"export H2H_CACHE={shlex.quote(str(Path(cache).resolve()))}"] if cache else []),
            "race() {",
            f"    exec {shlex.join(command)}",
            "}",
            _BODY,
        ]
    )


def _directive(text: str) -> str:
    name, sign, value = text.partition("=")
    return f"--{name}{sign}{shlex.quote(value) if value else ''}"
