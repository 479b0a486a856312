"""State of one forward pass that mechanisms do not read: rotary tables, the position of a captured decoding step, single rows,
tensors of the first layer.

`Frame.rotate`, `Frame.positions`, `Frame.attend` and `Frame.first` apply it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headtohead.kernels import rotary_table


class Rotary:
    """Rotary tables of one model, by head width; computed once and sliced."""

    def __init__(self, theta: float, context: int) -> None:
        self.theta, self.context = theta, context
        self.tables: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}

    def reach(self, length: int) -> None:
        """Extend the tables that are indexed by a position on the device to at least `length` positions."""
        self.context = max(length, self.context)

    def slice(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Return the table of consecutive positions for `like` (batch, heads, time, dim).

        On CPU it is repeated for every head in memory order, (heads, time, dim / 2, 2): the product then reads contiguous
        memory, four times faster than with a table shared by the heads. Elsewhere it is (time, dim / 2, 2).
        """
        return self._table(stop, like)[..., start:stop, :, :]

    def row(self, place: Tensor, like: Tensor) -> Tensor:
        """Return the table of one position (1,), a tensor on the device, in the same form as `slice`."""
        return self._table(self.context, like).index_select(-3, place)

    def gather(self, positions: Tensor, like: Tensor) -> Tensor:
        """Return the table of positions (batch, time) below the context for `like`, shared by all heads."""
        table = self._table(self.context, like)
        return (table[0] if table.ndim == 4 else table)[positions].unsqueeze(1)

    def _table(self, length: int, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        heads, dim = like.shape[1], like.shape[-1]
        key = (dim, heads if like.device.type == "cpu" else 0, dtype, like.device)
        table = self.tables.get(key)
        if table is None or table.shape[-3] < length:
            self.reach(length)
            table = rotary_table(torch.arange(self.context, device=like.device), dim, self.theta, dtype)
            if like.device.type == "cpu":
                table = table.unsqueeze(1).expand(-1, heads, -1, -1).contiguous().transpose(0, 1)
            self.tables[key] = table
        return table


@dataclasses.dataclass
class ForwardState:
    """How the decoder runs a forward pass: at a position known only on the device, or for one row of each sequence."""

    place: Tensor | None = None
    """(1,): the position of the single row of x in caches of fixed size; replaces `Frame.start` under a CUDA graph."""
    narrow: bool = False
    """Whether the last layer may compute only the requested rows: less work, same result up to rounding."""
    rows: Tensor | None = None
    """(batch,): the row of each sequence requested from this layer; None: every row."""
    tables: dict[tuple[int, int, torch.dtype], Tensor] = dataclasses.field(default_factory=dict)
    """Rotary tables of `place`, looked up once for all layers."""
    first: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """What the first layer that called `Frame.first` passed, by name."""

    def placed_table(self, rotary: Rotary, place: Tensor, x: Tensor) -> Tensor:
        """Return the rotary table of `place` for x (batch, heads, 1, dim)."""
        key = (x.shape[1], x.shape[-1], x.dtype)
        if key not in self.tables:
            self.tables[key] = rotary.row(place, x)
        return self.tables[key]
