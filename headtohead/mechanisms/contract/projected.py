"""The standard layer in five stages: project -> evolve(q, k) -> position -> mix -> write.

Most mechanisms override one stage. A `Stage` is a mechanism that consists of an evolve stage only, so it composes with any
layer that has one query per key: `sharing:tie=kv+mine` in an arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from headtohead.common.errors import UserError
from headtohead.kernels import attention_weights, project, project_joined
from headtohead.mechanisms.contract.base import (
    Circuit,
    Component,
    Draw,
    Flops,
    Frame,
    Mechanism,
    Mode,
    Shape,
    Tags,
    circuits_by_name,
)
from headtohead.mechanisms.contract.cache import Cache, Entry


class Stage(Component):
    """A change of (q, k) before positions are applied, pointwise in batch, head and token."""

    one_query_per_key: ClassVar[bool] = True
    """Whether it requires as many key heads as query heads."""
    graph_safe: ClassVar[bool] = False
    """Whether it takes its position only from `frame.rotate` (`Mechanism.graph_safe`)."""

    def evolve(self, q: Tensor, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        """Return new q and k, both (batch, heads, time, dim)."""
        raise NotImplementedError

    def flops(self) -> float:
        """Return the matrix FLOPs this stage adds per token."""
        return 0.0


class Projected(Mechanism):
    """A multi-head layer with projections q, k, v, o."""

    o: nn.Linear
    no_stage: str = ""
    """Why no stage can be added, if none can; `{name}` and `{stage}` are replaced by their names."""

    def __init__(
        self, shape: Shape, options: Any, *, kv_heads: int = 0, window: int = 0, strict: bool = False
    ):
        super().__init__(shape, options)
        self.heads, self.dim = shape.heads, shape.head_dim
        self.kv_heads = kv_heads or shape.kv_heads
        if self.heads % self.kv_heads:
            raise UserError(f"{self.name}: {self.heads} heads cannot share kv_heads={self.kv_heads} evenly")
        self.window, self.strict = window, strict
        self.stages = nn.ModuleDict()

    def linear(
        self, wide_in: int, wide_out: int, *, output: bool = False, bias: bool | None = None
    ) -> nn.Linear:
        """Return a projection, with a bias if the model has biases."""
        if bias is None:
            bias = self.shape.bias == "all" or (self.shape.bias == "qkv" and not output)
        return nn.Linear(wide_in, wide_out, bias=bias)

    def add_stage(self, stage: Stage) -> None:
        """Add a stage to evolve, or raise an error that gives the reason."""
        if self.no_stage:
            raise UserError(self.no_stage.format(name=self.name, stage=stage.name))
        if stage.one_query_per_key and self.kv_heads != self.heads:
            raise UserError(
                f"{stage.name} needs one query per key; {self.name} has {self.heads} query and {self.kv_heads} key heads"
            )
        if stage.name in self.stages:
            raise UserError(f"{stage.name} is already in this layer; add a stage only once")
        self.stages[stage.name] = stage

    # The five stages.

    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (batch, heads, time, dim), k and v (batch, kv_heads, time, dim)."""
        raise NotImplementedError

    def evolve(self, q: Tensor, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        """Return q and k after the stages of `a+b`; the same tensors when there are none."""
        for _, stage in self._stages():
            q, k = stage.evolve(q, k, frame)
        return q, k

    def position(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v with positions applied."""
        return frame.rotate(q), frame.rotate(k), v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values (batch, heads, time, dim)."""
        if cache is not None:
            k, v = cache.append("k", k), cache.append("v", v)
        return frame.attend(q, k, v, window=self.window, strict=self.strict)

    def write(self, mixed: Tensor, frame: Frame) -> Tensor:
        """Return (batch, time, width): heads joined, then the output projection."""
        output: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return output

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the output of this layer for x (batch, time, width)."""
        q, k, v = self.positioned(x, frame, cache)
        return self.write(self.mix(q, k, v, frame, cache), frame)

    def positioned(
        self, x: Tensor, frame: Frame, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of the first three stages, q, k and v as `mix` takes them."""
        q, k, v = self.project(x, cache)
        q, k = self.evolve(q, k, frame)
        return self.position(q, k, v, frame)

    # Cost, cache and parameter groups.

    @property
    def narrows(self) -> bool:
        """True if nothing after the position stage is overridden: mixing and writing then accept a single row."""
        kind, own = type(self), Projected
        return (kind.forward, kind.mix, kind.write) == (own.forward, own.mix, own.write)

    def initialise(self, draw: Draw) -> None:
        """Set initial values; a stage sets its own."""
        super().initialise(draw)
        for name, stage in self._stages():
            stage.initialise(
                lambda key, shape, std=None, place=name: draw(f"stages.{place}.{key}", shape, std)
            )

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the softmax map (batch, heads, time, time)."""
        q, k, _ = self.positioned(x, frame)
        return attention_weights(q, k, frame.mask(x.device, self.window, self.strict))

    def cache_spec(self) -> tuple[Entry, ...]:
        """Keys and values of every token, or of the window.

        A subclass with another `mix` or `forward` may mask every token itself; it declares a window in its own entries.
        """
        kind, each = type(self), (self.kv_heads, self.dim)
        usual = (kind.forward, kind.mix) == (Projected.forward, Projected.mix)
        window = self.window if usual else 0
        return (Entry("k", each, window=window), Entry("v", each, window=window))

    def projection_flops(self, mode: Mode) -> float:
        """Return the FLOPs per token of the projections, two per weight."""
        return 2.0 * sum(child.weight.numel() for child in self.children() if isinstance(child, nn.Linear))

    def linear_flops(self, mode: Mode) -> float:
        """Return the FLOPs per token of the projections and stages."""
        return self.projection_flops(mode) + sum(stage.flops() for _, stage in self._stages())

    def key_flops(self, mode: Mode) -> float:
        """Return the FLOPs of one query per visible key, all heads: score and mix."""
        return 4.0 * self.heads * self.dim

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return projections + score and mix over the visible keys (causal) or all keys (full)."""
        linear, per_key = self.linear_flops(mode), self.key_flops(mode)
        if mode == "decode":
            keys = min(context, self.window) if self.window else context
            return Flops(linear + per_key * keys, linear + per_key * keys)
        seen = mean_keys(context, self.window, self.strict)
        return Flops(linear + per_key * seen, linear + per_key * context)

    def circuits(self) -> list[Circuit]:
        """Return the circuits by name, with those of the stages under their own tags."""
        own = circuits_by_name(self, {**self.circuit_tags(), "stages": "stages"})
        own = [circuit for circuit in own if circuit.tag != "stages"]
        for name, stage in self._stages():
            own += [circuit.prefixed(f"stages.{name}") for circuit in stage.circuits()]
        return own

    def circuit_tags(self) -> Tags:
        """Return `tags`; a subclass may choose them by its options."""
        return self.tags

    def graph_safe_stages(self) -> bool:
        """Return whether every stage of `a+b` is safe under a CUDA graph."""
        return all(stage.graph_safe for _, stage in self._stages())

    def _stages(self) -> list[tuple[str, Stage]]:
        return [(name, stage) for name, stage in self.stages.items() if isinstance(stage, Stage)]

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """Return (batch, heads, time, dim) from (batch, time, heads * dim)."""
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def in_heads(self, q: Tensor, k: Tensor, v: Tensor, *, values: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return projections (batch, time, ...) in heads: v in `values` heads, 0 for as many as k."""
        split, keys = self.split_heads, self.kv_heads
        return split(q, self.heads), split(k, keys), split(v, values or keys)


def mean_keys(context: int, window: int = 0, strict: bool = False) -> float:
    """Return the mean number of keys a query attends to in a causal context."""
    seen = min(window, context) if window else context
    pairs = seen * (seen + 1) / 2 + (context - seen) * seen
    if strict:
        pairs -= context - 1
    return pairs / context


def joined_linear(x: Tensor, layers: list[nn.Linear]) -> tuple[Tensor, ...]:
    """Return each layer's output for x; the parameters stay separate tensors."""
    return project(x, *_weights_and_biases(layers))


def joined_outputs(x: Tensor, layers: list[nn.Linear]) -> Tensor:
    """Return the outputs of `joined_linear` concatenated, (batch, time, ...)."""
    return project_joined(x, *_weights_and_biases(layers))


def _weights_and_biases(layers: list[nn.Linear]) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return [layer.weight for layer in layers], biases or None
