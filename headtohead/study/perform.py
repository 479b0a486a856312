"""One run from its record to its result, in this process."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from safetensors.torch import save

from headtohead.common.errors import UserError
from headtohead.common.files import read_json, write_atomic, write_json
from headtohead.data.shards import Prepared, prepare
from headtohead.data.windows import Windows
from headtohead.measure.loss import score_split
from headtohead.mechanisms.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Settings, Size
from headtohead.study.environment import differences, environment
from headtohead.study.store import RunDirectory
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Hooks, Outcome, Trainer

Event = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Conditions:
    """How runs are done here; nothing of it changes a result beyond its last digits."""

    device: str = "cpu"
    threads: int = 1
    data_dir: str = ""
    save_every: float = 60.0
    keep_weights: bool = True
    compile: bool = False
    micro: int = 0
    """Sequences per pass; 0 chooses by memory."""


def size_of(record: dict[str, Any]) -> Size:
    """Return the size that a run's record holds."""
    facts = dict(record["size"])
    return Size(**{**facts, "settings": Settings(**facts["settings"])})


def layers_of(record: dict[str, Any]) -> list[Composed]:
    """Return what stands in each layer of a run's record, read from its text."""
    return [parse_layout(text).pattern[0] for text in record["layers"]]


def perform(
    run: RunDirectory,
    record: dict[str, Any],
    conditions: Conditions,
    *,
    layers: list[Composed] | None = None,
    stop: Callable[[], bool] = lambda: False,
    tell: Event = lambda event: None,
) -> str:
    """Do a run, or go on with it; return its state afterwards: done, diverged, failed or stopped."""
    device = torch.device(conditions.device)
    if device.type == "cpu":
        torch.set_num_threads(conditions.threads)
    run.open(record)
    try:
        return _train_and_score(run, record, conditions, device, layers, stop, tell)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return _fail(run, "out of memory", error)
    except Exception as error:
        return _fail(run, "failed", error)


def _train_and_score(
    run: RunDirectory,
    record: dict[str, Any],
    conditions: Conditions,
    device: torch.device,
    layers: list[Composed] | None,
    stop: Callable[[], bool],
    tell: Event,
) -> str:
    corpus = _corpus(record, conditions)
    size, training = size_of(record), TrainSettings(**record["training"])
    torch.manual_seed(int(record["seed"]))
    # A companion is cut from the train split: corpus content and options, which the run's hash covers, say which.
    model = Decoder(
        size,
        layers if layers is not None else layers_of(record),
        int(record["seed"]),
        companion=corpus.splits["train"].tokens,
    ).to(device)
    changes = _note_environment(run, environment(device, size, training.precision))
    windows = Windows(corpus.splits["train"], size.context, int(record["seed"]))
    steps = training.steps(size.context)
    lengths = corpus.tokenizer.token_bytes()

    def progress(step: int, nats: float, rate: float) -> None:
        tell({"kind": "step", "run": run.id, "step": step, "steps": steps, "nats": nats, "rate": rate})

    def valid() -> dict[str, Any]:
        score = score_split(model, corpus.splits["valid"], lengths, precision=training.precision)
        return {"nats": score.nats, "bits_per_byte": score.bits_per_byte}

    trainer = Trainer(
        model,
        windows,
        training,
        micro=conditions.micro or micro_batch(size, training, device),
        folder=run.checkpoints,
        save_every=conditions.save_every,
        compile=conditions.compile,
        hooks=Hooks(
            log=run.log,
            progress=progress,
            stop=stop,
            evaluate=valid,
            rewind=run.rewind,
            warn=lambda words: tell({"kind": "warning", "run": run.id, "words": words}),
        ),
    )
    outcome = trainer.run()
    if outcome.status == "stopped":
        return "stopped"
    began = time.monotonic()
    result = _result(
        outcome,
        model,
        corpus,
        training,
        windows,
        lambda share: tell({"kind": "scoring", "run": run.id, "share": round(share, 3)}),
    )
    if changes:
        result["environment_changed"] = changes
    tokens = outcome.step * training.batch
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_bytes()
    cost = {
        "train_seconds": round(trainer.seconds, 3),
        "score_seconds": round(time.monotonic() - began, 3),
        "tokens_per_second": round(tokens / max(1e-9, trainer.seconds), 1),
        "peak_bytes": memory,
        "micro_batch": trainer.micro,
    }
    write_json(run.path / "cost.json", cost)
    run.keep_tokenizer(corpus.tokenizer)
    _finish(run, model, result, conditions.keep_weights)
    return str(result["status"])


