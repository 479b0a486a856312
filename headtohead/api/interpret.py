"""Attention of trained models: a page for one text, faithfulness numbers for a whole task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headtohead.api.runs import load_model
from headtohead.common.errors import UserError
from headtohead.common.progress import progress_bar
from headtohead.data.tasks.base import OWN_TOKENS, Example, Task
from headtohead.data.tasks.registry import prepare_task
from headtohead.data.tasks.synthetic import SYNTHETIC
from headtohead.data.tokenizers import Tokenizer
from headtohead.interpret.faithfulness import explain_model
from headtohead.interpret.inspection import inspect_text
from headtohead.model.classifier import Classifier, Pointer
from headtohead.model.decoder import Decoder
from headtohead.study.environment import choose_device
from headtohead.study.judge.intervals import over_seeds
from headtohead.study.plan.dataset import data_of, dataset_of
from headtohead.study.store.run_store import RunDirectory, find_run

if TYPE_CHECKING:
    from headtohead.report.inspection_page import InspectionView

_MAX_CELLS = 4_000_000
"""Attention weights on one page, about 11 MB."""
Looking = str | Path | Decoder
"""A run, or a model in memory."""


@dataclass(frozen=True)
class _Subject:
    model: Decoder
    tokenizer: Tokenizer | None
    label: str
    about: str
    encoding: str
    """The run's tokenizer, as passed to `prepare_task`."""
    run: RunDirectory | None = None
    """None for a model in memory."""


@dataclass(frozen=True)
class _Input:
    """The tokens to inspect."""

    tokens: list[int]
    words: Callable[[int], str]
    place: int | None = None
    relevant: Sequence[bool] = ()
    right: str = ""
    classes: Sequence[str] = ()
    apart: bool = False


def look(
    runs: Looking | Sequence[Looking],
    text: str = "",
    *,
    task: str = "",
    example: int = 0,
    split: str = "test",
    out: str | Path = "look.html",
    tokenizer: Tokenizer | None = None,
    device: str = "cpu",
    data_dir: str | Path | None = None,
    trust_files: bool = False,
    quiet: bool = False,
) -> Path:
    """Write a page with the attention of one or two runs on a text or on a task's example; return its path.

    Without either, a run trained on a task uses an example of that task. A model in memory needs `tokenizer` to read
    a text. A text longer than the context is truncated on the left.
    """
    from headtohead.report.inspection_page import write_look

    given = _listed(runs)
    if not 1 <= len(given) <= 2:
        raise UserError(f"look takes one or two runs; {len(given)} were given")
    if text and task:
        raise UserError("look takes a text or a task, not both; give --text, or --task with --example")
    target = Path(out).expanduser()
    if not target.parent.is_dir() or target.is_dir():
        raise UserError(f"cannot write the page to {target}: give a file in an existing directory")
    with progress_bar("inspecting", quiet) as progress:
        views = []
        for index, run in enumerate(given):
            subject = _subject(run, tokenizer, device, trust_files)
            progress(f"inspecting {subject.label}", index / len(given))
            if text:
                matter = _text(text, subject)
            else:
                found = _task(task, subject, data_dir, progress, "a text (--text) or a task (--task)")
                matter = _example(found, split, example, subject.model)
            views.append(_view(subject, matter))
        return write_look(target, views)


