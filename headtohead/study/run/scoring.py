"""Score a trained run, write its result and costs, and take its probes."""

from __future__ import annotations

import math
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from msgspec.structs import replace
from safetensors.torch import save

from headtohead.common.errors import UserError
from headtohead.common.files import digest_file
from headtohead.common.progress import part_of
from headtohead.common.stop import Stop, Stopped
from headtohead.evaluation.logged_row import LoggedRow
from headtohead.model.decoder import Decoder
from headtohead.study.plan.dataset import Dataset, data_of
from headtohead.study.probes import Subject, take
from headtohead.study.run.events import Emit, Event
from headtohead.study.run.gate import check_trained, has_user_code
from headtohead.study.store.result import SPLITS, Best, Cost, RunResult, Score
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import KeptWeights, RunDirectory
from headtohead.training.batches import BatchSource
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Outcome, Trainer


class ExternalError(Exception):
    """An error outside a run, such as a missing corpus or a full disk. The run is kept and has no result."""


def measuring(
    run: RunDirectory, stop: Stop, emit: Emit, kind: Literal["scoring", "probing"] = "scoring"
) -> Callable[[float], None]:
    """Return a progress callback for a measurement; it emits an event, and raises Stopped if a stop was requested."""

    def progress(share: float) -> None:
        if stop():
            raise Stopped
        emit(Event(kind, run.id, share=round(share, 3)))

    return progress


def finish(
    run: RunDirectory,
    trainer: Trainer,
    dataset: Dataset,
    outcome: Outcome,
    *,
    changes: list[str],
    rows: int,
    weights: KeptWeights,
    stop: Stop,
    emit: Emit,
) -> str:
    """Score a trained run and write its costs and its result; return its status.

    `changes` are differences between the environments of its starts, `rows` the size of its population or 0.
    """
    model, training = trainer.model, trainer.settings
    began = time.monotonic()
    result = _result(outcome, model, dataset, training, trainer.batches, measuring(run, stop, emit))
    best = _best(run, result)
    result = replace(
        result,
        best=best[result.valid.metric] if best and result.valid is not None else None,
        best_by=best,
        late_fall=None if dataset.task else _late_fall(run.logged_rows()),
        environment_changed=changes,
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
        compile_seconds=round(trainer.compile_seconds, 3) if trainer.compile_seconds else None,
        score_seconds=round(scored, 3),
        tokens_per_second=round(tokens / max(1e-9, trainer.own_seconds), 1),
        peak_bytes=torch.cuda.max_memory_allocated(trainer.device) if on_gpu else _peak_bytes(),
        micro_batch=trainer.micro,
        stacked=rows or None,
        metrics_sha256=digest_file(metrics) if metrics.is_file() else None,
    )
    run.keep_cost(cost)
    if dataset.tokenizer is not None:
        run.keep_tokenizer(dataset.tokenizer)
    _keep(run, model, result, weights)
    stop.advance()
    return result.status


def is_done(run: RunDirectory, probes: Sequence[str]) -> bool:
    """Return whether the run has its result and every one of these probes that can be taken."""
    return run.finished() and not (probes and run.weights.is_file() and run.missing_probes(probes))


def take_probes(
    run: RunDirectory,
    spec: RunSpec,
    model: Decoder,
    dataset: Dataset,
    data_dir: str,
    probes: list[str],
    stop: Stop,
    emit: Emit,
) -> None:
    """Take the given probes on a trained run; a probe that is interrupted is taken again at the next start."""
    progress = measuring(run, stop, emit, "probing")
    for index, name in enumerate(probes):
        shown = part_of(progress, index, index + 1, len(probes))
        subject = Subject(model, data_of(dataset), spec.corpus.name, spec.training.precision, data_dir, shown)
        try:
            shown(0.0)
            found = take(name, subject)
        except Stopped:
            return
        except ExternalError:  # another process has taken the run over
            raise
        except Exception as error:  # the run is still valid; the next start tries the probe again
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            emit(Event("deferred", run.id, message=f"probe {name}: {message}".splitlines()[0]))
            continue
        run.keep_probe(name, found)
        stop.advance()


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
        score = dataset.score(model, split, training.precision, shown)
        if not math.isfinite(score.values["nats"]):
            return replace(result, diverged_at=outcome.step)
        # Blocks are for the intervals of verdicts, which are about test.
        result = replace(result, **{split: score if split == "test" else replace(score, blocks={})})
    return replace(result, status="done")


def brief(score: Score) -> dict[str, float]:
    """Return the nats and metrics of a score."""
    if not score.of_task:
        return {name: score.values[name] for name in ("nats", score.metric)}
    return {name: value for name, value in score.values.items() if isinstance(value, float)}


def _best(run: RunDirectory, result: RunResult) -> dict[str, Best]:
    """Return the best step on valid (including the last) for each metric of a task, with its valid and test scores."""
    evaluated = [row for row in run.logged_rows() if row.test is not None]
    if not evaluated or result.valid is None or result.test is None or result.step is None:
        return {}
    last = LoggedRow(int(result.step), valid=brief(result.valid), test=brief(result.test))
    found = {}
    for metric in last.valid or ():
        if metric != "nats":  # for every metric of a task, higher is better
            best = max((*evaluated, last), key=lambda row: _score(row, metric))
            found[metric] = Best(best.step, best.valid, best.test)  # type: ignore[arg-type]
    return found


def _score(row: LoggedRow, metric: str) -> float:
    value = row.valid.get(metric) if row.valid else None
    return -math.inf if value is None else float(value)


def _late_fall(rows: Sequence[LoggedRow]) -> float | None:
    """Return the relative decrease of the loss in the second half of training."""
    curve = [(row.step, row.nats) for row in rows if row.valid is None]  # None: not finite
    if not curve:
        return None
    last = curve[-1][0]
    middle = [nats for step, nats in curve if 0.45 * last < step <= 0.55 * last]
    end = [nats for step, nats in curve if step > 0.9 * last]
    known = [[nats for nats in part if nats is not None] for part in (middle, end)]
    if not middle or not end or known != [middle, end]:
        return None
    before, after = (sum(part) / len(part) for part in known)
    return round((before - after) / before, 4) if before > 0 else None


def _keep(run: RunDirectory, model: Decoder, result: RunResult, weights: KeptWeights) -> None:
    """Save the weights, write the result, then delete the checkpoints."""
    if weights != "no" and result.status == "done":
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        run.keep_weights(save(tensors))
        if weights == "until probed":
            run.keep_weights_until_probed()
    run.finish(result)
    for path in run.checkpoints.glob("step-*") if run.checkpoints.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
