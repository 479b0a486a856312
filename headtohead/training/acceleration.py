"""Whether a model is compiled, its step recorded or its seeds stacked where nobody said so."""

from __future__ import annotations

import importlib.util

import torch

from headtohead.model.sizes import Size

# Parameters outside the feed-forward parts; below, launching kernels takes longer than they do, compiled or not.
_SMALLEST = 1_600_000


def compiles(wanted: bool | None, size: Size, device: torch.device) -> bool:
    """Return what was asked for, or, where nothing was, whether compiling pays: on a GPU, at 5m and above.

    Only what all arms of a contest share decides: none is compiled beside one that is not.
    """
    if wanted is not None:
        return wanted
    return compiler_serves(device) and not is_small(size)


def compiler_serves(device: torch.device) -> bool:
    """Return whether the compiler's kernels are of use on a device: on a GPU, with Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def is_small(size: Size) -> bool:
    """Return whether launching a step's kernels takes longer than they do."""
    return size.width * (size.vocabulary + 4 * size.width * size.layers) < _SMALLEST


def records(wanted: bool | None, size: Size, device: torch.device, compiled: bool) -> bool:
    """Return whether whole steps are recorded as a CUDA graph: on a GPU alone, and unless said otherwise where it pays."""
    able = device.type == "cuda" and not compiled
    return able and (is_small(size) if wanted is None else wanted)
