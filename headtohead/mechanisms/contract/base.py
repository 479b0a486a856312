"""The contract of a mechanism: one way for tokens to attend to each other.

A mechanism needs `__init__(self, shape, options)` and `forward(self, x, frame)`; then it races. Everything else
below has a default and is added when wanted; `h2h check` says what is missing for the next level.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from headtohead.common.errors import UserError
from headtohead.kernels import attend, attend_placed, rotary_table, rotate
from headtohead.kernels.attention.softmax import view_mask
from headtohead.mechanisms.contract.options import Options, changed_options, value_text

Positions = Literal["rope", "learned", "none"]
Bias = Literal["none", "qkv", "all"]
Mode = Literal["train", "prefill", "decode"]
TAGS = ("qk", "ov", "both", "own")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a mechanism is told about the model it stands in."""

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
            raise UserError(f"rope turns pairs of coordinates; head width {self.head_dim} is odd")
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
    """What a mechanism can handle; the rest is refused, not ignored."""

    positions: frozenset[str] = frozenset(("rope", "learned", "none"))
    bidirectional: bool = True
    padding: bool = True


class Rotary:
    """Rotary tables of one model, by head width; made once and sliced."""

    def __init__(self, theta: float, context: int) -> None:
        self.theta, self.context = theta, context
        self.tables: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}

    def reach(self, length: int) -> None:
        """Let tables that are asked for by a place on the device hold so many places."""
        self.context = max(length, self.context)

    def slice(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Return the table of consecutive positions for `like` (batch, heads, time, dim).

        On CPU it is written out for every head in the order of memory, (heads, time, dim / 2, 2): the product then
        runs through memory in one go, four times faster than with a table shared by the heads. Elsewhere it is
        (time, dim / 2, 2).
        """
        return self._table(stop, like)[..., start:stop, :, :]

    def row(self, place: Tensor, like: Tensor) -> Tensor:
        """Return the table of one place (1,), which stands on the device, in the form `slice` has."""
        return self._table(self.context, like).index_select(-3, place)

    def gather(self, positions: Tensor, like: Tensor) -> Tensor:
        """Return the table of positions (batch, time) below the context for `like`, one head's for all."""
        table = self._table(self.context, like)
        return (table[0] if table.ndim == 4 else table)[positions].unsqueeze(1)

    def _table(self, length: int, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        heads, dim = like.shape[1], like.shape[-1]
        key = (dim, heads if like.device.type == "cpu" else 0, dtype, like.device)
        table = self.tables.get(key)
        if table is None or table.shape[-3] < length:
            self.context = max(length, self.context)
            positions = torch.arange(self.context, device=like.device)
            table = rotary_table(positions, dim, self.theta, dtype)
            if like.device.type == "cpu":
                table = table.unsqueeze(1).expand(-1, heads, -1, -1).contiguous().transpose(0, 1)
            self.tables[key] = table
        return table


@dataclasses.dataclass(frozen=True)
class CompanionSpec:
    """What a mechanism needs of the companion, the fixed second sequence; one companion serves a whole model."""

    length: int
    """Tokens of it; a layer refuses inputs that are longer."""
    start: Literal["tokens", "noise"] = "tokens"
    """What enters layer 0: the embeddings of fixed tokens, or vectors drawn once and never trained."""
    offset: int = 0
    """Where in the text it is cut from the tokens begin."""
    sigma: float = 0.0
    """Standard deviation of the noise."""


@dataclasses.dataclass
class Companion:
    """The companion as one layer sees it; the layer's call on the companion and that on the data share it."""

    state: Tensor
    """(1, length, width): the companion's normed state at this layer."""
    kept: dict[str, tuple[Tensor, ...]] = dataclasses.field(default_factory=dict)

    def once(self, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return what `make` gives, made the first time it is asked for: it is the same for the whole batch."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


@dataclasses.dataclass
class Frame:
    """What a layer may look at besides x (batch, time, width)."""

    start: int = 0
    """Position of the first row of x; what came before it is in the cache."""
    time: int = 0
    """Rows of x."""
    place: Tensor | None = None
    """(1,): where the one row of x stands among caches that are given whole, in place of `start`: a step that is
    recorded knows its place on the device alone."""
    causal: bool = True
    padding: Tensor | None = None
    """(batch, start + time), true at real tokens; None when nothing is padded."""
    rotary: Rotary | None = None
    """Rotary tables, when the model's positions are `rope`."""
    embeddings: Tensor | None = None
    """(batch, time, width): the embeddings that entered layer 0."""
    norm: Callable[[Tensor], Tensor] | None = None
    """This block's norm, to apply to the embeddings."""
    companion: Companion | None = None
    """The companion at this layer; None without one, and when its tables are in the cache already."""
    training: bool = False
    narrow: bool = False
    """Whether the last layer may mix the rows that are asked for alone: less work, equal but for rounding."""
    rows: Tensor | None = None
    """(batch,): the one row of each sequence that this layer is asked for; None: every row."""
    losses: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    row_tables: dict[tuple[Any, ...], Tensor] = dataclasses.field(default_factory=dict)
    """Rotary tables of `place`, looked up once for all layers of a pass."""

    def add_loss(self, name: str, value: Tensor) -> None:
        """Add a training-only loss term; it is logged apart under its name."""
        self.losses[name] = self.losses[name] + value if name in self.losses else value

    def positions(self, device: torch.device, keys: bool = False) -> Tensor:
        """Return (time,) positions of x's rows, or of every key so far; (batch, ...) where padding shifts them."""
        if self.place is not None and not keys:
            return self.place
        first = 0 if keys else self.start
        if self.padding is None:
            return torch.arange(first, self.start + self.time, device=device)
        return (self.padding.cumsum(-1) - 1).clamp_min(0)[:, first:]

    def rotate(self, x: Tensor, keys: bool = False, inverse: bool = False) -> Tensor:
        """Return x (batch, heads, time, dim) turned by its positions; as it is when the model has no rope."""
        if self.rotary is None:
            return x
        if self.place is not None:
            table = self.rotary.slice(0, x.shape[-2], x) if keys else self._row(self.rotary, self.place, x)
        elif self.padding is None:
            first = 0 if keys else self.start
            table = self.rotary.slice(first, self.start + self.time, x)
        else:
            table = self.rotary.gather(self.positions(x.device, keys), x)
        return rotate(x, table, inverse)

    def _row(self, rotary: Rotary, place: Tensor, x: Tensor) -> Tensor:
        """Return the table of this place, looked up once for all layers."""
        key = (x.shape[1], x.shape[-1], x.dtype)
        if key not in self.row_tables:
            self.row_tables[key] = rotary.row(place, x)
        return self.row_tables[key]

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
        """Return softmax attention (batch, heads, time, dim) under this frame's view."""
        if self.place is not None:
            if bias is not None:
                raise ValueError("a step that is recorded adds nothing to the scores")
            return attend_placed(q, k, v, self.place, window=window, strict=strict, scale=scale)
        return attend(
            q,
            k,
            v,
            causal=self.causal,
            padding=self.padding,
            window=window,
            strict=strict,
            scale=scale,
            bias=bias,
            rows=self.rows,
        )

    def mask(self, device: torch.device, window: int = 0, strict: bool = False) -> Tensor:
        """Return what each row may see: (time, keys) or (batch, 1, time, keys), true is visible."""
        keys = self.start + self.time
        return view_mask(self.time, keys, device, self.causal, self.padding, window, strict)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a cache: per `token`, per `sequence`, or one `shared` table for the whole batch."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["token", "sequence", "shared"] = "token"
    dtype: torch.dtype | None = None
    """None: the dtype the cache is made with."""
    least: torch.dtype | None = None
    """Where the cache's dtype is narrower than this, this is kept: angles are lost in bf16."""

    def allocation(self, batch: int, capacity: int) -> tuple[int, ...]:
        """Return the shape to allocate; the time axis of a `token` entry stands before its last axis."""
        if self.kind == "shared":
            return self.shape
        if self.kind == "sequence":
            return (batch, *self.shape)
        return (batch, *self.shape[:-1], capacity, self.shape[-1])

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype this entry has in a cache made with `dtype`."""
        if self.dtype is not None:
            return self.dtype
        return dtype if self.least is None else torch.promote_types(dtype, self.least)

    def bytes(self, batch: int, capacity: int, dtype: torch.dtype) -> int:
        """Return the bytes this entry takes."""
        return math.prod(self.allocation(batch, capacity)) * self.kept(dtype).itemsize


class Cache:
    """What one layer keeps between decoding steps."""

    def __init__(
        self, spec: Sequence[Entry], batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.capacity = capacity
        self.length = 0
        self.place: Tensor | None = None
        """(1,): where the next token is written, on the device; what is kept is then given whole."""
        self.tensors = {
            entry.name: torch.zeros(entry.allocation(batch, capacity), dtype=entry.kept(dtype), device=device)
            for entry in spec
        }
        self.folded: dict[str, Tensor] = {}
        """Weights multiplied out for decoding; not part of the cache's bytes."""

    def append(self, name: str, value: Tensor) -> Tensor:
        """Write value (batch, ..., time, dim) behind what is there; return all of it, (batch, ..., so far, dim).

        With a place on the device, write there, and return (batch, ..., capacity, dim).
        """
        tensor, stop = self.tensors[name], self.length + value.shape[-2]
        if self.place is not None:
            return tensor.index_copy_(-2, self.place, value.to(tensor.dtype))
        if stop > self.capacity:
            raise UserError(f"the cache holds {self.capacity} tokens; {stop} were asked for")
        tensor[..., self.length : stop, :] = value
        return tensor[..., :stop, :]

    @property
    def bytes(self) -> int:
        """Bytes actually allocated, each storage once."""
        return sum(
            {
                tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
                for tensor in self.tensors.values()
            }.values()
        )


@dataclasses.dataclass(frozen=True)
class Circuit:
    """Parameters that do one job."""

    tag: str
    parameters: tuple[str, ...]
    decay: bool = True
    follows: str | None = None
    """The circuit whose learning rate an `own` group moves with, or none."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """Forward FLOPs per token (a multiply-add is 2): keys seen counted, and all keys of the window counted."""

    causal: float
    full: float

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.causal + other.causal, self.full + other.full)


class Draw(Protocol):
    """Gives start values seeded by (seed, layer, name)."""

    def __call__(self, name: str, shape: Sequence[int], std: float | None = None) -> Tensor:
        """Return normal values of standard deviation `std`, the model's own when None."""


_STRIP = 64
"""Columns drawn from one stream."""


def seeded_draw(seed: int, place: str, usual: float) -> Draw:
    """Return a Draw for one place in the model: the same name gives the same values in every arm.

    A value depends on its row and column and not on the shape: where a rule solves another width for an arm, the block
    that two tensors have in common is equal. A tensor is drawn in strips of 64 columns, each from a stream of its own,
    row by row; the last dimension counts as columns, all before it as rows.
    """

    def draw(name: str, shape: Sequence[int], std: float | None = None) -> Tensor:
        columns = shape[-1] if len(shape) else 1
        rows = math.prod(shape[:-1])
        strips = []
        for strip in range(max(1, -(-columns // _STRIP))):
            words = f"{seed}/{place}/{name}" + (f"/{strip}" if strip else "")
            key = hashlib.sha256(words.encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
            # Always the whole strip: what `torch.randn` gives last depends on how much it is asked for.
            strips.append(torch.randn(rows, _STRIP, generator=generator))
        return torch.cat(strips, 1)[:, :columns].reshape(tuple(shape)) * (usual if std is None else std)

    return draw


class Mechanism(nn.Module):
    """Base of every mechanism; a subclass overrides `__init__` and `forward`, and whatever else it knows better."""

    name: ClassVar[str] = ""
    """The name in arms; built-in mechanisms are called like their file."""
    Options: ClassVar[type] = Options
    residual: ClassVar[str] = "euclidean"
    signed: bool = False
    """Whether the attention map can be negative: indicators then use renormalised absolute values."""
    singular: bool = False
    """Whether it divides by sums that can vanish: finite differences and bf16 then prove nothing."""
    writes: ClassVar[bool] = True
    """False: its output is zero, and a block leaves out the attention part with its norm."""
    supports: ClassVar[Supports] = Supports()
    idle: ClassVar[tuple[str, ...]] = ()
    """Parameters that a paper counts though they cancel: their gradient may vanish."""

    shape: Shape
    options: Any
    cache_error: float = 0.0
    """Relative error that a rounded cache may bring into decoding; 0 for one that keeps what it is given."""

    def __init__(self, shape: Shape | None = None, options: Any = None) -> None:
        super().__init__()
        if shape is not None:
            self.shape, self.options = shape, options

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        """Return what this layer writes for x (batch, time, width), the same shape."""
        raise NotImplementedError

    @classmethod
    def label(cls, options: Any) -> str:
        """Return the short label people see for these options."""
        return default_label(cls.name, options)

    def initialise(self, draw: Draw) -> None:
        """Set start values: matrices normal, biases zero; other vectors keep what the constructor gave them."""
        default_initialise(self, draw)

    @property
    def narrows(self) -> bool:
        """Whether `forward` gives (batch, 1, width) at the rows of `frame.rows` where they are set."""
        return False

    @property
    def residual_options(self) -> Any:
        """What the residual space is told by this mechanism."""
        return None

    def cache_spec(self) -> tuple[Entry, ...] | None:
        """Return what decoding keeps, or None: then decoding recomputes, and says so."""
        return None

    def companion_spec(self) -> CompanionSpec | None:
        """Return what it needs of a companion, or None."""
        return None

    @property
    def decodable(self) -> bool:
        """Whether it declares a cache and takes one in `forward`."""
        return self.cache_spec() is not None and "cache" in inspect.signature(self.forward).parameters

    @property
    def graph_safe(self) -> bool:
        """Whether a decoding step may be recorded once and replayed at other places.

        It then learns its place from `frame.rotate`, `frame.attend`, `frame.positions` and `cache.append` alone: a number
        that Python read while it was recorded, such as `frame.start`, would be the same at every place. A subclass says
        so for itself.
        """
        return False

    def new_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Cache:
        """Return an empty cache; a mechanism may fold weights for decoding into it."""
        spec = self.cache_spec()
        if spec is None:
            raise UserError(f"{self.name} keeps no cache; decoding recomputes")
        return Cache(spec, batch, capacity, dtype, device)

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor | None:
        """Return the dense map (batch, heads, time, time) for pictures and metrics, or None."""
        return None

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return forward FLOPs per token; the default counts the plain path on the `meta` device."""
        from headtohead.mechanisms.contract.counting import count

        return count(self, context, batch, mode)

    def circuits(self) -> list[Circuit]:
        """Return every parameter in one group; the default goes by name and leaves vectors undecayed."""
        return circuits_by_name(self)


def default_label(name: str, options: Any) -> str:
    """Return the name with the options that were changed."""
    changed = ",".join(f"{key}={value_text(value)}" for key, value in changed_options(options).items())
    return f"{name}:{changed}" if changed else name


def default_initialise(module: nn.Module, draw: Draw) -> None:
    """Draw every matrix by its name, zero every bias, leave other vectors as they are."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.split(".")[-1] == "bias":
                parameter.zero_()
            elif parameter.ndim >= 2:
                parameter.copy_(draw(name, parameter.shape))


_CIRCUIT_OF_NAME = {"q": "qk", "k": "qk", "v": "ov", "o": "ov"}


def circuits_by_name(module: nn.Module, tags: dict[str, str] | None = None) -> list[Circuit]:
    """Return circuits from the first part of each parameter's name: q and k are qk, v and o are ov, others own.

    `tags` overrides the tag of a first part.
    """
    known = _CIRCUIT_OF_NAME | (tags or {})
    groups: dict[tuple[str, bool], list[str]] = {}
    for name, parameter in module.named_parameters():
        tag = known.get(name.split(".")[0], "own")
        groups.setdefault((tag, parameter.ndim >= 2), []).append(name)
    return [Circuit(tag, tuple(names), decay) for (tag, decay), names in groups.items()]
