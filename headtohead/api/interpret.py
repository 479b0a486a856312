"""Where trained models look: one text as a page, a whole task as numbers."""

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
"""Weights on one page: some eleven megabytes."""
Looking = str | Path | Decoder
"""A run, or a model that is at hand already."""


@dataclass(frozen=True)
class _Subject:
    model: Decoder
    tokenizer: Tokenizer | None
    label: str
    about: str
    encoding: str
    """The run's own tokenizer, as a task is told it."""
    run: RunDirectory | None = None
    """None for a model that is at hand."""


@dataclass(frozen=True)
class _Input:
    """What is looked at, in tokens."""

    tokens: list[int]
    words: Callable[[int], str]
    place: int | None = None
    relevant: list[bool] | None = None
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
    """Write a page that shows where one or two runs look in a text, or in a task's example; return where it is.

    Without either, a run that was trained on a task is shown an example of it. A model in place of a run needs
    `tokenizer` to read a text. A text longer than the context is cut from the left.
    """
    from headtohead.report.inspection_page import write_look

    given = [runs] if isinstance(runs, str | Path | Decoder) else list(runs)
    if not 1 <= len(given) <= 2:
        raise UserError(f"look takes one run, or two side by side; {len(given)} were given")
    if text and task:
        raise UserError("look takes a text or a task: give one of the two (--text, or --task with --example)")
    target = Path(out).expanduser()
    if not target.parent.is_dir() or target.is_dir():
        raise UserError(f"cannot write the page to {target}: give a file in a directory that exists")
    with progress_bar("looking", quiet) as progress:
        sights = []
        for place, run in enumerate(given):
            subject = _subject(run, tokenizer, device, trust_files)
            progress(f"looking at {subject.label}", place / len(given))
            if text:
                matter = _text(text, subject)
            else:
                found = _task(task, subject, data_dir, progress, "a text (--text) or a task (--task)")
                matter = _example(found, split, example, subject.model)
            sights.append(_view(subject, matter))
        return write_look(target, sights)


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
    """Return where runs look on a task and whether that explains their answers (headtohead/interpret/faithfulness.py).

    The task is the one they were trained on when none is given. Of several runs, the seeds of one arm, every number becomes its mean and 95 % t interval over them.
    """
    given = [runs] if isinstance(runs, str | Path | Decoder) else list(runs)
    folders = [find_run(run) for run in given if not isinstance(run, Decoder)]
    labels = [str(folder.spec()["corpus"]["label"]) for folder in folders]
    if seed < 0:
        raise UserError(f"seed={seed} of the random floor is negative; 0 or more is allowed")
    if not task and len(names := dict.fromkeys(labels)) > 1:
        raise UserError(f"these runs were trained on {', '.join(names)}; explain those of one task at a time")
    _check_seeds(folders)
    summaries = []
    with progress_bar("explaining", quiet) as progress:
        for place, run in enumerate(given):
            subject = _subject(run, None, str(choose_device(device)), trust_files)
            found = _task(task, subject, data_dir, progress, "a task (--task)")

            def shown(share: float, place: int = place, name: str = found.name) -> None:
                progress(f"explaining {name}", (place + share) / len(given))

            explained = explain_model(subject.model, found, split, limit=limit, seed=seed, progress=shown)
            summaries.append(explained.summary())
    return summaries[0] if len(summaries) == 1 else over_seeds(summaries)


def _check_seeds(folders: Sequence[RunDirectory]) -> None:
    """Refuse runs that are not the seeds of one arm: an interval over others would be of nothing."""
    ids = [folder.id for folder in folders]
    if twice := next((one for one in ids if ids.count(one) > 1), ""):
        raise UserError(f"run {twice} is given twice; a run counts once")
    records = [folder.spec() for folder in folders]
    arms = dict.fromkeys(str(record["label"]) for record in records)
    if len(arms) > 1:
        raise UserError(f"these runs are of {', '.join(arms)}; explain the seeds of one arm at a time")
    for name in ("layers", "size", "training"):
        if any(record[name] != records[0][name] for record in records):
            raise UserError(f"these runs differ in {name}; explain the seeds of one arm at a time")


def _subject(run: Looking, tokenizer: Tokenizer | None, device: str, trust_files: bool) -> _Subject:
    if isinstance(run, Decoder):
        label = ", ".join(dict.fromkeys(composed.text for composed in run.arms))
        return _Subject(run.eval(), tokenizer, label, run.size.dims, "bytes")
    model = load_model(run, device=device, trust_files=trust_files)
    folder = find_run(run)
    record = folder.spec()
    name = str(record["corpus"]["tokenizer"])
    about = f"run {folder.id}, seed {record['seed']}, {record['corpus']['label']}, {model.size.dims}"
    plain = name in ("bytes", OWN_TOKENS)
    encoding = "bytes" if plain else f"file:{folder.path / 'tokenizer.json'}"
    own = None if name == OWN_TOKENS else folder.tokenizer()
    return _Subject(model, own, str(record["label"]), about, encoding, folder)


