"""The mechanism contract: the interface of a token-mixing layer.

A mechanism needs `__init__(self, shape, options)` and `forward(self, x, frame)`; then it can race. Everything else below
has a default and can be added later; `h2h check` lists what is missing for the next level.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from headtohead.common.errors import UserError
from headtohead.kernels import attend, attend_placed, rotate
from headtohead.kernels.attention.softmax import view_mask
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.forward_state import ForwardState as ForwardState
from headtohead.mechanisms.contract.forward_state import Rotary as Rotary
from headtohead.mechanisms.contract.options import Options, changed_options, value_text

Positions = Literal["rope", "learned", "none"]
Bias = Literal["none", "qkv", "all"]
Mode = Literal["train", "prefill", "decode"]
TAGS = ("qk", "ov", "both", "own")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The dimensions and settings of the model that a mechanism is built for."""

    width: int
    heads: int
    layer: int = 0
    layers: int = 1
    context: int = 128
    kv_heads: int = 0
    positions: Positions = "rope"
    bias: Bias = "none"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width % self.heads:
            raise UserError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.positions == "rope" and self.head_dim % 2:
            raise UserError(f"rope rotates pairs of coordinates, but head width {self.head_dim} is odd")
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.kv_heads < 0 or self.heads % self.kv_heads:
            raise UserError(f"{self.heads} heads cannot share {self.kv_heads} kv heads evenly")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.width // self.heads


@dataclasses.dataclass(frozen=True)
class Supports:
    """What a mechanism supports; anything else is rejected, not ignored."""

    positions: frozenset[str] = frozenset(("rope", "learned", "none"))
    bidirectional: bool = True
    padding: bool = True


@dataclasses.dataclass(frozen=True)
class CompanionSpec:
    """What a mechanism requires of the companion, the fixed second sequence; a model has one companion."""

    length: int
    """Number of tokens; a layer rejects longer inputs."""
    start: Literal["tokens", "noise"] = "tokens"
    """Input of layer 0: the embeddings of fixed tokens, or random vectors that are never trained."""
    offset: int = 0
    """Offset of the first token in the text it is cut from."""
    sigma: float = 0.0
    """Standard deviation of the noise."""