def explain(
    runs: Looking | Sequence[Looking],
    task: str | Task = "",
    *,
    split: str = "test",
    limit: int = 0,
    seed: int = 0,
    device: str = "auto",
    data_dir: str | Path | None = None,
    trust_files: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Return how much attention runs put on relevant tokens of a task, and how faithful it is (interpret/faithfulness.py).

    The default task is the one they were trained on. Several runs must be the seeds of one arm; every number then
    becomes a mean with its 95 % t interval over seeds.
    """
    given = _listed(runs)
    folders = [find_run(run) for run in given if not isinstance(run, Decoder)]
    labels = [folder.spec().corpus.label for folder in folders]
    if seed < 0:
        raise UserError(f"seed={seed} of the random baseline is negative; it must be 0 or more")
    if not task and len(names := dict.fromkeys(labels)) > 1:
        raise UserError(f"these runs were trained on {', '.join(names)}; explain runs of one task at a time")
    _check_seeds(folders)
    summaries = []
    with progress_bar("explaining", quiet) as progress:
        for index, run in enumerate(given):
            subject = _subject(run, None, str(choose_device(device)), trust_files)
            found = _task(task, subject, data_dir, progress, "a task (--task)")

            def shown(share: float, index: int = index, name: str = found.name) -> None:
                progress(f"explaining {name}", (index + share) / len(given))

            explained = explain_model(subject.model, found, split, limit=limit, seed=seed, progress=shown)
            summaries.append(explained.summary())
    return summaries[0] if len(summaries) == 1 else over_seeds(summaries)


def _listed(runs: Looking | Sequence[Looking]) -> list[Looking]:
    return [runs] if isinstance(runs, str | Path | Decoder) else list(runs)


def _check_seeds(folders: Sequence[RunDirectory]) -> None:
    """Raise unless the runs are distinct seeds of one arm; an interval over anything else is meaningless."""
    ids = [folder.id for folder in folders]
    if twice := next((one for one in ids if ids.count(one) > 1), ""):
        raise UserError(f"run {twice} is given twice; give each run once")
    specs = [folder.spec() for folder in folders]
    arms = dict.fromkeys(spec.label for spec in specs)
    if len(arms) > 1:
        raise UserError(f"these runs are of {', '.join(arms)}; explain the seeds of one arm at a time")
    for name in ("layers", "size", "training"):
        if any(getattr(spec, name) != getattr(specs[0], name) for spec in specs):
            raise UserError(f"these runs differ in {name}; explain the seeds of one arm at a time")


def _subject(run: Looking, tokenizer: Tokenizer | None, device: str, trust_files: bool) -> _Subject:
    if isinstance(run, Decoder):
        label = ", ".join(dict.fromkeys(composed.text for composed in run.arms))
        return _Subject(run.eval(), tokenizer, label, run.size.dims, "bytes")
    model = load_model(run, device=device, trust_files=trust_files)
    folder = find_run(run)
    spec = folder.spec()
    name = spec.corpus.tokenizer
    about = f"run {folder.id}, seed {spec.seed}, {spec.corpus.label}, {model.size.dims}"
    plain = name in ("bytes", OWN_TOKENS)
    encoding = "bytes" if plain else f"file:{folder.path / 'tokenizer.json'}"
    own = None if name == OWN_TOKENS else folder.tokenizer()
    return _Subject(model, own, spec.label, about, encoding, folder)


def _task(
    given: str | Task,
    subject: _Subject,
    data_dir: str | Path | None,
    progress: Callable[[str, float], None],
    needed: str,
) -> Task:
    """Return a task encoded with the subject's tokenizer; by default the task it was trained on."""
    if isinstance(given, Task):
        return given
    if given:
        size = subject.model.size
        task = prepare_task(given, subject.encoding, size.context, data_dir=data_dir, progress=progress)
        if task.vocabulary != size.vocabulary:
            raise UserError(
                f"task '{given}' has a vocabulary of {task.vocabulary:,} tokens and {subject.label} of "
                f"{size.vocabulary:,}; give a task with the model's vocabulary"
            )
        return task
    if subject.run is None:
        raise UserError(f"a model in memory has no training task; give {needed}")
    spec = subject.run.spec()
    if spec.task is None:
        raise UserError(f"run {subject.run.id} was trained on a corpus; give {needed}")
    progress(f"preparing {spec.corpus.label}", 0.0)
    trained_on = data_of(dataset_of(subject.run, spec, data_dir))
    assert isinstance(trained_on, Task)
    return trained_on


def _text(text: str, subject: _Subject) -> _Input:
    tokenizer = subject.tokenizer
    if tokenizer is None and subject.run is not None:
        raise UserError(
            f"run {subject.run.id} was trained on a synthetic task and cannot read text; "
            "leave out --text to use an example (--example)"
        )
    if tokenizer is None:
        raise UserError("a model in memory needs tokenizer= to read a text")
    tokens = [int(token) for token in tokenizer.encode(text.encode("utf-8", "replace"))]
    return _Input(tokens, lambda token: tokenizer.decode([token]))


def _example(task: Task, split: str, number: int, model: Decoder) -> _Input:
    if split not in task.splits:
        raise UserError(f"unknown split '{split}' (allowed: {', '.join(task.splits)})")
    rows = task.splits[split]
    if not 0 <= number < len(rows):
        raise UserError(
            f"task '{task.name}' has no example {number} in {split}; allowed: 0 to {len(rows) - 1:,}"
        )
    row: Example = rows[number]
    words = _names(task)
    relevant, place, stop, right = np.asarray(row.relevant.any(0)), None, len(row.tokens), ""
    if row.targets is None:
        right = task.classes[row.label] if isinstance(model, Classifier) else ""
    else:
        # The answer itself is not given to the model. Of several queries take the last, which sees the whole input.
        place = row.prompt - 1 if row.prompt else int(np.flatnonzero(row.targets >= 0)[-1])
        stop = row.prompt or stop
        relevant = row.relevant[0 if row.prompt else -1]
        answer = [int(row.targets[place])]
        if isinstance(model, Pointer):
            answer = row.tokens[slice(*(row.span or (0, 0)))].tolist()
        right = "".join(map(words, answer))
    tokens, marked = row.tokens[:stop].tolist(), relevant[:stop].tolist()
    return _Input(tokens, words, place, marked, right, task.classes, apart=task.tokenizer is None)


def _names(task: Task) -> Callable[[int], str]:
    """Return a function from a task's token id to readable text."""
    if (tokenizer := task.tokenizer) is not None:
        return lambda token: tokenizer.decode([token])
    names = SYNTHETIC[task.name.partition(":")[0]].words
    return lambda token: names[token] if token < len(names) else str(token)


def _view(subject: _Subject, matter: _Input) -> InspectionView:
    from headtohead.report.inspection_page import InspectionView

    model, count = subject.model, len(matter.tokens)
    if not count:
        raise UserError("the text has no tokens")
    cells = math.isqrt(2 * _MAX_CELLS // (model.size.layers * model.size.heads))
    most = min(model.size.context, cells)
    cut = max(0, count - most)
    notes = []
    if cut:
        why = f"the context is {most}" if most == model.size.context else f"the page limit is {most}"
        lost = f", {sum(matter.relevant[:cut])} of them relevant" if any(matter.relevant[:cut]) else ""
        notes.append(f"{count} tokens, but {why}: the first {cut} were cut off{lost}.")
    place = None if matter.place is None else max(0, matter.place - cut)
    tokens = matter.tokens[cut:]
    inspection = inspect_text(model, tokens, matter.words, matter.classes, place)
    without = [layer.mechanism for layer in inspection.layers if layer.weights is None]
    if len(without) == len(inspection.layers):
        names = ", ".join(dict.fromkeys(without))
        notes.append(f"{names} has no attention map; only the prediction is shown.")
    words, relevant = [matter.words(token) for token in tokens], matter.relevant[cut:]
    return InspectionView(
        subject.label, subject.about, words, inspection, relevant, matter.right, matter.apart, notes
    )
