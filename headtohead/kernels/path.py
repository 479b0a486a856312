"""Select the implementation of an operation: the fast path, or the plain reference that defines it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor

# Nesting depth of each context manager below: several threads may enter and leave in any order.
_depth = {"plain": 0, "stacking": 0, "traced": 0}
# Looked up, not imported, so that CPU commands do not pay for the import. Both are read once: a compiled graph cannot
# read the environment.
_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def _inside(mode: str) -> Iterator[None]:
    _depth[mode] += 1
    try:
        yield
    finally:
        _depth[mode] -= 1


def plain() -> AbstractContextManager[None]:
    """Run every operation inside with its plain reference: to count FLOPs and to verify the fast path."""
    return _inside("plain")


def stacking() -> AbstractContextManager[None]:
    """Mark that `torch.vmap` runs a population: operations it has no rule for use the plain reference or a folded batch."""
    return _inside("stacking")


def traced() -> AbstractContextManager[None]:
    """Mark that operations are traced for a compiler, which fuses pointwise operations itself."""
    return _inside("traced")


def is_plain() -> bool:
    """Return whether the plain references are requested."""
    return _depth["plain"] > 0


def is_stacking() -> bool:
    """Return whether a population runs under `torch.vmap`."""
    return _depth["stacking"] > 0


def is_compiling() -> bool:
    """Return whether the current code is being compiled."""
    return _depth["traced"] > 0 or torch.compiler.is_compiling()


def eager_cpu(x: Tensor) -> bool:
    """Return whether the hand-written CPU path can process `x`: eager, float32 or float64, no autocast.

    Under torch.compile the plain references are faster: the compiler fuses them.
    """
    return (
        not _depth["plain"]
        and not _depth["stacking"]
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def triton_serves(x: Tensor) -> bool:
    """Return whether a Triton kernel can process `x`: on a GPU, or in Triton's interpreter, which the tests use.

    Also true while compiling: the kernels are custom operators, which the compiler does not break up. There are none for
    float64.
    """
    if is_plain() or not _TRITON or x.dtype == torch.float64:
        return False
    return _INTERPRETED or (x.is_cuda and torch.version.hip is None)


def triton_multiplies(x: Tensor) -> bool:
    """Return whether a Triton kernel with matrix products can process `x`: its dtype must be the one autocast would choose.

    The interpreter's products are correct in float32 only.
    """
    if not triton_serves(x):
        return False
    if _INTERPRETED:
        return x.device.type == "cpu" and x.dtype == torch.float32
    return not torch.is_autocast_enabled("cuda") or x.dtype == torch.get_autocast_dtype("cuda")


def path_name(device: torch.device) -> str:
    """Return the path that fused operations take on a device: "triton" or "plain"."""
    return "triton" if triton_serves(torch.empty(0, dtype=torch.float32, device=device)) else "plain"


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of `x`, so that products of float32 tensors stay float32."""
    known = x.device.type in ("cpu", "cuda")
    return torch.autocast(x.device.type, enabled=False) if known else nullcontext()
