"""Options that several commands share, and how command-line values become settings of a study."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from headtohead.api import SlurmJob, Study
from headtohead.common.errors import UserError
from headtohead.common.numbers import parse_count, parse_duration, parse_number


@dataclass(frozen=True)
class flag:
    """The annotation of an option: how its value is shown, and its name if it differs from the parameter's."""

    metavar: str = ""
    name: str = ""
    positional: bool = False
    """Given without its name although it is a field of a dataclass."""
    may_be_empty: bool = False
    """Whether a list without values means something."""


Switch = Literal["auto", "on", "off"]
"""An option given as --NAME or --no-NAME; `auto` when neither is given."""

RunArgument = Annotated[str, flag("RUN")]
RunArguments = Annotated[tuple[str, ...], flag("RUN")]
DataDirectory = Annotated[str | None, flag("DIR")]
Device = Annotated[str, flag("auto|cpu|cuda")]
Json = Annotated[bool, flag(name="json")]


def switched(value: Switch) -> bool | None:
    """Return True for on, False for off, None for auto."""
    return {"auto": None, "on": True, "off": False}[value]


def seconds_of(time_limit: str | None) -> float:
    """Return a time limit in seconds; infinity without one."""
    return math.inf if time_limit is None else parse_duration(time_limit)


@dataclass(frozen=True)
class StudyOptions:
    """The settings of a study.

    Args:
        arms: mechanisms with options, layouts, or FILE.py (default: study file)
        corpus: stdlib, a path or a named corpus, see h2h data list (default: stdlib)
        tasks: tasks instead of a corpus, one contest each: recall:pairs=16 (default: none)
        init_from: run, as STUDY/ARM/SEED, whose weights a task starts from (default: none)
        size: model shapes, see h2h list sizes (default: nano)
        tokens: training tokens per run: 120k, 65M (default: by size, 500k at nano)
        seeds: number of paired seeds, or a list of seeds (default: 5)
        baseline: arm that the others are compared with (default: the first)
        primary: arm of the planned comparison (default: the first other arm)
        shape: held equal in the model: as_is, params, cache (default: as_is)
        length: held equal in training: tokens, flops, time, time_plain (default: tokens)
        margin: largest difference that counts as none (default: 0.005 bits per byte)
        batch: tokens per step (default: by size)
        lr: peak learning rate; --lr.qk 30x: ratio of a circuit (default: by size)
        context: context lengths in tokens, one contest each (default: by size)
        branches: token counts to decay at, from one trunk per arm and seed (default: none)
        tokenizer: bytes, bpe:VOCABULARY or file:TOKENIZER.json (default: by size)
        precision: arithmetic of training (default: float32)
        probes: measurements on each trained run, see h2h list probes (default: none)
        set: other settings, see h2h settings: warmup=0.05, model.bias=all (default: none)
    """

    heading: ClassVar[str] = "Study settings"
    arms: Annotated[tuple[str, ...], flag("ARM")] = ()
    corpus: Annotated[tuple[str, ...], flag("NAME")] = ()
    tasks: Annotated[tuple[str, ...], flag("TASK")] = ()
    init_from: Annotated[str | None, flag("RUN")] = None
    size: Annotated[tuple[str, ...], flag("NAME")] = ()
    tokens: Annotated[str | None, flag("COUNT")] = None
    seeds: Annotated[str | None, flag("COUNT|A,B,...")] = None
    baseline: Annotated[str | None, flag("ARM")] = None
    primary: Annotated[str | None, flag("ARM")] = None
    shape: Annotated[tuple[str, ...], flag("RULE")] = ()
    length: Annotated[tuple[str, ...], flag("RULE")] = ()
    margin: Annotated[float | None, flag("NUMBER")] = None
    batch: Annotated[str | None, flag("COUNT")] = None
    lr: Annotated[float | None, flag("RATE")] = None
    context: Annotated[tuple[str, ...], flag("COUNT")] = ()
    branches: Annotated[tuple[str, ...], flag("COUNT")] = ()
    tokenizer: Annotated[str | None, flag("NAME")] = None
    precision: Annotated[str | None, flag("float32|bf16")] = None
    probes: Annotated[tuple[str, ...], flag("PROBE")] = ()
    set: Annotated[tuple[str, ...], flag("KEY=VALUE")] = ()

    def study(self, file: str | None) -> Study:
        """Return the study of a file with these settings in place of its own, or of these settings alone."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changes: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if value not in (None, ()) and name not in ("set", "init_from")
        }
        if self.init_from is not None:
            changes["from"] = self.init_from
        if self.seeds is not None:
            changes["seeds"] = _seeds(self.seeds)
        for name in ("tokens", "batch"):
            if name in changes:
                changes[name] = parse_count(changes[name], f"--{name}")
        for name in ("context", "branches"):
            if name in changes:
                changes[name] = [parse_count(count, f"--{name}") for count in changes[name]]
        for text in self.set:
            _set(changes, text)
        return Study.from_file(file, **changes) if file else Study(**changes)


@dataclass(frozen=True)
class ModelOptions:
    """Options of commands that load a trained run.

    Args:
        device: where to run
        trust_files: execute the mechanism file that a run names
    """

    heading: ClassVar[str] = ""
    device: Device = "auto"
    trust_files: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return these options as keyword arguments of the API."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class ScoringOptions(ModelOptions):
    """Options of commands that also read data.

    Args:
        data_dir: directory of the named corpora and tasks (default: $H2H_DATA)
    """

    data_dir: DataDirectory = None


@dataclass(frozen=True)
class DeviceOptions:
    """Where and how runs are trained.

    Args:
        device: where to train; cuda: on all GPUs, cuda:1: on that one
        workers: runs at the same time; 0: one per CPU core, one per GPU
        threads: CPU threads per run; the number changes the last digits
        data_dir: directory of the named corpora and tasks (default: $H2H_DATA)
        keep_weights: delete the weights of finished runs (default: keep)
    """

    heading: ClassVar[str] = "Execution"
    device: Device = "auto"
    workers: int = 0
    threads: int = 1
    data_dir: DataDirectory = None
    keep_weights: bool = True

    def arguments(self) -> dict[str, Any]:
        """Return these options as keyword arguments of the API: `forecast`, `Study.run`, `reproduce`."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster that a study is forecast for.

    Args:
        on: ray: a cluster of nodes like this machine
        nodes: nodes of the cluster (default: 1)
        gpus_per_node: GPUs of each node (default: as this machine)
        gpus_per_run: GPUs that each run reserves; below 1, runs share one (default: 1)
        cpus_per_node: CPU cores of each node (default: as this machine, if it has no GPU)
        cpus_per_run: CPU cores that each run reserves (default: --threads)
    """

    heading: ClassVar[str] = "Execution"
    on: Literal["local", "ray"] = "local"
    nodes: Annotated[int | None, flag("COUNT")] = None
    gpus_per_node: Annotated[int | None, flag("COUNT")] = None
    gpus_per_run: Annotated[float | None, flag("NUMBER")] = None
    cpus_per_node: Annotated[int | None, flag("COUNT")] = None
    cpus_per_run: Annotated[float | None, flag("NUMBER")] = None

    def arguments(self) -> dict[str, Any]:
        """Return these options as keyword arguments of `forecast`."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class RunOptions(DeviceOptions):
    """Everything about the execution of a study.

    Args:
        time_limit: save and stop after this time: 90s, 8m, 1.5h (default: none)
        retry: failed: repeat runs that failed
        compile: torch.compile (default: on GPU for single runs from size 5m)
        population: train the seeds and rates of an arm in one pass (default: on GPU, if faster)
        allow_failed_check: train arms that fail the causality check; never called better
        reuse: studies whose finished runs are copied, not trained again (default: none)
        quiet: print no progress
        on: this machine, Ray (at $RAY_ADDRESS) or SLURM: docs/scaling.md
        cpus_per_run: CPUs that a run gets with --on ray or slurm (default: --threads)
        gpus_per_run: GPUs that a run gets there, or a share: 0.5 (default: 1 on GPUs)
    """

    time_limit: Annotated[str | None, flag("TIME")] = None
    retry: Literal["none", "failed"] = "none"
    compile: Switch = "auto"
    population: Switch = "auto"
    allow_failed_check: bool = False
    reuse: Annotated[tuple[str, ...], flag("DIR")] = ()
    quiet: bool = False
    on: Literal["local", "ray", "slurm"] = "local"
    cpus_per_run: Annotated[float | None, flag("NUMBER")] = None
    gpus_per_run: Annotated[float | None, flag("NUMBER")] = None

    def arguments(self) -> dict[str, Any]:
        """Return these options as keyword arguments of `Study.run` and `reproduce`."""
        given = super().arguments()
        given["retry_failed"] = given.pop("retry") == "failed"
        given["time_limit"] = seconds_of(self.time_limit)
        return given | {"compile": switched(self.compile), "population": switched(self.population)}


