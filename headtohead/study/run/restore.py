"""Load a trained run's model from its directory."""

from __future__ import annotations

import torch

from headtohead.common.errors import DamagedFile, UserError
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.study.plan.dataset import task_model
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import RunDirectory
from headtohead.training.checkpoint import read_tensors, tensor_shapes


def restore(folder: RunDirectory, spec: RunSpec, layers: list[Composed]) -> Decoder:
    """Return the model with the weights of a finished run. Raise if the weights do not match the model."""
    folder.check_weights_unchanged()
    size, task = spec.size, spec.task
    shapes = tensor_shapes(folder.weights)
    if size.layers > len(shapes):
        raise UserError(f"{folder.weights} does not fit the run's model: it has {len(shapes)} tensors")
    # The model on the meta device takes no memory: the real model is built only if the weights match it.
    with torch.device("meta"):
        on_meta = task_model(task, size, layers, None) if task else Decoder(size, layers, seed=None)
    wanted = {name: tuple(tensor.shape) for name, tensor in on_meta.state_dict().items()}
    for name in sorted(wanted.keys() ^ shapes.keys()) or sorted(wanted):
        if wanted.get(name) != shapes.get(name):
            found, meant = (str(table.get(name, "missing")) for table in (shapes, wanted))
            raise UserError(
                f"{folder.weights} does not fit the run's model: {name} is {found} and should be {meant}"
            )
    model = task_model(task, size, layers, None) if task else Decoder(size, layers, seed=None)
    tensors = read_tensors(folder.weights)
    if any(bool(tensor.isnan().any()) for tensor in tensors.values()):
        raise DamagedFile(f"damaged file {folder.weights}: the weights contain NaN")
    model.load_state_dict(tensors)
    return model