@dataclasses.dataclass
class Companion:
    """The companion at one layer, shared by the layer's call on the companion and its call on the data."""

    state: Tensor
    """(1, length, width): the companion's normalized state at this layer."""
    kept: dict[str, tuple[Tensor, ...]] = dataclasses.field(default_factory=dict)

    def once(self, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the result of `make`, computed on first use: it is the same for the whole batch."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


@dataclasses.dataclass
class Frame:
    """The inputs of a layer other than x (batch, time, width)."""

    start: int = 0
    """Position of the first row of x; earlier tokens are in the cache."""
    time: int = 0
    """Number of rows of x."""
    causal: bool = True
    padding: Tensor | None = None
    """(batch, start + time), true at real tokens; None without padding."""
    rotary: Rotary | None = None
    """Rotary tables, if the model's positions are `rope`; `rotate` applies them."""
    embeddings: Tensor | None = None
    """(batch, time, width): the embeddings that are the input of layer 0."""
    norm: Callable[[Tensor], Tensor] | None = None
    """This block's norm, to apply to the embeddings."""
    companion: Companion | None = None
    """The companion at this layer; None without one, or if its tables are already in the cache."""
    training: bool = False
    losses: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    # A function: torch.compile cannot trace a class as the factory.
    state: ForwardState = dataclasses.field(default_factory=lambda: ForwardState(), repr=False)
    """Used by the methods below; a mechanism does not read it."""

    def add_loss(self, name: str, value: Tensor) -> None:
        """Add a training-only loss term; it is logged separately under its name."""
        self.losses[name] = self.losses[name] + value if name in self.losses else value

    def first(self, name: str, value: Tensor) -> Tensor:
        """Return the value that the first layer to call this with `name` passed in this forward pass: shared across layers."""
        return self.state.first.setdefault(name, value)

    def positions(self, device: torch.device, keys: bool = False) -> Tensor:
        """Return the positions of x's rows (time,), or of all keys so far; (batch, ...) if padding shifts them."""
        if self.state.place is not None and not keys:
            return self.state.place
        first = 0 if keys else self.start
        if self.padding is None:
            return torch.arange(first, self.start + self.time, device=device)
        return (self.padding.cumsum(-1) - 1).clamp_min(0)[:, first:]

    def rotate(self, x: Tensor, keys: bool = False, inverse: bool = False) -> Tensor:
        """Return x (batch, heads, time, dim) rotated by its positions; unchanged if the model has no rope."""
        if self.rotary is None:
            return x
        place = self.state.place
        if place is not None and keys:
            table = self.rotary.slice(0, x.shape[-2], x)
        elif place is not None:
            table = self.state.placed_table(self.rotary, place, x)
        elif self.padding is None:
            table = self.rotary.slice(0 if keys else self.start, self.start + self.time, x)
        else:
            table = self.rotary.gather(self.positions(x.device, keys), x)
        return rotate(x, table, inverse)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int = 0,
        strict: bool = False,
        scale: float | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return softmax attention (batch, heads, time, dim) with this frame's mask.

        `window` is the number of keys a query attends to, itself included; k and v may then come from cache entries with
        that window.
        """
        if (place := self.state.place) is not None:
            if bias is not None:
                raise ValueError("a CUDA graph step supports no bias on the scores")
            return attend_placed(q, k, v, place, window=window, strict=strict, scale=scale)
        return attend(
            q,
            k,
            v,
            causal=self.causal,
            padding=None if self.padding is None else self.padding[:, -k.shape[-2] :],
            window=window,
            strict=strict,
            scale=scale,
            bias=bias,
            rows=self.state.rows,
        )

    def mask(self, device: torch.device, window: int = 0, strict: bool = False, keys: int = 0) -> Tensor:
        """Return the mask of each row: (time, keys) or (batch, 1, time, keys), true means visible.

        `keys` is the number of last keys, such as those from a cache entry with a window; 0: all so far.
        """
        keys = keys or self.start + self.time
        padding = None if self.padding is None else self.padding[:, -keys:]
        return view_mask(self.time, keys, device, self.causal, padding, window, strict)


@dataclasses.dataclass(frozen=True)
class Circuit:
    """A parameter group with one job."""

    tag: str
    parameters: tuple[str, ...] = ()
    decay: bool = True
    follows: str | None = None
    """The circuit whose learning rate an `own` group follows, or none."""

    def prefixed(self, place: str) -> Circuit:
        """Return the circuit with the names that its parameters have in the module that contains them at `place`."""
        return dataclasses.replace(self, parameters=tuple(f"{place}.{name}" for name in self.parameters))


Tags = Mapping[str, str | Circuit]
"""The circuit of each parameter by the first component of its name: a tag, or a circuit without parameters."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """Forward FLOPs per token (a multiply-add is 2): with visible keys only (causal), and with all keys (full)."""

    causal: float
    full: float

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.causal + other.causal, self.full + other.full)

    def __mul__(self, count: float) -> Flops:
        return Flops(self.causal * count, self.full * count)


class Draw(Protocol):
    """Generates initial values seeded by (seed, layer, name)."""

    def __call__(self, name: str, shape: Sequence[int], std: float | None = None) -> Tensor:
        """Return normal values with standard deviation `std`; None means the model's default."""


_STRIP = 64
"""Columns drawn from one random stream."""


def seeded_draw(seed: int, place: str, usual: float) -> Draw:
    """Return a Draw for one position in the model: the same name gives the same values in every arm.

    A value depends on its row and column, not on the shape: where a rule solves for another width of an arm, the common
    block of the two tensors is equal. A tensor is drawn in strips of 64 columns, each from its own random stream, row by
    row; the last dimension counts as columns, all others as rows.
    """

    def draw(name: str, shape: Sequence[int], std: float | None = None) -> Tensor:
        columns = shape[-1] if len(shape) else 1
        rows = math.prod(shape[:-1])
        strips = []
        for strip in range(max(1, -(-columns // _STRIP))):
            words = f"{seed}/{place}/{name}" + (f"/{strip}" if strip else "")
            key = hashlib.sha256(words.encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
            # Always the whole strip: the last values of `torch.randn` depend on the size of the request.
            strips.append(torch.randn(rows, _STRIP, generator=generator))
        return torch.cat(strips, 1)[:, :columns].reshape(tuple(shape)) * (usual if std is None else std)

    return draw


class Component(nn.Module):
    """What a mechanism and a stage have in common: a name, options, initial values and parameter groups."""

    name: ClassVar[str] = ""
    """The name in arms; a built-in mechanism has the name of its file."""
    Options: ClassVar[type] = Options
    supports: ClassVar[Supports] = Supports()
    tags: ClassVar[Tags] = {}
    """Circuits of parameters by the first component of their names, where they are not q, k: qk; v, o: ov; others: own."""

    shape: Shape
    options: Any

    def __init__(self, shape: Shape | None = None, options: Any = None) -> None:
        super().__init__()
        if shape is not None:
            self.shape, self.options = shape, options

    @classmethod
    def label(cls, options: Any) -> str:
        """Return the short display label for these options."""
        return default_label(cls.name, options)

    def initialise(self, draw: Draw) -> None:
        """Set initial values: matrices normal, biases zero; other vectors keep the constructor's values."""
        default_initialise(self, draw)

    def circuits(self) -> list[Circuit]:
        """Return the parameters in groups; the default groups by name and exempts vectors from weight decay."""
        return circuits_by_name(self, self.tags)


class Mechanism(Component):
    """Base class of every mechanism; a subclass overrides `__init__`, `forward` and any of the other members."""

    residual: ClassVar[str] = "euclidean"
    signed: bool = False
    """Whether the attention map can be negative: indicators then use renormalized absolute values."""
    substochastic: bool = False
    """Whether rows of the attention map may sum to less than 1, such as with a sink; its weights are not negative."""
    singular: bool = False
    """Whether it divides by sums that can vanish: checks by finite differences and in bf16 are then meaningless."""
    writes: ClassVar[bool] = True
    """False: the output is zero, and a block omits the attention part and its norm."""
    idle: ClassVar[tuple[str, ...]] = ()
    """Parameters that a paper counts although they cancel: their gradient may vanish."""
    cache_error: float = 0.0
    """Relative error that a rounded cache may cause in decoding; 0 for a cache without rounding."""

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the output of this layer for x (batch, time, width), the same shape."""
        raise NotImplementedError

    @property
    def narrows(self) -> bool:
        """Whether `forward` returns (batch, 1, width) for the rows in `frame.rows`, if set."""
        return False

    @property
    def residual_options(self) -> Any:
        """Options that this mechanism sets for the residual space."""
        return None

    def cache_spec(self) -> tuple[Entry, ...] | None:
        """Return the cache entries for decoding, or None: decoding then recomputes the context and reports it."""
        return None

    def companion_spec(self) -> CompanionSpec | None:
        """Return what it requires of a companion, or None."""
        return None

    @property
    def decodable(self) -> bool:
        """Whether it declares a cache and accepts one in `forward`."""
        return self.cache_spec() is not None and "cache" in inspect.signature(self.forward).parameters

    @property
    def graph_safe(self) -> bool:
        """Whether a decoding step can be captured as a CUDA graph and replayed at other positions.

        It must then take its position only from `frame.rotate`, `frame.attend`, `frame.positions` and `cache.append`: a
        Python number read during capture, such as `frame.start`, would be the same at every position. Entries of the
        cache per sequence may be updated in place. Each subclass declares this for itself.
        """
        return False

    def new_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Cache:
        """Return an empty cache; a mechanism may store precomputed weights in it."""
        spec = self.cache_spec()
        if spec is None:
            raise UserError(f"{self.name} has no cache; decoding recomputes the context")
        return Cache(spec, batch, capacity, dtype, device)

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor | None:
        """Return the dense attention map (batch, heads, time, time) for plots and metrics, or None."""
        return None

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return forward FLOPs per token; the default counts the plain reference on the `meta` device."""
        from headtohead.mechanisms.contract.counting import count

        return count(self, context, batch, mode)


def default_label(name: str, options: Any) -> str:
    """Return the name with the options that differ from their defaults, a selected variant by its name alone."""
    selector = getattr(options, "selector", "")
    values = {key: value_text(value) for key, value in changed_options(options).items()}
    first = [values.pop(selector)] if selector in values else []
    changed = ",".join([*first, *(f"{key}={text}" for key, text in values.items())])
    return f"{name}:{changed}" if changed else name


def default_initialise(module: nn.Module, draw: Draw) -> None:
    """Draw every matrix by its name, zero every bias, leave other vectors unchanged."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.split(".")[-1] == "bias":
                parameter.zero_()
            elif parameter.ndim >= 2:
                parameter.copy_(draw(name, parameter.shape))


_USUAL_TAGS = {"q": "qk", "k": "qk", "v": "ov", "o": "ov"}


def circuits_by_name(module: nn.Module, tags: Tags, rest: str | Circuit = "own") -> list[Circuit]:
    """Return circuits by the first component of each parameter's name: q and k are qk, v and o are ov, others `rest`.

    `tags` overrides this. Vectors have no weight decay, and neither have matrices whose tag is a circuit without it.
    """
    known = {**_USUAL_TAGS, **tags}
    groups: dict[Circuit, list[str]] = {}
    for name, parameter in module.named_parameters():
        tag = known.get(name.split(".")[0], rest)
        group = Circuit(tag) if isinstance(tag, str) else tag
        group = dataclasses.replace(group, decay=group.decay and parameter.ndim >= 2)
        groups.setdefault(group, []).append(name)
    return [dataclasses.replace(group, parameters=tuple(names)) for group, names in groups.items()]


def circuit_fault(circuits: Sequence[Circuit], module: nn.Module, tags: Sequence[str]) -> str:
    """Return what is wrong with circuits that must contain each trainable parameter of a module once, or nothing."""
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    seen: set[str] = set()
    for circuit in circuits:
        if circuit.tag not in tags:
            return f"unknown circuit tag '{circuit.tag}' (allowed: {', '.join(tags)})"
        for name in circuit.parameters:
            if name not in names:
                return f"a circuit lists {name}, which is not a trainable parameter"
            if name in seen:
                return f"parameter {name} is in two parameter groups"
            seen.add(name)
    missing = min(names - seen, default="")
    return f"parameter {missing} is in no parameter group and would not be trained" if missing else ""