def _task(
    given: str | Task,
    subject: _Subject,
    data_dir: str | Path | None,
    progress: Callable[[str, float], None],
    needed: str,
) -> Task:
    """Return a task in the subject's own tokens; the one it was trained on when none is given."""
    if isinstance(given, Task):
        return given
    if given:
        return _prepared(given, subject, data_dir, progress)
    if subject.run is None:
        raise UserError(f"a model in place of a run knows no task of its own; give {needed}")
    record = subject.run.spec()
    if "task" not in record:
        raise UserError(f"run {subject.run.id} was trained on a corpus; give {needed}")
    progress(f"making {record['corpus']['label']}", 0.0)
    task = data_of(dataset_of(subject.run, record, data_dir))
    assert isinstance(task, Task)
    return task


def _prepared(
    name: str, subject: _Subject, data_dir: str | Path | None, progress: Callable[[str, float], None]
) -> Task:
    """Return a task by its name, in the subject's own tokens."""
    context = subject.model.size.context
    task = prepare_task(name, subject.encoding, context, data_dir=data_dir, progress=progress)
    if task.vocabulary != subject.model.size.vocabulary:
        raise UserError(
            f"task '{name}' has {task.vocabulary:,} tokens and {subject.label} reads {subject.model.size.vocabulary:,}: "
            "its tokens are others"
        )
    return task


def _text(text: str, subject: _Subject) -> _Input:
    tokenizer = subject.tokenizer
    if tokenizer is None and subject.run is not None:
        raise UserError(
            f"run {subject.run.id} was trained on a task that draws tokens of its own: it reads no text; "
            "without --text it is shown an example (--example)"
        )
    if tokenizer is None:
        raise UserError("a model in place of a run needs tokenizer= to read a text")
    tokens = [int(token) for token in tokenizer.encode(text.encode("utf-8", "replace"))]
    return _Input(tokens, lambda token: tokenizer.decode([token]))


def _example(task: Task, split: str, number: int, model: Decoder) -> _Input:
    if split not in task.splits:
        raise UserError(f"a task has no split '{split}' (allowed: {', '.join(task.splits)})")
    rows = task.splits[split]
    if not 0 <= number < len(rows):
        raise UserError(
            f"task '{task.name}' has no example {number} in {split}; 0 to {len(rows) - 1:,} are there"
        )
    row: Example = rows[number]
    tokenizer, words = task.tokenizer, _names(task)
    if row.targets is None:
        right = task.classes[row.label] if isinstance(model, Classifier) else ""
        return _Input(
            row.tokens.tolist(),
            words,
            None,
            np.asarray(row.relevant.any(0)).tolist(),
            right,
            task.classes,
            tokenizer is None,
        )
    # What is to be written out is not shown to the model; of several questions the last has seen everything.
    asked = np.flatnonzero(row.targets >= 0)
    place = row.prompt - 1 if row.prompt else int(asked[-1])
    stop = row.prompt or len(row.tokens)
    which = 0 if row.prompt or len(row.relevant) == 1 else len(row.relevant) - 1
    answer = [int(row.targets[place])]
    if isinstance(model, Pointer):
        answer = row.tokens[slice(*(row.span or (0, 0)))].tolist()
    return _Input(
        row.tokens[:stop].tolist(),
        words,
        place,
        np.asarray(row.relevant[which, :stop]).tolist(),
        "".join(map(words, answer)),
        task.classes,
        tokenizer is None,
    )


def _names(task: Task) -> Callable[[int], str]:
    """Return what shows a token of a task to people."""
    if (tokenizer := task.tokenizer) is not None:
        return lambda token: tokenizer.decode([token])
    names = SYNTHETIC[task.name.partition(":")[0]].words
    return lambda token: names[token] if token < len(names) else str(token)


def _view(subject: _Subject, matter: _Input) -> InspectionView:
    from headtohead.report.inspection_page import InspectionView

    model, count = subject.model, len(matter.tokens)
    if not count:
        raise UserError("the text has no tokens; there is nothing to look at")
    cells = math.isqrt(2 * _MAX_CELLS // (model.size.layers * model.size.heads))
    most = min(model.size.context, cells)
    cut = max(0, count - most)
    notes = []
    if cut:
        why = f"the context is {most}" if most == model.size.context else f"a page holds {most}"
        lost = sum(matter.relevant[:cut]) if matter.relevant else 0
        words = f", {lost} of them relevant" if lost else ""
        notes.append(f"{count} tokens, and {why}: the first {cut} were cut off{words}.")
    place = None if matter.place is None else max(0, matter.place - cut)
    tokens = matter.tokens[cut:]
    looked = inspect_text(model, tokens, matter.words, matter.classes, place)
    without = [layer.mechanism for layer in looked.layers if layer.weights is None]
    if len(without) == len(looked.layers):
        names = ", ".join(dict.fromkeys(without))
        notes.append(f"{names} gives no attention map: only the prediction is shown.")
    return InspectionView(
        subject.label,
        subject.about,
        [matter.words(token) for token in tokens],
        looked,
        matter.relevant[cut:] if matter.relevant else (),
        matter.right,
        matter.apart,
        notes,
    )
