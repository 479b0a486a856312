"""Measure the memory of a computation on a device and its growth with the sequence length; used by other benchmarks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headtohead.bench.clock import allocated, peak_bytes, wait

# LINEAR: largest growth from one length to four times the length that counts as linear (4 is linear, 16 quadratic).
# A_MAP: quadratic memory above this share of one layer's map, (heads, time, time) in bf16, counts as a map.
LINEAR, A_MAP = 5.0, 0.25


def held_bytes(device: torch.device) -> int | None:
    """Return the bytes of all tensors on a GPU; None on a CPU, which does not report them."""
    wait(device)
    return allocated(device) if device.type == "cuda" else None


def peak_over(device: torch.device, work: Callable[[], object]) -> int:
    """Return the peak bytes allocated during the work, beyond those allocated before."""
    if (peak := peak_bytes(work, device, held_bytes(device) or 0)) is not None:
        return peak
    with CountedBytes() as counted:
        work()
    return counted.peak


class CountedBytes(TorchDispatchMode):
    """Counts the bytes of live tensors created by operators; memory used inside a kernel is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count the new storage in its result."""
        inputs = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not torch.is_tensor(leaf):
                continue
            storage = leaf.untyped_storage()
            if storage._cdata in inputs or storage in self.known:
                continue
            self.known.add(storage)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, count: int) -> None:
        self.now -= count


def grown(rows: list[dict[str, Any]], key: str) -> float | None:
    """Return the ratio of the last length's bytes to the first's."""
    first, last = rows[0].get(key), rows[-1].get(key)
    return round(last / first, 2) if first and last else None


def maps_in(rows: list[dict[str, Any]], key: str, heads: int) -> float | None:
    """Return the quadratic part of the memory at the last length, in maps (heads, time, time) of bf16.

    From two lengths 1 : r, bytes b and B = r b + (r^2 - r) c: the quadratic part at the last length is r^2 c.
    """
    first, last = rows[0].get(key), rows[-1].get(key)
    times = rows[-1]["context"] / rows[0]["context"]
    if not first or not last or times == 1:
        return None
    # Negative where part of the memory does not depend on the length.
    square = max(0.0, (last - times * first) * times / (times - 1))
    return round(square / (2 * heads * rows[-1]["context"] ** 2), 3)


def verdict(rows: list[dict[str, Any]], growth: float | None, maps: float | None) -> str:
    """Return what the growth from one length to four times the length means."""
    for row in rows:
        if "error" in row:
            return f"{row['error']} at {row['context']:,}"
    if growth is None or maps is None:
        return "growth needs two lengths"
    if maps >= A_MAP:
        return "a map was formed"
    return "linear" if growth <= LINEAR else "above linear, no map"
