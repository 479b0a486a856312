"""Which path runs: the fast one, or the plain twin that defines it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

_plain = False


@contextmanager
def plain() -> Iterator[None]:
    """Run every operation inside by its plain twin: for counting FLOPs and for proving the fast path right."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def is_plain() -> bool:
    """Return whether the plain twins were asked for."""
    return _plain


def eager_cpu(x: Tensor) -> bool:
    """Return whether the hand-written CPU path may serve `x`: eager, one full precision, no autocast.

    Under torch.compile the plain twins are better: the compiler fuses them itself.
    """
    return (
        not _plain
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products of float32 tensors stay float32, on the device of `x`."""
    known = x.device.type in ("cpu", "cuda")
    return torch.autocast(x.device.type, enabled=False) if known else nullcontext()


# Read once: inside a compiled graph the environment is out of reach.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_TRITON = importlib.util.find_spec("triton") is not None


def triton_serves(x: Tensor) -> bool:
    """Return whether a Triton kernel may serve `x`: on a GPU, or in Triton's interpreter; float64 has none."""
    return not _plain and _TRITON and x.dtype != torch.float64 and (x.is_cuda or _INTERPRETED)
