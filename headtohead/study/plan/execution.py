"""How runs are executed on this machine: device, threads, data directory, and how much fits into memory."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch

from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size
from headtohead.training.settings import TrainSettings


@dataclass(frozen=True)
class ExecutionSettings:
    """How runs are done here; nothing of it changes a result beyond its last digits."""

    device: str = "cpu"
    threads: int = 1
    data_dir: str = ""
    save_every: float = 60.0
    keep_weights: bool = True
    compile: bool | None = None
    """Whether models are compiled; None: where it pays."""
    micro: int = 0
    """Sequences per pass; 0 chooses by memory."""
    record: bool | None = None
    """Whether steps are recorded as a CUDA graph; None: where it pays."""
    log_circuits: bool = False
    """Whether every circuit's rates, gradients and product norms are logged; runs with circuit_lr always are."""


def layers_of(record: dict[str, Any]) -> list[Composed]:
    """Return what stands in each layer of a run's record, read from its text."""
    return [parse_layout(text).pattern[0] for text in record["layers"]]


def micro_batch(size: Size, sequences: int, device: torch.device, stacked: int = 0) -> int:
    """Return how many sequences of each seed go through the model at once, by the memory their activations take.

    The estimate holds some 14 states and 4 hidden rows per token and layer in float32, and errs high. On CPU the
    limit is one gigabyte on every machine, so that the order of additions, and with it the result, is the same.
    """
    return max(1, min(sequences, _sequences(size, device) // (stacked or 1)))


def max_rows(size: Size, training: TrainSettings, device: torch.device) -> int:
    """Return how many seeds of a whole batch each the memory holds at once."""
    return _sequences(size, device) // max(1, training.batch // size.context)


def _sequences(size: Size, device: torch.device) -> int:
    # Stacked seeds form their logits whole; a vocabulary of a small model is small.
    per_sequence = 4 * size.context * (size.layers * (14 * size.width + 4 * size.ffn) + 4 * size.width)
    room = 2**30 if device.type == "cpu" else int(0.6 * torch.cuda.mem_get_info(device)[0])
    return room // per_sequence


def execution_settings_from(text: str) -> ExecutionSettings:
    """Return conditions from JSON, as a worker is told them."""
    known = {field.name for field in dataclasses.fields(ExecutionSettings)}
    return ExecutionSettings(**{key: value for key, value in json.loads(text).items() if key in known})
