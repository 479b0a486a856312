"""The batches that the causality gate runs on, and the gate for a trained run."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from headtohead.common.errors import first_line
from headtohead.evaluation.loss import windows_per_pass
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.check.gate import GateResult, Trial, check_causality
from headtohead.model.decoder import Decoder
from headtohead.study.plan.dataset import Dataset, TaskDataset
from headtohead.training.batches import BatchSource, WindowBatches


def has_user_code(layers: Iterable[Composed]) -> bool:
    """Return whether a layer contains a user's class."""
    return any(composed.user_code for composed in layers)


def trial_of(
    dataset: Dataset, batches: BatchSource, context: int, precision: str, micro: int, device: torch.device
) -> Trial:
    """Return batches as large as those used for training and scoring: a leak may appear only in large batches."""
    if isinstance(batches, WindowBatches):
        rows = (max(2, micro), max(2, windows_per_pass(device, context)))
        train, score = (batches.windows.batch(0, count)[0].to(device) for count in rows)
        return Trial(train, score, precision)
    assert isinstance(dataset, TaskDataset)
    assert dataset.task is not None
    part = next(iter(batches.parts(0, max(2, micro))))
    tokens, padding = (_two(one, device) for one in (part.tokens, part.padding))
    assert tokens is not None
    varied = len(set(dataset.lengths)) > 1
    return Trial(tokens, tokens, precision, padding, padded=varied, causal=dataset.task.causal)


def _two(rows: Tensor | None, device: torch.device) -> Tensor | None:
    """Return at least two rows on the device."""
    if rows is None:
        return None
    return (rows if len(rows) > 1 else rows.repeat(2, 1)).to(device)


def check_causality_halving(model: Decoder, trial: Trial, *, shake: bool) -> GateResult:
    """Return the gate's findings; halve the batches when memory runs out."""
    while True:
        try:
            return check_causality(model, trial, shake=shake)
        except torch.OutOfMemoryError:
            half = max(2, max(len(trial.train), len(trial.score)) // 2)
            if half >= max(len(trial.train), len(trial.score)):
                raise
            padding = None if trial.padding is None else trial.padding[:half]
            trial = Trial(
                trial.train[:half],
                trial.score[:half],
                trial.precision,
                padding,
                trial.padded,
                trial.causal,
            )
            torch.cuda.empty_cache()


def check_trained(
    model: Decoder, dataset: Dataset, batches: BatchSource, precision: str, micro: int
) -> GateResult:
    """Return the gate's findings for a trained model, which is left unchanged. A check that raises has failed."""
    training, compiled = model.training, model.__dict__.pop("hidden", None)
    kept = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    checked = model
    try:
        with suppress(Exception):  # a model that cannot be copied is checked itself
            checked = copy.deepcopy(model)
        trial = trial_of(dataset, batches, model.size.context, precision, micro, model.readout.device)
        return check_causality_halving(checked, trial, shake=False)
    except Exception as error:
        return GateResult(failed=(f"the check after training raised {first_line(error)}",))
    finally:
        model.load_state_dict(kept)
        model.train(training)
        if compiled is not None:
            model.__dict__["hidden"] = compiled
