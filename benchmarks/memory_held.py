"""Bytes held on a device while work is done, and what their growth with the length says; for the benchmarks here."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Growth of memory from one length to four times as much, 4 and 16 being linear and quadratic; and the share of one
# layer's map, (heads, time, time) in bf16, from which on what grows with the square is held to be a map.
LINEAR, A_MAP = 5.0, 0.25


def held_bytes(device: torch.device) -> int | None:
    """Return the bytes of all tensors on a GPU; None on a CPU, which does not say."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def peak_over(device: torch.device, work: Callable[[], object]) -> int:
    """Return the most bytes that the work held at once, over what was held before."""
    if device.type != "cuda":
        with CountedBytes() as counted:
            work()
        return counted.peak
    before = held_bytes(device) or 0
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class CountedBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, while they live; what a kernel uses inside is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what is new in its result."""
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
    """Return how many times as much the last length takes as the first."""
    first, last = rows[0].get(key), rows[-1].get(key)
    return round(last / first, 2) if first and last else None


def maps_in(rows: list[dict[str, Any]], key: str, heads: int) -> float | None:
    """Return what grows with the square of the length, at the last one, in maps (heads, time, time) of bf16.

    From two lengths 1 : r, bytes b and B = r b + (r^2 - r) c: the square's part at the last length is r^2 c.
    """
    first, last = rows[0].get(key), rows[-1].get(key)
    times = rows[-1]["context"] / rows[0]["context"]
    if not first or not last or times == 1:
        return None
    # Below 0 where a part is the same at every length.
    square = max(0.0, (last - times * first) * times / (times - 1))
    return round(square / (2 * heads * rows[-1]["context"] ** 2), 3)


def verdict(rows: list[dict[str, Any]], growth: float | None, maps: float | None) -> str:
    """Say in words what the growth from one length to four times as much means."""
    for row in rows:
        if "error" in row:
            return f"{row['error']} at {row['context']:,}"
    if growth is None or maps is None:
        return "one length says nothing"
    if maps >= A_MAP:
        return "a map was formed"
    return "linear" if growth <= LINEAR else "above linear, no map"
