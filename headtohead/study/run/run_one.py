"""Train and score one run in this process, from its record to its result."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import save

from headtohead.common.errors import DamagedFile, NewerFile, UserError
from headtohead.common.files import digest_file, write_atomic
from headtohead.common.progress import part_of
from headtohead.common.stop import NEVER, Stop
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.study.environment import differences, environment
from headtohead.study.plan.branches import Parent, kept_checkpoint
from headtohead.study.plan.dataset import Dataset, data_of, dataset_of
from headtohead.study.plan.execution import ExecutionSettings, layers_of, micro_batch
from headtohead.study.plan.init_from import load_weights
from headtohead.study.probes import Subject, take
from headtohead.study.run.gate import check_trained, has_user_code
from headtohead.study.run.restore import restore
from headtohead.study.store.result import SPLITS, Best, Cost, RunResult, Score, Status, score_of
from headtohead.study.store.run_store import RunDirectory, read_probe
from headtohead.study.store.validation import size_of, training_of
from headtohead.training.acceleration import compiles, records
from headtohead.training.batches import BatchSource
from headtohead.training.cuda_graph import VERIFIED_MECHANISMS
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Branching, Hooks, Outcome, Trainer

Event = Callable[[dict[str, Any]], None]


class ExternalError(Exception):
    """An error outside a run, such as a missing corpus or a full disk. The run is kept and has no result."""


class Stopped(BaseException):
    """A stop was requested during a measurement. Not an Exception, so that no error handler catches it."""


def run_one(
    run: RunDirectory,
    record: dict[str, Any],
    execution: ExecutionSettings,
    *,
    layers: list[Composed] | None = None,
    probes: Sequence[str] = (),
    stop: Stop = NEVER,
    lost: Callable[[], bool] = lambda: False,
    emit: Event = lambda event: None,
) -> str:
    """Train or resume a run, then take its missing probes; return the resulting state.

    done, diverged, failed, out of memory: the run has a result; errors of the arm are results. stopped: a stop was
    requested. deferred: the corpus is missing or changed, or another process took the run over. blocked: nothing can be
    written. External errors are reported as events, and the run is tried again at the next start.
    """
    device = torch.device(execution.device)
    if device.type == "cpu":
        torch.set_num_threads(execution.threads)

    held = stop_when_lost(run, lost, stop)
    chosen = layers if layers is not None else layers_of(record)

    def execute() -> str:
        if run.finished():  # only its probes are missing
            model, status = _restored(run, record, chosen).to(device), "done"
        else:
            started = begin(run, record, execution, device, chosen, held, emit)
            try:
                model, status = (
                    started.model,
                    finish_run(started, started.trainer.run(), execution, held, emit),
                )
            except Stopped:  # the training is saved and scored at the next start
                started.trainer.save()
                return "stopped"
        if status == "done":
            take_probes(run, record, model, execution, missing_probes(run, probes), held, emit)
        return status

    return with_failures_recorded(run, emit, execute)


def stop_when_lost(run: RunDirectory, lost: Callable[[], bool], stop: Stop) -> Stop:
    """Return `stop` with a check that no other process has taken the run over; if one has, it raises ExternalError."""

    def requested() -> bool:
        if lost():
            raise ExternalError(
                f"run {run.id} was taken over by another process: the heartbeat of this one had stopped too long"
            )
        return stop.requested()

    return dataclasses.replace(stop, requested=requested)


def after_step(stop: Stop) -> Callable[[], bool]:
    """Return the function that a trainer calls after each step; if it returns True, the trainer saves and stops."""

    def stopped() -> bool:
        stop.advance()
        return stop()

    return stopped


def with_failures_recorded(run: RunDirectory, emit: Event, work: Callable[[], str]) -> str:
    """Call `work` and return the resulting state; errors are recorded or reported as `run_one` describes."""
    try:
        return work()
    except (ExternalError, NewerFile) as error:
        emit({"kind": "deferred", "run": run.id, "message": str(error)})
        return "deferred"
    except OSError as error:
        message = f"cannot write to {run.path}: {error.strerror or error}"
    except Exception as error:
        if run.finished():  # its result is still valid
            emit({"kind": "deferred", "run": run.id, "message": f"{type(error).__name__}: {error}"})
            return "deferred"
        status: Status = "out of memory" if _out_of_memory(error) else "failed"
        try:
            return _fail(run, status, error)
        except OSError as second:
            message = f"cannot write to {run.path}: {second.strerror}"
    emit({"kind": "deferred", "run": run.id, "message": message})
    return "blocked"


@dataclass(frozen=True)
class StartedRun:
    """A run that is ready to train."""

    run: RunDirectory
    trainer: Trainer
    dataset: Dataset
    changes: list[str]
    """Differences from the environment before the last resume."""
    stacked: int = 0
    """Number of rows in the population; 0: the run is trained alone."""

    @property
    def model(self) -> Decoder:
        """The model in training."""
        return self.trainer.model


def begin(
    run: RunDirectory,
    record: dict[str, Any],
    execution: ExecutionSettings,
    device: torch.device,
    layers: list[Composed],
    stop: Stop,
    emit: Event,
    stacked: int = 0,
) -> StartedRun:
    """Return a run ready to train, alone or as a row of a population of `stacked` rows."""
    dataset = _dataset(run, record, execution)
    size, training = size_of(record), training_of(record)
    torch.manual_seed(int(record["seed"]))
    # The companion is cut from the train split; corpus content and options, both in the run's hash, determine it.
    model = dataset.model(size, layers, int(record["seed"])).to(device)
    if "start" in record:
        _start(model, record)
    branching = _branching(run, record)
    changes = _record_environment(run, environment(device, size, training.precision), branching)
    batches = dataset.batches(size, training, int(record["seed"]))

    def progress(step: int, nats: float, rate: float) -> None:
        emit(
            {"kind": "step", "run": run.id, "step": step, "steps": batches.steps, "nats": nats, "rate": rate}
        )

    def evaluate() -> dict[str, Any]:
        # A task is also scored on test, so that the result includes the test score of the best step.
        splits, shown = ("valid", "test") if dataset.task else ("valid",), _measuring(run, stop, emit)
        found = {}
        for index, split in enumerate(splits):
            part = part_of(shown, index, index + 1, len(splits))
            found[split] = _brief(score_of(dataset.score(model, split, training.precision, part)))
        return found

    # A task's batches have many lengths, and each would need its own compilation or CUDA graph.
    alone = not stacked and not dataset.task
    compiled = alone and compiles(execution.compile, size, device)
    trainer = Trainer(
        model,
        batches,
        training,
        micro=execution.micro or micro_batch(size, batches.sequences, device, stacked),
        folder=run.checkpoints,
        save_every=execution.save_every,
        compile=compiled,
        record=alone and may_record(record, layers) and records(execution.record, size, device, compiled),
        name=run.id,
        branching=branching,
        log_circuits=execution.log_circuits,
        sharing=stacked or 1,
        hooks=Hooks(
            log=run.log,
            progress=progress,
            stop=after_step(stop),
            evaluate=evaluate,
            rewind=run.rewind,
            compiling=lambda: emit({"kind": "compiling", "run": run.id}),
            warn=lambda message: emit({"kind": "warning", "run": run.id, "message": message}),
        ),
    )
    return StartedRun(run, trainer, dataset, changes, stacked)


def may_record(record: dict[str, Any], layers: Sequence[Composed]) -> bool:
    """Return whether the steps of a run may be captured as a CUDA graph.

    A CUDA graph does not repeat Python code that changes from step to step, so only mechanisms whose captured steps were
    compared with eager ones are allowed. Under length = time the seconds per step were measured without a graph.
    """
    timed = str(record["length"]).startswith("time")
    return not timed and all(
        term.is_ours(VERIFIED_MECHANISMS) for composed in layers for term in composed.terms
    )


def _measuring(run: RunDirectory, stop: Stop, emit: Event) -> Callable[[float], None]:
    """Return a progress callback for a measurement; it emits an event, and raises Stopped if a stop was requested."""

    def progress(share: float) -> None:
        if stop():
            raise Stopped
        emit({"kind": "scoring", "run": run.id, "share": round(share, 3)})

    return progress


def finish_run(
    started: StartedRun, outcome: Outcome, execution: ExecutionSettings, stop: Stop, emit: Event
) -> str:
    """Score a trained run and write its costs and its result; return the resulting state."""
    run, trainer, dataset = started.run, started.trainer, started.dataset
    model, training = trainer.model, trainer.settings
    if outcome.status == "stopped":
        return "stopped"
    began = time.monotonic()
    result = _result(
        outcome,
        model,
        dataset,
        training,
        trainer.batches,
        _measuring(run, stop, emit),
    )
    best = _best(run, result)
    result = replace(
        result,
        best=best[result.valid.metric] if best and result.valid is not None else None,
        best_by=best,
        late_fall=None if dataset.task else _late_fall(run.metrics()),
        environment_changed=started.changes,
    )
    tokens = trainer.batches.tokens(outcome.step)
    on_gpu = trainer.device.type == "cuda"
    scored = time.monotonic() - began
    if result.status == "done" and has_user_code(model.arms):
        found = check_trained(model, dataset, trainer.batches, training.precision, trainer.micro)
        result = replace(result, check=found)
    stop()  # last check that no other process has taken the run over
    metrics = run.path / "metrics.jsonl"
    cost = Cost(
        train_seconds=round(trainer.own_seconds, 3),
        score_seconds=round(scored, 3),
        tokens_per_second=round(tokens / max(1e-9, trainer.own_seconds), 1),
        peak_bytes=torch.cuda.max_memory_allocated(trainer.device) if on_gpu else _peak_bytes(),
        micro_batch=trainer.micro,
        stacked=started.stacked or None,
        metrics_sha256=digest_file(metrics) if metrics.is_file() else None,
    )
    run.keep("cost.json", cost.as_dict())
    if dataset.tokenizer is not None:
        run.keep_tokenizer(dataset.tokenizer)
    _finish(run, model, result, execution.keep_weights)
    stop.advance()
    return result.status


def _restored(run: RunDirectory, record: dict[str, Any], layers: list[Composed]) -> Decoder:
    try:
        return restore(run, record, layers)
    except UserError as error:
        raise ExternalError(str(error)) from None


def missing_probes(run: RunDirectory, probes: Sequence[str]) -> list[str]:
    """Return the probes that have not been taken on the run; a damaged file counts as not taken."""
    found = []
    for name in probes:
        try:
            if read_probe(run, name) is None:
                found.append(name)
        except DamagedFile:
            found.append(name)
    return found


def take_probes(
    run: RunDirectory,
    record: dict[str, Any],
    model: Decoder,
    execution: ExecutionSettings,
    probes: list[str],
    stop: Stop,
    emit: Event,
) -> None:
    """Take the given probes on a trained run; a probe that is interrupted is taken again at the next start."""
    if not probes:
        return
    dataset = _dataset(run, record, execution)
    progress = _measuring(run, stop, emit)
    for index, name in enumerate(probes):
        shown = part_of(progress, index, index + 1, len(probes))
        subject = Subject(model, data_of(dataset), record, execution.data_dir, shown)
        try:
            shown(0.0)
            found = take(name, subject)
        except Stopped:
            return
        except ExternalError:  # another process has taken the run over
            raise
        except Exception as error:  # the run is still valid; the next start tries the probe again
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            emit({"kind": "deferred", "run": run.id, "message": f"probe {name}: {message}".splitlines()[0]})
            continue
        run.keep_probe(name, found)
        stop.advance()


def _branching(run: RunDirectory, record: dict[str, Any]) -> Branching:
    """Return how a run relates to its trunk or its branches; a new branch first copies the trunk's rows of metrics.jsonl."""
    if "parent" not in record:
        return Branching(marks=frozenset(record.get("branches", ())), folder=run.branches)
    parent = Parent(**record["parent"])
    trunk = RunDirectory(run.path.with_name(parent.run))
    start = kept_checkpoint(trunk, parent.step)
    if not any(run.checkpoints.glob("step-*")) and start.is_dir():
        rows = [row for row in trunk.metrics() if row["step"] <= parent.step]
        write_atomic(run.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return Branching(start=start, trunk=parent.run)


def _dataset(run: RunDirectory, record: dict[str, Any], execution: ExecutionSettings) -> Dataset:
    try:
        return dataset_of(run, record, execution.data_dir)
    except UserError as error:
        raise ExternalError(str(error)) from None


def _start(model: Decoder, record: dict[str, Any]) -> None:
    try:
        load_weights(model, record["start_path"], record["start"])
    except UserError as error:
        raise ExternalError(str(error)) from None


def _result(
    outcome: Outcome,
    model: Decoder,
    dataset: Dataset,
    training: TrainSettings,
    batches: BatchSource,
    progress: Callable[[float], None],
) -> RunResult:
    result = RunResult(
        status="diverged",
        step=outcome.step,
        tokens=batches.tokens(outcome.step),
        parameters=model.parameter_count(),
        train_nats=outcome.train_nats,
        unique_tokens=batches.unique_tokens(outcome.step),
        epochs=batches.epochs(outcome.step),
    )
    if outcome.status == "diverged":
        return replace(result, diverged_at=outcome.diverged_at)
    for index, split in enumerate(SPLITS):
        shown = part_of(progress, index, index + 1, len(SPLITS))
        score = score_of(dataset.score(model, split, training.precision, shown))
        if not math.isfinite(score.values["nats"]):
            return replace(result, diverged_at=outcome.step)
        # Blocks are for the intervals of verdicts, which are about test.
        result = replace(result, **{split: score if split == "test" else replace(score, blocks={})})
    return replace(result, status="done")


def _brief(score: Score) -> dict[str, float]:
    """Return the nats and metrics of a score."""
    if not score.of_task:
        return {name: score.values[name] for name in ("nats", score.metric)}
    return {name: value for name, value in score.values.items() if isinstance(value, float)}


def _best(run: RunDirectory, result: RunResult) -> dict[str, Best]:
    """Return the best step on valid (including the last) for each metric of a task, with its valid and test scores."""
    evaluated = [row for row in run.metrics() if "test" in row]
    if not evaluated or result.valid is None or result.test is None:
        return {}
    last = {"valid": _brief(result.valid), "test": _brief(result.test)}
    rows = [*evaluated, {"step": result.step, **last}]
    found = {}
    for metric in last["valid"]:
        if metric != "nats":  # for every metric of a task, higher is better
            best = max(rows, key=lambda row: _score(row, metric))
            found[metric] = Best(best["step"], best["valid"], best["test"])
    return found


def _score(row: dict[str, Any], metric: str) -> float:
    value = row["valid"].get(metric)
    return -math.inf if value is None else float(value)


def _late_fall(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the relative decrease of the loss in the second half of training, from rows of metrics.jsonl."""
    curve = [(row["step"], row["nats"]) for row in rows if "nats" in row]  # null: not finite
    if not curve:
        return None
    last = curve[-1][0]
    middle = [nats for step, nats in curve if 0.45 * last < step <= 0.55 * last]
    end = [nats for step, nats in curve if step > 0.9 * last]
    if not middle or not end or None in (*middle, *end):
        return None
    before, after = sum(middle) / len(middle), sum(end) / len(end)
    return round((before - after) / before, 4) if before > 0 else None


def _finish(run: RunDirectory, model: Decoder, result: RunResult, keep_weights: bool) -> None:
    """Save the weights, write the result, then delete the checkpoints."""
    if keep_weights and result.status == "done":
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        run.keep_weights(save(tensors))
    run.finish(result)
    for path in run.checkpoints.glob("step-*") if run.checkpoints.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def _fail(run: RunDirectory, status: Status, error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    write_atomic(run.path / "failure.txt", "".join(traceback.format_exception(error)))
    run.finish(RunResult(status=status, error=str(error) if isinstance(error, UserError) else message))
    return status


def _out_of_memory(error: BaseException) -> bool:
    # torch's allocator on CPU raises a plain RuntimeError
    message = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in message and "memory" in message
    )


def _record_environment(run: RunDirectory, now: dict[str, Any], branching: Branching) -> list[str]:
    """Append this environment to environment.json; return the changes between consecutive ones, including the trunk's."""
    resumed = any(run.checkpoints.glob("step-*")) if run.checkpoints.is_dir() else False
    before = run.stretches() if resumed else []
    if not resumed and branching.start is not None and branching.start.is_dir():
        before = RunDirectory(run.path.with_name(branching.trunk)).stretches()
    stretches = [*before, now]
    run.keep("environment.json", {"stretches": stretches})
    return [change for before, after in pairwise(stretches) for change in differences(before, after)]


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
