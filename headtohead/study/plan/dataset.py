"""Datasets: a common interface to corpora and tasks for planning, training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from headtohead.common.errors import UserError
from headtohead.data.coherence import check_piece_length
from headtohead.data.corpora import stable_name
from headtohead.data.shards import Prepared, prepare, split_note
from headtohead.data.tasks.base import Task
from headtohead.data.tasks.registry import prepare_task
from headtohead.data.tokenizers import Tokenizer
from headtohead.data.windows import Windows
from headtohead.evaluation.loss import score_split
from headtohead.evaluation.references import reference_lines
from headtohead.evaluation.tasks import (
    MARGINS,
    as_phrase,
    check_answerable,
    chosen_metric,
    score_task,
    task_references,
)
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.classifier import Classifier, Pointer, Reader
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Size
from headtohead.study.store.manifest import Measure
from headtohead.study.store.result import Score, score_of
from headtohead.study.store.run_spec import RunSpec, TaskKind
from headtohead.study.store.run_store import RunDirectory
from headtohead.training.batches import (
    BatchSource,
    Division,
    TaskBatches,
    WindowBatches,
    divide,
    example_length,
)
from headtohead.training.settings import TrainSettings

Layers = Sequence[Composed]
Progress = Callable[[float], None]


class Dataset(Protocol):
    """A corpus or a task."""

    label: str
    content: str
    """Hash of everything that determines the data a run sees."""
    vocabulary: int
    tokenizer: Tokenizer | None
    task: TaskKind | None
    """The kind of model for the task, part of the run's identity; None for a corpus."""
    notes: Mapping[str, int]
    """Counts of the examples that a task leaves out, by reason; empty for a corpus."""

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per token of the train split."""
        ...

    def name(self, given: str) -> str:
        """Return a name that does not depend on the working directory."""
        ...

    def measure(self, margin: float | None) -> Measure | None:
        """Return the metric and margin of a comparison; None means bits per byte and the study's margin."""
        ...

    def references(self) -> dict[str, float]:
        """Return the scores of trivial predictors, by name."""
        ...

    def on_meta(self, size: Size, layers: Layers) -> Decoder:
        """Return the model on the meta device."""
        ...

    def model(self, size: Size, layers: Layers, seed: int) -> Decoder:
        """Return the initialized model."""
        ...

    def check_arm(self, size: Size, model: Decoder) -> None:
        """Raise UserError if the model cannot be trained on this dataset."""
        ...

    def batches(self, size: Size, training: TrainSettings, seed: int) -> BatchSource:
        """Return the batches of a run."""
        ...

    def steps(self, size: Size, training: TrainSettings) -> int:
        """Return the number of steps of a run."""
        ...

    def trained(self, training: TrainSettings, steps: int) -> int:
        """Return the non-padding tokens of `steps` steps; for a task, the average over data orders."""
        ...

    def flops(self, model: Decoder, training: TrainSettings) -> float:
        """Return forward FLOPs per token of a training step, counting only the keys each query attends to."""
        ...

    def score(self, model: Decoder, split: str, precision: str, progress: Progress) -> Score:
        """Return the scores of a split."""
        ...

    def scored_tokens(self) -> int:
        """Return the number of tokens in valid and test, which the final evaluation scores."""
        ...


