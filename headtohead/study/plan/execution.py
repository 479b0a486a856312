"""How runs are executed on this machine: device, threads, data directory, micro-batch size."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import KeptWeights
from headtohead.training.settings import TrainSettings

_MAX_THREADS = 1024
"""Far more than cores; with tens of thousands the OpenMP library of torch crashes."""


@dataclass(frozen=True)
class ExecutionSettings:
    """Execution settings of this machine; they change at most the last digits of a result."""

    device: str = "cpu"
    devices: tuple[str, ...] = ()
    """Devices of the worker processes, if several: worker n has device n, counted round-robin. `device` is the first."""
    threads: int = 1
    data_dir: str = ""
    save_every: float = 60.0
    keep_weights: bool = True
    probed_later: bool = False
    """Whether probes may be taken in a later execution, as of trials of a tuning that are runs of the study."""
    compile: bool | None = None
    """Whether models are compiled. None: where it is faster."""
    micro: int = 0
    """Sequences per forward pass; 0 chooses by memory."""
    record: bool | None = None
    """Whether steps are captured as a CUDA graph. None: where it is faster."""
    log_circuits: bool = False
    """Whether to log every circuit's rates, gradients and product norms; always on for runs with circuit_lr."""

    def __post_init__(self) -> None:
        most = max(_MAX_THREADS, os.cpu_count() or 1)
        if not 1 <= self.threads <= most:
            raise UserError(f"threads={self.threads} is not between 1 and {most:,}")

    def weights_kept(self, probes: Sequence[str]) -> KeptWeights:
        """Return whether the weights of a run with these probes are kept."""
        if self.keep_weights:
            return "yes"
        return "until probed" if probes or self.probed_later else "no"


def layers_of(spec: RunSpec) -> list[Composed]:
    """Return the mechanism of each layer of a run, parsed from its text; this imports files of user code."""
    return [parse_layout(text).pattern[0] for text in spec.layers]


def micro_batch(size: Size, sequences: int, device: torch.device, stacked: int = 0) -> int:
    """Return how many sequences of each row fit into one forward pass, by the memory of their activations.

    The estimate assumes 14 states and 4 hidden rows per token and layer in float32, and errs high. On CPU the limit
    is 1 GiB on every machine, so that the order of additions, and with it the result, is the same.
    """
    return max(1, min(sequences, _sequences(size, device) // (stacked or 1)))


def max_rows(size: Size, training: TrainSettings, device: torch.device) -> int:
    """Return how many rows, each with a whole batch, fit into memory."""
    return _sequences(size, device) // max(1, training.batch // size.context)


def _sequences(size: Size, device: torch.device) -> int:
    # Logits are not counted, although populations compute them in full: small models have small vocabularies.
    per_sequence = 4 * size.context * (size.layers * (14 * size.width + 4 * size.ffn) + 4 * size.width)
    if device.type == "cpu":
        return 2**30 // per_sequence
    free, total = torch.cuda.mem_get_info(device)
    # A process may be limited to a share of its GPU.
    room = int(0.6 * min(free, torch.cuda.get_per_process_memory_fraction(device) * total))
    return room // per_sequence


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make a numbered GPU the current one: Triton launches kernels there, wherever their tensors are."""
    numbered = device.type == "cuda" and device.index is not None
    with torch.cuda.device(device) if numbered else nullcontext():
        yield


@contextmanager
def cpu_threads(count: int, device: torch.device) -> Iterator[None]:
    """Use as many torch threads as a run does: more threads slow small models down."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
