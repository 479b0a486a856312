"""Queries and keys from the companion, the fixed second sequence: the attention map does not depend on the input.

The companion X is a standard model run on a fixed input. The data use its attention map A with their own values:
q, k = norm(X) W_q, norm(X) W_k; o = A v with v = x W_v. The whole batch shares one map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.kernels import attention_weights, rotate
from headtohead.mechanisms.contract.base import Companion, CompanionSpec, Flops, Frame, Mode, Shape
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.contract.projected import joined_linear, mean_keys
from headtohead.mechanisms.families.deconstructed import Deconstructed, DeconstructedOptions

# Up to this length the batch's single map is materialized and applied in one product. It is quadratic in memory, so longer
# inputs use the attention kernel sequence by sequence.
LONGEST_MAP = 4096


@dataclass(frozen=True)
class AccompaniedOptions(DeconstructedOptions):
    """Options shared by the mechanisms with a companion."""

    length: int = option(
        0, "tokens of the companion; 0: the model's context; longer inputs are rejected", low=0
    )
    detach: bool = option(False, "stop gradients at the companion: they train only q and k")


class Accompanied(Deconstructed):
    """Softmax attention with the companion's queries and keys and the data's values."""

    Options: ClassVar[type] = AccompaniedOptions

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        self.length = options.length or shape.context
        if self.length < shape.context:
            raise UserError(
                f"{self.name}: length={self.length} is shorter than the context {shape.context}; the companion must cover "
                "every position"
            )

    def companion_spec(self) -> CompanionSpec | None:
        """Return the input of the companion's layer 0."""
        raise NotImplementedError

    def companion(self, frame: Frame) -> Companion:
        """Return the companion at this layer."""
        if frame.companion is None:
            raise UserError(f"{self.name} needs a companion, but this model has none")
        return frame.companion

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the output of this layer for x (batch, time, width); x may be the companion's own state."""
        if frame.start + frame.time > self.length:
            raise UserError(
                f"the companion holds {self.length} tokens; {frame.start + frame.time} were requested"
            )
        v = self.split_heads(self.v(x), self.kv_heads)
        if cache is None:
            q, k = self.companion(frame).once("qk", lambda: self._queries_keys(frame, frame.time))
        else:
            v = cache.append("v", v)
            if frame.start == 0:
                for name, table in zip("qk", self._queries_keys(frame, self.length), strict=True):
                    cache.tensors[name].copy_(table[0])
            q, k = cache.tensors["q"].unsqueeze(0), cache.tensors["k"].unsqueeze(0)
        q, k = _placed(q, frame), _placed(k, frame, keys=True)
        if frame.padding is not None or v.shape[-2] > LONGEST_MAP:
            batch = len(v)
            mixed = frame.attend(q.expand(batch, -1, -1, -1), k.expand(batch, -1, -1, -1), v)
        elif cache is None:
            (weights,) = self.companion(frame).once("map", lambda: (self._weights(q, k, frame),))
            mixed = shared_mix(weights, v)
        else:
            mixed = shared_mix(self._weights(q, k, frame), v)
        return self.write(mixed, frame)

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the softmax map (batch, heads, time, time), the same for every sequence without padding."""
        q, k = self._queries_keys(frame, frame.time)
        weights = self._weights(_placed(q, frame), _placed(k, frame, keys=True), frame)
        return weights.expand(len(x), -1, -1, -1)

    def _queries_keys(self, frame: Frame, rows: int) -> tuple[Tensor, Tensor]:
        """Return q and k (1, heads, rows, dim) of the companion's first rows, rotated by their positions in it."""
        state = self.companion(frame).state[:, :rows]
        if self.options.detach:
            state = state.detach()
        q, k = joined_linear(state, [self.q, self.k])
        q, k = self.evolve(self.split_heads(q, self.heads), self.split_heads(k, self.kv_heads), frame)
        if frame.rotary is None:
            return q, k
        return tuple(rotate(x, frame.rotary.slice(0, rows, x)) for x in (q, k))  # type: ignore[return-value]

    def _weights(self, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return attention_weights(q, k, frame.mask(q.device))

    # Cost and cache.

    def cache_spec(self) -> tuple[Entry, ...]:
        """Values of every token; the companion's queries and keys, one table each for the whole batch."""
        return (
            Entry("v", (self.kv_heads, self.dim)),
            Entry("q", (self.heads, self.length, self.dim), "shared"),
            Entry("k", (self.kv_heads, self.length, self.dim), "shared"),
        )

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return v, o and the mix for every token; q, k and the map once for the batch."""
        once = 2.0 * (self.q.weight.numel() + self.k.weight.numel())
        once += sum(stage.flops() for _, stage in self._stages())
        if mode == "prefill":
            once *= max(context, self.length) / context
        elif mode == "decode":
            once = 0.0
        linear = 2.0 * (self.v.weight.numel() + self.o.weight.numel()) + once / batch
        scored = 1.0 if context > LONGEST_MAP else 1.0 / batch
        per_key = 2.0 * self.heads * self.dim * (1.0 + scored)
        seen = context if mode == "decode" else mean_keys(context)
        return Flops(linear + per_key * seen, linear + per_key * context)


def _placed(table: Tensor, frame: Frame, keys: bool = False) -> Tensor:
    """Return the rows of a table (1, heads, rows, dim) at the data's positions, (batch, ...) if padding shifts them."""
    if frame.padding is None:
        return table[:, :, 0 if keys else frame.start : frame.start + frame.time]
    return table[0][:, frame.positions(table.device, keys)].transpose(0, 1)


def shared_mix(weights: Tensor, v: Tensor) -> Tensor:
    """Return (batch, heads, queries, dim): one map (1, heads, queries, keys) applied to v (batch, kv_heads, keys, dim)."""
    batch, groups, keys, dim = v.shape
    heads, queries = weights.shape[1:3]
    grouped = weights.to(v.dtype).reshape(groups, heads // groups * queries, keys)
    if queries < dim:  # repeating a small map is cheaper than transposing all values
        return (grouped.unsqueeze(0) @ v).view(batch, heads, queries, dim)
    mixed = grouped @ v.permute(1, 2, 0, 3).reshape(groups, keys, batch * dim)
    return mixed.view(groups, heads // groups, queries, batch, dim).permute(3, 0, 1, 2, 4).flatten(1, 2)
