"""Which path runs: the fast one, or the plain twin that defines it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor

# How often each was asked for: several threads may enter and leave in any order.
_plain = 0
_stacking = 0
_traced = 0
# Looked for, not imported: a command that runs on CPU does not wait for it. Both are read once: inside a compiled graph
# the environment is out of reach.
_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def plain() -> Iterator[None]:
    """Run every operation inside by its plain twin: for counting FLOPs and for proving the fast path right."""
    global _plain
    _plain += 1
    try:
        yield
    finally:
        _plain -= 1


def is_plain() -> bool:
    """Return whether the plain twins were asked for."""
    return _plain > 0


@contextmanager
def stacking() -> Iterator[None]:
    """Inside, `torch.vmap` stacks seeds: what it cannot look into is left to the plain twins, or folded into the batch."""
    global _stacking
    _stacking += 1
    try:
        yield
    finally:
        _stacking -= 1


def is_stacking() -> bool:
    """Return whether seeds are being stacked."""
    return _stacking > 0


@contextmanager
def traced() -> Iterator[None]:
    """Inside, operations are written down for a compiler, which joins plain passes with their neighbours itself."""
    global _traced
    _traced += 1
    try:
        yield
    finally:
        _traced -= 1


def is_compiling() -> bool:
    """Return whether what is done now is compiled."""
    return _traced > 0 or torch.compiler.is_compiling()


def eager_cpu(x: Tensor) -> bool:
    """Return whether the hand-written CPU path may serve `x`: eager, one full precision, no autocast.

    Under torch.compile the plain twins are better: the compiler fuses them itself.
    """
    return (
        not _plain
        and not _stacking
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def triton_serves(x: Tensor) -> bool:
    """Return whether a Triton kernel may serve `x`: on a GPU, or in Triton's interpreter, which the tests use.

    Holds while compiling too: the kernels are operators of their own, and the compiler leaves them whole. There are none
    for float64.
    """
    if _plain or not _TRITON or x.dtype == torch.float64:
        return False
    return _INTERPRETED or (x.is_cuda and torch.version.hip is None)


def triton_multiplies(x: Tensor) -> bool:
    """Return whether a Triton kernel that multiplies matrices may serve `x`: in the type that autocast would choose.

    The interpreter's products are right in float32 alone.
    """
    if not triton_serves(x):
        return False
    if _INTERPRETED:
        return x.device.type == "cpu" and x.dtype == torch.float32
    return not torch.is_autocast_enabled("cuda") or x.dtype == torch.get_autocast_dtype("cuda")


def path_name(device: torch.device) -> str:
    """Return which path fused operations take on a device, in one word: triton or plain."""
    return "triton" if triton_serves(torch.empty(0, dtype=torch.float32, device=device)) else "plain"


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products of float32 tensors stay float32, on the device of `x`."""
    known = x.device.type in ("cpu", "cuda")
    return torch.autocast(x.device.type, enabled=False) if known else nullcontext()