@dataclass(frozen=True)
class SlurmOptions:
    """The job array of --on slurm.

    Args:
        jobs: tasks of the job array; 0: one per run that is left, at most 8
        sbatch: options of sbatch: partition=gpu time=8:00:00 (default: none)
        submit: submit the job with sbatch
    """

    heading: ClassVar[str] = "SLURM"
    jobs: int = 0
    sbatch: Annotated[tuple[str, ...], flag("KEY=VALUE")] = ()
    submit: bool = False

    def job(self) -> SlurmJob | None:
        """Return the job, or None if none of these options is given."""
        if self == SlurmOptions():
            return None
        return SlurmJob(jobs=self.jobs, sbatch=self.sbatch, submit=self.submit)


def _seeds(text: str) -> Any:
    """Return a number of seeds, or a list of seeds."""
    if "," in text:
        return [parse_count(part, "--seeds") for part in text.split(",")]
    return parse_count(text, "--seeds")


def _set(changes: dict[str, Any], text: str) -> None:
    """Add one KEY=VALUE of --set to the changes."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UserError(f"--set takes KEY=VALUE, got '{text}'")
    table, _, inner = key.rpartition(".")
    if table == "lr":
        changes.setdefault("circuit_lr", {})[inner] = value
        return
    if table not in ("", "model", "tune"):
        raise UserError(f"--set: unknown table '{table}' (allowed: lr, model, tune)")
    place = changes.setdefault(table, {}) if table else changes
    place[inner] = [_value(part) for part in value.split(",")] if key == "tune.lr" else _value(value)


def _value(text: str) -> Any:
    """Return a value as TOML would read it, or the text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return parse_number(text, kind)
        except ValueError:
            continue
    return text