class CorpusDataset:
    """A corpus: windows of text, scored in bits per byte."""

    task: TaskKind | None = None
    notes: Mapping[str, int] = MappingProxyType({})

    def __init__(self, corpus: Prepared) -> None:
        self.corpus, self.label, self.content = corpus, corpus.label, corpus.content
        self.tokenizer: Tokenizer | None = corpus.tokenizer
        self.vocabulary = corpus.tokenizer.vocabulary

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per token of the train split."""
        train = self.corpus.splits["train"]
        return train.bytes / max(1, len(train.tokens))

    def name(self, given: str) -> str:
        """Return a name that does not depend on the working directory."""
        return stable_name(given)

    def measure(self, margin: float | None) -> Measure | None:
        """Return None: bits per byte and the study's margin."""
        return None

    def references(self) -> dict[str, float]:
        """Return the reference lines in bits per byte."""
        return reference_lines(self.corpus)

    def on_meta(self, size: Size, layers: Layers) -> Decoder:
        """Return the decoder on the meta device."""
        return Decoder.on_meta(size, layers)

    def model(self, size: Size, layers: Layers, seed: int) -> Decoder:
        """Return the decoder; a companion is taken from the train split."""
        return Decoder(size, layers, seed, companion=self.corpus.splits["train"].tokens)

    def check_arm(self, size: Size, model: Decoder) -> None:
        """Raise UserError if the context is longer than a split or the companion longer than the train split."""
        for split in ("train", "test", "valid"):
            tokens = len(self.corpus.splits[split].tokens)
            if tokens <= size.context:
                raise UserError(
                    f"corpus {self.label}: the {split} split has {tokens:,} tokens, fewer than the context {size.context}"
                )
        check_piece_length(self.label, self.corpus.notes, size.context * self.bytes_per_token)
        _check_companion_length(f"corpus {self.label}", len(self.corpus.splits["train"].tokens), model)

    def batches(self, size: Size, training: TrainSettings, seed: int) -> BatchSource:
        """Return windows in the seed's order."""
        windows = Windows(self.corpus.splits["train"], size.context, seed)
        return WindowBatches(windows, training, size.vocabulary)

    def steps(self, size: Size, training: TrainSettings) -> int:
        """Return the number of steps of a run."""
        return training.steps(size.context)

    def trained(self, training: TrainSettings, steps: int) -> int:
        """Return the tokens of `steps` steps."""
        return steps * training.batch

    def flops(self, model: Decoder, training: TrainSettings) -> float:
        """Return forward FLOPs per token at the full context."""
        context = model.size.context
        return model.flops(context, max(1, training.batch // context)).causal

    def score(self, model: Decoder, split: str, precision: str, progress: Progress) -> Score:
        """Return the loss on a split."""
        lengths = self.corpus.tokenizer.token_bytes()
        found = score_split(model, self.corpus.splits[split], lengths, precision=precision, progress=progress)
        return score_of(vars(found))

    def scored_tokens(self) -> int:
        """Return the number of tokens in valid and test."""
        return sum(len(self.corpus.splits[split].tokens) for split in ("valid", "test"))


class TaskDataset:
    """A task: its model is a classifier, a reader or a pointer, scored by the task's metric."""

    def __init__(self, task: Task, *, causal: bool = True, answer: str = "write", metric: str = "") -> None:
        self.examples, self.label, self.content = task, task.name, task.content
        self.tokenizer, self.vocabulary = task.tokenizer, task.vocabulary
        self.notes: Mapping[str, int] = task.notes
        self.metric = chosen_metric(task, metric)
        self.pointing = answer == "point"
        if self.pointing:
            check_answerable(task)
        elif task.written and not causal:
            hint = "" if task.tokenizer else "; form=place reads the answer at the input positions"
            raise UserError(
                f"task '{task.name}' generates its answer and needs a causal model; a bidirectional one would see it{hint}"
            )
        # `answers` changes the run id: earlier runs sampled their answers and are not comparable.
        written = not task.classes and not self.pointing and as_phrase(task)
        self.task: TaskKind | None = TaskKind(
            model="classifier" if task.classes else "pointer" if self.pointing else "reader",
            classes=len(task.classes),
            causal=causal,
            answers="likeliest" if written else "",
        )

    @cached_property
    def lengths(self) -> list[int]:
        """Non-padding tokens of each example of the train split."""
        return [example_length(example, not self.pointing) for example in self.examples.splits["train"]]

    @property
    def bytes_per_token(self) -> float:
        """1: a task's length is always given in tokens."""
        return 1.0

    def name(self, given: str) -> str:
        """Return the task's name."""
        return given

    def measure(self, margin: float | None) -> Measure | None:
        """Return the task's metric with `margin`, or with the default margin of the metric."""
        return Measure(self.metric, "higher", MARGINS[self.metric] if margin is None else margin)

    def references(self) -> dict[str, float]:
        """Return the scores of chance and of the majority class in the task's metric."""
        return task_references(self.examples, self.metric)

    def on_meta(self, size: Size, layers: Layers) -> Decoder:
        """Return the model on the meta device."""
        assert self.task is not None
        with torch.device("meta"):
            return task_model(self.task, size, layers, None)

    def model(self, size: Size, layers: Layers, seed: int) -> Decoder:
        """Return the model; a companion is taken from the concatenated examples of the train split."""
        assert self.task is not None
        text = np.concatenate([example.tokens for example in self.examples.splits["train"]])
        return task_model(self.task, size, layers, seed, text)

    def check_arm(self, size: Size, model: Decoder) -> None:
        """Raise UserError for mechanisms without the padding or bidirectional support that the task needs."""
        assert self.task is not None
        model._check_supported(len(set(self.lengths)) > 1, self.task.causal)
        _check_companion_length(f"task {self.label}", sum(self.lengths), model)

    def batches(self, size: Size, training: TrainSettings, seed: int) -> BatchSource:
        """Return batches in the seed's order."""
        train, outputs = self.examples.splits["train"], len(self.examples.classes) or self.vocabulary
        return TaskBatches(train, training, seed, outputs, pointing=self.pointing)

    def _division(self, training: TrainSettings) -> Division:
        return divide(self.lengths, training.batch)

    def steps(self, size: Size, training: TrainSettings) -> int:
        """Return the number of steps of a run."""
        return self._division(training).steps(training)

    def trained(self, training: TrainSettings, steps: int) -> int:
        """Return the non-padding tokens of `steps` steps, averaged over data orders."""
        return self._division(training).trained(steps)

    def flops(self, model: Decoder, training: TrainSettings) -> float:
        """Return forward FLOPs per token at the mean example length; a bidirectional model attends to all keys."""
        assert self.task is not None
        mean = max(1, round(sum(self.lengths) / len(self.lengths)))
        found = model.flops(mean, self._division(training).examples)
        return found.causal if self.task.causal else found.full

    def score(self, model: Decoder, split: str, precision: str, progress: Progress) -> Score:
        """Return every metric of the task on a split."""
        assert isinstance(model, Reader)
        return score_of(score_task(model, self.examples, split, precision=precision, progress=progress))

    def scored_tokens(self) -> int:
        """Return the number of tokens in valid and test."""
        return sum(
            example_length(example, not self.pointing)
            for split in ("valid", "test")
            for example in self.examples.splits[split]
        )


def dataset_of(run: RunDirectory, spec: RunSpec, data_dir: str | Path | None = None) -> Dataset:
    """Return the dataset of a run; raise UserError if its content has changed."""
    source, task = spec.corpus, spec.task
    tokenizer = source.tokenizer
    if (
        tokenizer.startswith("file:") and not Path(tokenizer[5:]).is_file()
    ):  # it may have moved; the run keeps a copy
        tokenizer = f"file:{run.path / 'tokenizer.json'}"
    dataset: Dataset
    if task is None:
        dataset = CorpusDataset(prepare(source.name, tokenizer, data_dir=data_dir or None))
    else:
        key = (source.name, tokenizer, spec.size.context, str(data_dir or ""))
        answer = "point" if task.model == "pointer" else "write"
        dataset = TaskDataset(_task(*key, source.content), causal=task.causal, answer=answer)
    if dataset.content != source.content:
        raise UserError(
            f"{'task' if task else 'corpus'} {source.name} has changed since this run was planned; restore the old "
            "text, or start the study again to plan new runs"
        )
    return dataset


@lru_cache(maxsize=2)
def _task(name: str, tokenizer: str, context: int, data_dir: str, content: str) -> Task:
    """Return a task, cached for consecutive runs. `content`, its expected hash, is part of the cache key."""
    return prepare_task(name, tokenizer, context, data_dir=data_dir or None)


def split_notes(datasets: Iterable[Dataset]) -> list[str]:
    """Return how the documents of users' texts were split."""
    found = [split_note(dataset.corpus) for dataset in datasets if isinstance(dataset, CorpusDataset)]
    return list(dict.fromkeys(filter(None, found)))


def data_of(dataset: Dataset) -> Prepared | Task:
    """Return the underlying corpus or task."""
    if isinstance(dataset, TaskDataset):
        return dataset.examples
    assert isinstance(dataset, CorpusDataset)
    return dataset.corpus


def task_model(task: TaskKind, size: Size, layers: Layers, seed: int | None, companion: Any = None) -> Reader:
    """Return the model for a task."""
    if task.model == "classifier":
        return Classifier(size, layers, task.classes, seed, companion, causal=task.causal)
    kind = Pointer if task.model == "pointer" else Reader
    return kind(size, layers, seed, companion, causal=task.causal)


def _check_companion_length(where: str, tokens: int, model: Decoder) -> None:
    needed = model.companion_spec
    if needed and needed.start == "tokens" and tokens < needed.offset + needed.length:
        raise UserError(
            f"{where}: the train split has {tokens:,} tokens; the companion takes {needed.length:,} "
            f"from token {needed.offset:,} on"
        )
