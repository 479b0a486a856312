"""The cache of a layer: what a mechanism keeps between decoding steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from headtohead.common.errors import UserError

EntryKind = Literal["token", "sequence", "shared"]
ENTRY_KINDS: tuple[EntryKind, ...] = get_args(EntryKind)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a cache: per `token`, per `sequence`, or one `shared` table for the whole batch."""

    name: str
    shape: tuple[int, ...]
    kind: EntryKind = "token"
    dtype: torch.dtype | None = None
    """None: the dtype of the cache."""
    least: torch.dtype | None = None
    """Minimum precision: used if the cache's dtype is narrower, such as for angles, which bf16 cannot represent."""
    window: int = 0
    """Number of last tokens that a `token` entry keeps, in a ring buffer; 0: all."""

    def __post_init__(self) -> None:
        if self.window and self.kind != "token":
            raise ValueError(f"cache entry '{self.name}' is per {self.kind}; only a token entry has a window")

    def slots(self, capacity: int) -> int:
        """Return how many tokens are kept at once in a cache for `capacity` tokens."""
        return min(self.window, capacity) if self.window else capacity

    def allocation(self, batch: int, capacity: int) -> tuple[int, ...]:
        """Return the shape to allocate; the time axis of a `token` entry is its second to last."""
        if self.kind == "shared":
            return self.shape
        if self.kind == "sequence":
            return (batch, *self.shape)
        return (batch, *self.shape[:-1], self.slots(capacity), self.shape[-1])

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype this entry has in a cache made with `dtype`."""
        if self.dtype is not None:
            return self.dtype
        return dtype if self.least is None else torch.promote_types(dtype, self.least)

    def bytes(self, batch: int, capacity: int, dtype: torch.dtype) -> int:
        """Return the size of this entry in bytes."""
        return math.prod(self.allocation(batch, capacity)) * self.kept(dtype).itemsize


class Cache:
    """State of one layer between decoding steps."""

    def __init__(
        self, spec: Sequence[Entry], batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.capacity, self.length = capacity, 0
        self.place: Tensor | None = None
        """(1,): the position of the next token, on the device; `append` then returns whole buffers."""
        self.tensors = {
            entry.name: torch.zeros(entry.allocation(batch, capacity), dtype=entry.kept(dtype), device=device)
            for entry in spec
        }
        self.windows = {entry.name: entry.window for entry in spec if entry.window}
        self.states = [entry.name for entry in spec if entry.kind == "sequence"]
        """Entries that a step may update from their own content, so that repeating it changes them again."""
        self.folded: dict[str, Tensor] = {}
        """Weights precomputed for decoding; not counted in the cache's bytes."""

    def append(self, name: str, value: Tensor) -> Tensor:
        """Append value (batch, ..., time, dim) and return the whole sequence (batch, ..., length so far, dim).

        An entry with a window returns what the rows of `value` attend to: the last window - 1 tokens before them, then
        `value`. With a position on the device, write there and return the whole buffer (batch, ..., slots, dim), in which
        position p of a window is in slot p modulo slots.
        """
        tensor, stop = self.tensors[name], self.length + value.shape[-2]
        if self.place is not None:
            slot = self.place % tensor.shape[-2] if name in self.windows else self.place
            return tensor.index_copy_(-2, slot, value.to(tensor.dtype))
        if stop > self.capacity:
            raise UserError(f"the cache holds {self.capacity} tokens; {stop} were requested")
        if name in self.windows:
            return self._append_to_ring(tensor, value.to(tensor.dtype), self.windows[name])
        tensor[..., self.length : stop, :] = value
        return tensor[..., :stop, :]

    def _append_to_ring(self, ring: Tensor, value: Tensor, window: int) -> Tensor:
        """Write the last tokens of value into the ring; return the tokens before it that are visible, and value."""
        slots, time = ring.shape[-2], value.shape[-2]
        before = min(self.length, window - 1)
        seen = torch.cat((*_ring_parts(ring, self.length - before, before), value), -2)
        kept = min(time, slots)
        written, first = value[..., time - kept :, :], 0
        for part in _ring_parts(ring, self.length + time - kept, kept):
            part.copy_(written[..., first : first + part.shape[-2], :])
            first += part.shape[-2]
        return seen

    @property
    def bytes(self) -> int:
        """Return the bytes actually allocated, each storage once."""
        storages = [tensor.untyped_storage() for tensor in self.tensors.values()]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _ring_parts(ring: Tensor, start: int, count: int) -> list[Tensor]:
    """Return the slots of `count` consecutive positions from `start` as views in order: one, or two around the end."""
    slots = ring.shape[-2]
    first = start % slots
    split = min(count, slots - first)
    return [ring[..., first : first + split, :], ring[..., : count - split, :]][: 1 + (count > split)]
