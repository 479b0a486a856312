"""Load, evaluate and generate text with trained runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headtohead.api.checked import checked
from headtohead.api.loaded import LoadedRun, check_tokens
from headtohead.common.errors import UserError, unknown
from headtohead.common.progress import progress_bar
from headtohead.common.text import check_unicode
from headtohead.data.corpora import SPLITS
from headtohead.data.tasks.zeroshot import ALL, Task, chosen_tasks, find_task
from headtohead.evaluation.loss import Score, score_split
from headtohead.evaluation.zeroshot import TaskScore, score_examples
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.model.generation import Sampling
from headtohead.model.layout import skipped_layers
from headtohead.study.environment import choose_device
from headtohead.study.plan.dataset import dataset_of
from headtohead.study.plan.execution import layers_of
from headtohead.study.run.restore import restore
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import check_trained_weights, find_run


@checked
def load(run: str | Path, *, device: str = "cpu", trust_files: bool = False) -> LoadedRun:
    """Return a trained run with its model and tokenizer: `run.generate(text)`, `run.logits(text)`, `run.attention(text)`.

    Loading a run of a user's mechanism file executes that file; `trust_files` allows it.
    """
    folder = find_run(run)
    model = load_model(run, device=device, trust_files=trust_files)
    return LoadedRun(folder.spec(), model, folder.tokenizer())


@checked
def load_model(run: str | Path, *, device: str = "cpu", trust_files: bool = False) -> Decoder:
    """Return the trained model of a run; also works for synthetic tasks, which have no tokenizer."""
    folder = find_run(run)
    spec = folder.spec()
    check_trained_weights(folder)
    model = restore(folder, spec, _trusted_layers(spec, trust_files))
    return model.to(choose_device(device)).eval()


@checked
def evaluate(
    run: str | Path,
    corpus: str,
    *,
    split: str = "test",
    device: str = "auto",
    data_dir: str | Path | None = None,
    trust_files: bool = False,
    quiet: bool = False,
    skip: str = "",
    keep_ffn: bool = False,
) -> Score:
    """Return a trained run's score on a split of any corpus, under the run's own tokenizer.

    `skip` leaves out blocks of the trained model: `variant` (every layer that is not standard), `standard`, or layers
    counted from 1 such as `2,4-6`; with `keep_ffn` only their attention part.
    """
    from headtohead.data.shards import tokens_of

    reader = _load_reader(run, device, trust_files)
    model, tokenizer = _skipping(reader.model, skip, keep_ffn), reader.tokenizer
    with progress_bar("scoring", quiet) as progress:
        data = tokens_of(corpus, split, tokenizer, data_dir=data_dir, progress=progress)
        return score_split(
            model, data, tokenizer.token_bytes(), progress=partial(progress, f"scoring {corpus}")
        )


@checked
def evaluate_task(
    run: str | Path,
    *,
    split: str = "test",
    device: str = "auto",
    data_dir: str | Path | None = None,
    trust_files: bool = False,
    quiet: bool = False,
    skip: str = "",
    keep_ffn: bool = False,
) -> dict[str, Any]:
    """Return all metrics of a run trained on a task, on a split of that task.

    `without_a_model` holds the scores of trivial predictors; `skip` and `keep_ffn` are those of `evaluate`.
    """
    folder = find_run(run)
    spec = folder.spec()
    if spec.task is None:
        raise UserError(
            f"run {spec.id} was trained on a corpus; give the data to score it on (--corpus or --task)"
        )
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    with progress_bar("scoring", quiet) as progress:
        model = _skipping(load_model(run, device=device, trust_files=trust_files), skip, keep_ffn)
        dataset = dataset_of(folder, spec, data_dir)
        name, precision = dataset.label, spec.training.precision
        score = dataset.score(model, split, precision, partial(progress, f"scoring {name}"))
    return {"task": name, "split": split, **score.as_dict(), "without_a_model": dataset.references()}


@checked
def score_task(
    run: str | Path,
    task: str,
    *,
    limit: int = 0,
    device: str = "auto",
    data_dir: str | Path | None = None,
    trust_files: bool = False,
    quiet: bool = False,
) -> TaskScore:
    """Return a trained run's zero-shot score on one task; for the arguments see `score_tasks`."""
    if task == ALL:
        raise UserError("task 'all' means every task; call score_tasks to score them all")
    return score_tasks(
        run, [task], limit=limit, device=device, data_dir=data_dir, trust_files=trust_files, quiet=quiet
    )[0]