def _corpus(record: dict[str, Any], conditions: Conditions) -> Prepared:
    facts = record["corpus"]
    corpus = prepare(facts["name"], facts["tokenizer"], data_dir=conditions.data_dir or None)
    if corpus.content != facts["content"]:
        raise UserError(
            f"corpus {facts['label']} has changed since this run was planned; start the study again to plan new runs"
        )
    return corpus


def _result(
    outcome: Outcome,
    model: Decoder,
    corpus: Prepared,
    training: TrainSettings,
    windows: Windows,
    progress: Callable[[float], None],
) -> dict[str, Any]:
    tokens = outcome.step * training.batch
    result: dict[str, Any] = {
        "status": outcome.status,
        "step": outcome.step,
        "tokens": tokens,
        "parameters": model.parameter_count(),
        "train_nats": outcome.train_nats,
        "unique_tokens": min(tokens, windows.count * windows.context),
        "epochs": windows.epochs(tokens),
    }
    if outcome.status == "diverged":
        return result | {"diverged_at": outcome.diverged_at}
    lengths = corpus.tokenizer.token_bytes()
    for place, split in enumerate(("valid", "test")):

        def shown(share: float, place: int = place) -> None:
            progress((place + share) / 2)

        score = score_split(
            model, corpus.splits[split], lengths, precision=training.precision, progress=shown
        )
        result[split] = score.as_dict() if split == "test" else {**score.as_dict(), "blocks": []}
    return result


def _finish(run: RunDirectory, model: Decoder, result: dict[str, Any], keep_weights: bool) -> None:
    """Keep the weights, drop the checkpoints, write the result last."""
    if keep_weights and result["status"] == "done":
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        run.checkpoints.mkdir(exist_ok=True)
        write_atomic(run.weights, save(tensors))
    write_json(run.path / "result.json", result)
    for path in run.checkpoints.glob("step-*") if run.checkpoints.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def _fail(run: RunDirectory, status: str, error: BaseException) -> str:
    words = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {words[0] if words else 'no message'}"
    write_atomic(run.path / "failure.txt", "".join(traceback.format_exception(error)))
    write_json(
        run.path / "result.json",
        {"status": status, "error": str(error) if isinstance(error, UserError) else message},
    )
    return status


def _note_environment(run: RunDirectory, now: dict[str, Any]) -> list[str]:
    """Add this stretch of work to environment.json; return what differs from the stretch before."""
    path = run.path / "environment.json"
    stretches: list[dict[str, Any]] = []
    if path.is_file():
        try:
            stretches = list(read_json(path)["stretches"])
        except (UserError, KeyError, TypeError):
            stretches = []
    resumed = any(run.checkpoints.glob("step-*")) if run.checkpoints.is_dir() else False
    stretches = [*stretches, now] if resumed else [now]
    write_json(path, {"stretches": stretches})
    return [words for before, after in pairwise(stretches) for words in differences(before, after)]


def micro_batch(size: Size, training: TrainSettings, device: torch.device) -> int:
    """Return how many sequences go through the model at once, by the memory their activations take.

    The estimate holds some 14 states and 4 hidden rows per token and layer in float32, and errs high. On CPU the
    limit is one gigabyte on every machine, so that the order of additions, and with it the result, is the same.
    """
    sequences = training.batch // size.context
    per_sequence = 4 * size.context * (size.layers * (14 * size.width + 4 * size.ffn) + 4 * size.width)
    room = 2**30 if device.type == "cpu" else int(0.6 * torch.cuda.mem_get_info(device)[0])
    return max(1, min(sequences, room // per_sequence))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def conditions_from(text: str) -> Conditions:
    """Return conditions from JSON, as a worker is told them."""
    known = {field.name for field in dataclasses.fields(Conditions)}
    return Conditions(**{key: value for key, value in json.loads(text).items() if key in known})
