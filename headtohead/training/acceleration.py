"""Defaults: whether a model is compiled and whether its steps are captured as a CUDA graph."""

from __future__ import annotations

import importlib.util

import torch

from headtohead.model.sizes import Size

# Parameters outside the feed-forward layers. Below this, launching kernels takes longer than running them.
_SMALLEST = 1_600_000


def compiles(wanted: bool | None, size: Size, device: torch.device) -> bool:
    """Return `wanted` if given; otherwise True on a GPU from size 5m.

    The default depends only on what all arms of a contest share, so either all arms are compiled or none.
    """
    if wanted is not None:
        return wanted
    return compiler_serves(device) and not is_small(size)


def compiler_serves(device: torch.device) -> bool:
    """Return whether compiling helps on a device: a GPU with Triton installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def is_small(size: Size) -> bool:
    """Return whether launching a step's kernels takes longer than running them."""
    return size.width * (size.vocabulary + 4 * size.width * size.layers) < _SMALLEST


def records(wanted: bool | None, size: Size, device: torch.device, compiled: bool) -> bool:
    """Return whether steps are captured as a CUDA graph: only on a GPU; by default only for small models."""
    able = device.type == "cuda" and not compiled
    return able and (is_small(size) if wanted is None else wanted)