@checked
def score_tasks(
    run: str | Path,
    tasks: str | Sequence[str] = ALL,
    *,
    limit: int = 0,
    device: str = "auto",
    data_dir: str | Path | None = None,
    trust_files: bool = False,
    quiet: bool = False,
    skip: str = "",
    keep_ffn: bool = False,
) -> list[TaskScore]:
    """Return a trained run's zero-shot scores on tasks; `all` means every task.

    `limit` is the number of examples per task, spread evenly over its file; `skip` and `keep_ffn` are those of `evaluate`.
    """
    # Read every file before scoring, so that a missing one fails immediately.
    found = [find_task(name, data_dir).part(limit) for name in chosen_tasks(tasks)]
    reader = _load_reader(run, device, trust_files)
    model = _skipping(reader.model, skip, keep_ffn)
    total = sum(len(task.examples) for task in found)
    scores: list[TaskScore] = []
    with progress_bar("scoring", quiet) as progress:
        for task in found:
            before = sum(score.n for score in scores)

            def shown(share: float, task: Task = task, before: int = before) -> None:
                progress(f"scoring {task.name}", (before + share * len(task.examples)) / total)

            scores.append(score_examples(model, task, reader.tokenizer, progress=shown))
    return scores


def _load_reader(run: str | Path, device: str, trust_files: bool) -> LoadedRun:
    """Return a loaded run; raise if it was trained on a task and cannot read plain text."""
    chosen, spec = choose_device(device), find_run(run).spec()
    if spec.task:
        raise UserError(
            f"run {spec.id} was trained on the task '{spec.corpus.label}' only; "
            "score it there with: h2h evaluate RUN"
        )
    return load(run, device=str(chosen), trust_files=trust_files)


def _skipping(model: Decoder, skip: str, keep_ffn: bool) -> Decoder:
    """Return the model, which from now on leaves out the skipped blocks."""
    if keep_ffn and not skip:
        raise UserError("keep_ffn applies to skipped layers; give skip too (--skip)")
    if skip:
        model.skip(skipped_layers(model.arms, skip), keep_ffn)
    return model


@checked
def generate_text(
    run: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    sampling: Sampling | None = None,
    device: str = "auto",
    trust_files: bool = False,
    warn: Callable[[str], None] = lambda message: None,
) -> Iterator[str]:
    """Yield the text that a run's model generates after a prompt, piece by piece.

    `warn` receives a message about a cut prompt, and the reason if the run's mechanism does not allow a CUDA graph.
    """
    check_unicode(prompt, "the prompt")
    check_tokens(tokens)
    yield from _load_reader(run, device, trust_files).stream(
        prompt, tokens=tokens, sampling=sampling, warn=warn
    )


def _trusted_layers(spec: RunSpec, trust_files: bool) -> list[Composed]:
    """Return the run's layers; a mechanism file named in the run's spec is executed only with `trust_files`."""
    files = sorted({text for text in spec.layers if ".py:" in text})
    if files and not trust_files:
        raise UserError(f"this run executes {files[0]}; allow it with trust_files=True (--trust-files)")
    layers = layers_of(spec)
    programs = dict(spec.programs)
    for composed, known in zip(layers, spec.mechanisms, strict=True):
        for term, then in zip((composed.base, *composed.stages), known, strict=True):
            source = then.get("source", "")
            if term.source != source and (not term.program or term.program != programs.get(source)):
                raise UserError(
                    f"{composed.text} has changed since this run was trained; restore the file to load its weights"
                )
    return layers
