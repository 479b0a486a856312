"""One run from its record to its result, in this process."""

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
from safetensors.torch import save

from headtohead.common.errors import DamagedFile, NewerFile, UserError
from headtohead.common.files import digest_file, write_atomic
from headtohead.common.progress import part_of
from headtohead.common.schema import write_document
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
from headtohead.study.store.manifest import METRIC
from headtohead.study.store.run_store import RunDirectory, read_probe
from headtohead.study.store.validation import size_of, training_of
from headtohead.training.acceleration import compiles, records
from headtohead.training.batches import BatchSource
from headtohead.training.cuda_graph import VERIFIED_MECHANISMS
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Branching, Hooks, Outcome, Trainer

Event = Callable[[dict[str, Any]], None]


class ExternalError(Exception):
    """Something outside a run is in its way: its corpus, the disk. The run keeps its place and has no result."""


class Stopped(BaseException):
    """A run was asked to stop while it was measured. No error: nothing on the way out may take it for one."""


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
    """Do a run, or go on with it, then take the probes it lacks; return how it ended.

    done, diverged, failed, out of memory: it has a result; what is wrong with the arm is its result. stopped: it was
    asked to. hindered: its corpus is missing or changed, or another process took the run over. blocked: nothing can be
    written. An obstacle from outside is told in words, and the run keeps its place for the next start.
    """
    device = torch.device(execution.device)
    if device.type == "cpu":
        torch.set_num_threads(execution.threads)

    held = stop_when_lost(run, lost, stop)
    chosen = layers if layers is not None else layers_of(record)

    def whole() -> str:
        if run.finished():  # only its probes are missing
            model, status = _restored(run, record, chosen).to(device), "done"
        else:
            started = begin(run, record, execution, device, chosen, held, emit)
            try:
                model, status = (
                    started.model,
                    finish_run(started, started.trainer.run(), execution, held, emit),
                )
            except Stopped:  # what was trained stays, and is scored at the next start
                started.trainer.save()
                return "stopped"
        if status == "done":
            take_probes(run, record, model, execution, missing_probes(run, probes), held, emit)
        return status

    return with_failures_recorded(run, emit, whole)


def stop_when_lost(run: RunDirectory, lost: Callable[[], bool], stop: Stop) -> Stop:
    """Return `stop`, asked only while nobody else has taken the run over."""

    def requested() -> bool:
        if lost():
            raise ExternalError(
                f"run {run.id} was taken over by another process: this one had been silent too long"
            )
        return stop.requested()

    return dataclasses.replace(stop, requested=requested)


def after_step(stop: Stop) -> Callable[[], bool]:
    """Return what a trainer asks after each step, which it saves where the answer is to stop."""

    def stopped() -> bool:
        stop.advance()
        return stop()

    return stopped


def with_failures_recorded(run: RunDirectory, emit: Event, work: Callable[[], str]) -> str:
    """Return how the work on a run ended; what goes wrong is recorded or told, as `perform` says."""
    try:
        return work()
    except (ExternalError, NewerFile) as obstacle:
        emit({"kind": "obstacle", "run": run.id, "words": str(obstacle)})
        return "deferred"
    except OSError as error:
        words = f"cannot write to {run.path}: {error.strerror or error}"
    except Exception as error:
        if run.finished():  # no reason to doubt its result
            emit({"kind": "obstacle", "run": run.id, "words": f"{type(error).__name__}: {error}"})
            return "deferred"
        status = "out of memory" if _out_of_memory(error) else "failed"
        try:
            return _fail(run, status, error)
        except OSError as second:
            words = f"cannot write to {run.path}: {second.strerror}"
    emit({"kind": "obstacle", "run": run.id, "words": words})
    return "blocked"


