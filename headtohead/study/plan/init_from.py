"""Initialization of a task's models from the weights of a trained run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import OWN_TOKENS
from headtohead.data.tokenizers import Tokenizer
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.classifier import Classifier, Pointer, Reader
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Size
from headtohead.study.plan.dataset import Dataset
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import RunDirectory, check_trained_weights, find_run
from headtohead.training.checkpoint import read_tensors, tensor_shapes

_FREE = ("dropout", "init_std")
"""Model settings that may differ, because they do not change the meaning of trained weights."""


@dataclass(frozen=True, eq=False)
class Start:
    """A trained run whose weights other runs start from."""

    folder: RunDirectory
    spec: RunSpec = field(repr=False)

    @property
    def run(self) -> str:
        """The run's id."""
        return self.folder.id

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; None if its task generates its own tokens."""
        own = self.spec.corpus.tokenizer == OWN_TOKENS
        return None if own else self.folder.tokenizer()

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer as a study setting."""
        if self.spec.corpus.tokenizer in ("bytes", OWN_TOKENS):
            return "bytes"
        return f"file:{(self.folder.path / 'tokenizer.json').resolve()}"


def find_start(given: str) -> Start:
    """Return the run at `given`; raise UserError if it has no trained weights."""
    folder = find_run(given)
    check_trained_weights(folder)
    return Start(folder, folder.spec())


def check_compatible(
    start: Start, dataset: Dataset, size: Size, layers: Sequence[Composed], model: Decoder
) -> None:
    """Raise UserError if tokenizer, model settings or tensor shapes differ from those of the run."""
    where = f"run {start.run} does not fit task '{dataset.label}'"
    if dataset.tokenizer is None:
        same = start.spec.corpus.label.partition(":")[0] == dataset.label.partition(":")[0]
        if start.tokenizer is not None or not same:
            raise UserError(f"{where}: the task has tokens of its own, which that run was not trained on")
    elif start.tokenizer is None or start.tokenizer.digest != dataset.tokenizer.digest:
        raise UserError(
            f"{where}: it was trained with another tokenizer ({start.spec.corpus.tokenizer}); "
            "leave tokenizer out to use the run's own"
        )
    then = start.spec.size
    for name in ("width", "layers", "heads"):
        if getattr(then, name) != getattr(size, name):
            raise UserError(
                f"{where}: its {name} is {getattr(then, name)}, the study's is {getattr(size, name)}"
            )
    for name, value in dataclasses.asdict(then.settings).items():
        if name not in _FREE and value != getattr(size.settings, name):
            raise UserError(
                f"{where}: its model.{name} is {value}, the study's is {getattr(size.settings, name)}"
            )
    assert isinstance(model, Reader)
    shapes = tensor_shapes(start.folder.weights)
    try:
        model.start_from({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    except UserError as error:
        raise UserError(f"{where}: {str(error).partition(': ')[2]}") from None


def load_weights(model: Decoder, path: str, run: str) -> None:
    """Load the weights of the run that a model starts from; raise if they are missing or changed."""
    folder = RunDirectory(Path(path))
    if folder.id != run or not folder.weights.is_file():
        raise UserError(f"run {run}, whose weights this run starts from, is no longer at {path}")
    folder.check_weights_unchanged()
    assert isinstance(model, Reader)
    task = folder.spec().task
    heads = {"classifier": Classifier, "pointer": Pointer}
    weights = read_tensors(folder.weights)
    # Shapes alone do not distinguish a pointer's head from a two-class head.
    if type(model) is not (heads.get(task.model, Reader) if task else Reader):
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("head.")}
    model.start_from(weights)