@dataclass(frozen=True)
class StartedRun:
    """A run that is ready to train."""

    run: RunDirectory
    trainer: Trainer
    dataset: Dataset
    changes: list[str]
    """What differs from the environment of the stretch before."""
    stacked: int = 0
    """How many seeds share the pass; 0: it is trained by itself."""

    @property
    def model(self) -> Decoder:
        """The model that is trained."""
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
    """Return a run ready to train, by itself or as one of several stacked seeds."""
    dataset = _dataset(run, record, execution)
    size, training = size_of(record), training_of(record)
    torch.manual_seed(int(record["seed"]))
    # A companion is cut from the train split: corpus content and options, which the run's hash covers, say which.
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

    def on_the_way() -> dict[str, Any]:
        # Of a task test too: a run then knows what its best step would have scored.
        splits, shown = ("valid", "test") if dataset.task else ("valid",), _measuring(run, stop, emit)
        found = {}
        for place, split in enumerate(splits):
            part = part_of(shown, place, place + 1, len(splits))
            found[split] = _brief(dataset.score(model, split, training.precision, part))
        return found

    # A task's batches are of many lengths: each would be compiled, or recorded, anew.
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
            evaluate=on_the_way,
            rewind=run.rewind,
            compiling=lambda: emit({"kind": "compiling", "run": run.id}),
            warn=lambda words: emit({"kind": "warning", "run": run.id, "words": words}),
        ),
    )
    return StartedRun(run, trainer, dataset, changes, stacked)


def may_record(record: dict[str, Any], layers: Sequence[Composed]) -> bool:
    """Return whether the steps of a run may be recorded as a graph.

    A mechanism may do in Python what changes from step to step, and a graph would not see it: only those are recorded whose
    recorded steps were compared with others. Under length = time the seconds per step were measured without one.
    """
    timed = str(record["length"]).startswith("time")
    return not timed and all(
        term.is_ours(VERIFIED_MECHANISMS) for composed in layers for term in composed.terms
    )


def _measuring(run: RunDirectory, stop: Stop, emit: Event) -> Callable[[float], None]:
    """Return what is called with the share of a measurement that is done: it tells, and raises Stopped where asked to stop."""

    def progress(share: float) -> None:
        if stop():
            raise Stopped
        emit({"kind": "scoring", "run": run.id, "share": round(share, 3)})

    return progress


def finish_run(
    started: StartedRun, outcome: Outcome, execution: ExecutionSettings, stop: Stop, emit: Event
) -> str:
    """Score a run that was trained, and write what it cost and its result; return how it ended."""
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
    if best := _best(run, result):
        result["best"] = best[result["valid"]["metric"]]
        result["best_by"] = best
    if not dataset.task and (fall := _late_fall(run.metrics())) is not None:
        result["late_fall"] = fall
    if started.changes:
        result["environment_changed"] = started.changes
    tokens = trainer.batches.tokens(outcome.step)
    on_gpu = trainer.device.type == "cuda"
    cost: dict[str, Any] = {
        "train_seconds": round(trainer.own_seconds, 3),
        "score_seconds": round(time.monotonic() - began, 3),
        "tokens_per_second": round(tokens / max(1e-9, trainer.own_seconds), 1),
        "peak_bytes": torch.cuda.max_memory_allocated(trainer.device) if on_gpu else _peak_bytes(),
        "micro_batch": trainer.micro,
        **({"stacked": started.stacked} if started.stacked else {}),
    }
    if result["status"] == "done" and has_user_code(model.arms):
        found = check_trained(model, dataset, trainer.batches, training.precision, trainer.micro)
        result["check"] = found.as_dict()
    stop()  # the last moment to notice that another process has the run
    if (run.path / "metrics.jsonl").is_file():
        cost["metrics_sha256"] = digest_file(run.path / "metrics.jsonl")
    write_document(run.path / "cost.json", cost)
    if dataset.tokenizer is not None:
        run.keep_tokenizer(dataset.tokenizer)
    _finish(run, model, result, execution.keep_weights)
    stop.advance()
    return str(result["status"])


def _restored(run: RunDirectory, record: dict[str, Any], layers: list[Composed]) -> Decoder:
    try:
        return restore(run, record, layers)
    except UserError as error:
        raise ExternalError(str(error)) from None


def missing_probes(run: RunDirectory, probes: Sequence[str]) -> list[str]:
    """Return which of the probes the run has not had; one whose file is damaged counts as not taken."""
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
    """Measure what was asked for on a trained run; a probe that is stopped in the middle is taken at the next start."""
    if not probes:
        return
    dataset = _dataset(run, record, execution)
    progress = _measuring(run, stop, emit)
    for place, name in enumerate(probes):
        shown = part_of(progress, place, place + 1, len(probes))
        subject = Subject(model, data_of(dataset), record, execution.data_dir, shown)
        try:
            shown(0.0)
            found = take(name, subject)
        except Stopped:
            return
        except ExternalError:  # the run is another process's now
            raise
        except Exception as error:  # no reason to doubt the run: the next start tries the probe again
            words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            emit({"kind": "obstacle", "run": run.id, "words": f"probe {name}: {words}".splitlines()[0]})
            continue
        run.keep_probe(name, found)
        stop.advance()


def _branching(run: RunDirectory, record: dict[str, Any]) -> Branching:
    """Return what joins a run to its trunk, or a trunk to its branches; a branch that begins takes over the trunk's rows."""
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
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "status": outcome.status,
        "step": outcome.step,
        "tokens": batches.tokens(outcome.step),
        "parameters": model.parameter_count(),
        "train_nats": outcome.train_nats,
        "unique_tokens": batches.unique_tokens(outcome.step),
        "epochs": batches.epochs(outcome.step),
    }
    if outcome.status == "diverged":
        return result | {"diverged_at": outcome.diverged_at}
    for place, split in enumerate(("valid", "test")):
        score = dataset.score(model, split, training.precision, part_of(progress, place, place + 1, 2))
        if not math.isfinite(score["nats"]):
            return result | {"status": "diverged", "diverged_at": outcome.step}
        result[split] = score if split == "test" else {**score, "blocks": type(score["blocks"])()}
    return result


def _brief(score: dict[str, Any]) -> dict[str, float]:
    """Return the nats and metrics of a score."""
    if "metric" not in score:
        return {"nats": score["nats"], METRIC: score[METRIC]}
    return {name: value for name, value in score.items() if isinstance(value, float)}


def _best(run: RunDirectory, result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by metric of a task the step that is best on valid, the last one included, with its scores on valid and test."""
    ways = [row for row in run.metrics() if "test" in row]
    if not ways or result["status"] != "done":
        return {}
    last = {split: _brief(result[split]) for split in ("valid", "test")}
    rows = [*ways, {"step": result["step"], **last}]
    found = {}
    for metric in last["valid"]:
        if metric != "nats":  # every metric of a task is better when higher
            best = max(rows, key=lambda row: float(row["valid"].get(metric, -math.inf)))
            found[metric] = {name: best[name] for name in ("step", "valid", "test")}
    return found


def _late_fall(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return by which share of itself the second half of training lowered the loss, from rows of metrics.jsonl."""
    curve = [(row["step"], row["nats"]) for row in rows if "nats" in row]
    if not curve:
        return None
    last = curve[-1][0]
    middle = [nats for step, nats in curve if 0.45 * last < step <= 0.55 * last]
    end = [nats for step, nats in curve if step > 0.9 * last]
    if not middle or not end or not all(math.isfinite(nats) for nats in (*middle, *end)):
        return None
    before, after = sum(middle) / len(middle), sum(end) / len(end)
    return round((before - after) / before, 4) if before > 0 else None


def _finish(run: RunDirectory, model: Decoder, result: dict[str, Any], keep_weights: bool) -> None:
    """Keep the weights, write the result, then drop the checkpoints."""
    if keep_weights and result["status"] == "done":
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        run.keep_weights(save(tensors))
    run.finish(result)
    for path in run.checkpoints.glob("step-*") if run.checkpoints.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def _fail(run: RunDirectory, status: str, error: BaseException) -> str:
    words = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {words[0] if words else 'no message'}"
    write_atomic(run.path / "failure.txt", "".join(traceback.format_exception(error)))
    run.finish({"status": status, "error": str(error) if isinstance(error, UserError) else message})
    return status


def _out_of_memory(error: BaseException) -> bool:
    # torch's allocator on CPU raises a plain RuntimeError
    words = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in words and "memory" in words
    )


def _record_environment(run: RunDirectory, now: dict[str, Any], branching: Branching) -> list[str]:
    """Add this stretch of work to environment.json; return what differs from the stretch before, the trunk's counted."""
    resumed = any(run.checkpoints.glob("step-*")) if run.checkpoints.is_dir() else False
    before = run.stretches() if resumed else []
    if not resumed and branching.start is not None and branching.start.is_dir():
        before = RunDirectory(run.path.with_name(branching.trunk)).stretches()
    stretches = [*before, now]
    write_document(run.path / "environment.json", {"stretches": stretches})
    return [words for before, after in pairwise(stretches) for words in differences(before, after)]


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
