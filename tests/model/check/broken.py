"""Mechanisms that are each broken in one way, and the check that must catch it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headtohead.kernels import rotate
from headtohead.kernels.path import is_plain
from headtohead.mechanisms.contract.base import Circuit, Draw, Flops, Frame, Mechanism, Mode, Shape, Supports
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.standard import Standard, StandardOptions


class Sound(Standard):
    """A correct mechanism; each of the others differs from it in one way."""

    name = "sound"
    Options = StandardOptions


class SoundOnTorus(Standard):
    """The same layer in the other residual space, where no built-in mechanism is bidirectional."""

    name = "sound_on_torus"
    Options = StandardOptions
    residual = "torus"


class Base(Sound):
    """Base class of the broken mechanisms."""

    name = "broken"


class SeesTheFuture(Base):
    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        return super().forward(x, frame, cache) + 1e-9 * x.roll(-1, 1)


class SeesTheNextChunk(Base):
    """Only the last token of every 48 reads the next one."""

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        ends = torch.zeros_like(x)
        ends[:, 47:-1:48] = 1e-9 * x[:, 48::48]
        return super().forward(x, frame, cache) + ends


class KnowsTheLength(Base):
    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        return super().forward(x, frame, cache) / x.shape[1]


class LooksAtNeighbours(Base):
    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        return super().forward(x - 1e-6 * x.mean(0, keepdim=True), frame, cache)


class RollsDice(Base):
    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        return super().forward(x, frame, cache) * (1 + 1e-9 * torch.rand((), dtype=x.dtype))


class StartsAtRandom(Base):
    def initialise(self, draw: Draw) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.1)


class StartsAlike(Base):
    def initialise(self, draw: Draw) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))


class ChangesTheShape(Base):
    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        return super().forward(x, frame, cache)[..., :-1]


class ChangesTheDtype(Base):
    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        return super().forward(x, frame, cache).float()


class ClaimsToWriteNothing(Base):
    writes = False


class IgnoresPadding(Base):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        frame.padding = None
        return super().mix(q, k, v, frame, cache)


class IgnoresDirection(Base):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        frame.causal = True
        return super().mix(q, k, v, frame, cache)


class IgnoresPaddingBothWays(Base):
    """Correct in a causal model only."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        if not frame.causal:
            frame.padding = None
        return super().mix(q, k, v, frame, cache)


class DetachesAPath(Base):
    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, cache)
        return q, k.detach(), v


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 2.001


class DetachesLateTokens(Base):
    """Without a gradient from the eighth token on."""

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        return super().forward(torch.cat((x[:, :7], x[:, 7:].detach()), 1), frame, cache)


class WrongGradient(Base):
    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, cache)
        return _Wrong.apply(q), k, v


class HasADeadParameter(Base):
    def __init__(self, shape: Shape, options: object) -> None:
        super().__init__(shape, options)
        self.unused = nn.Parameter(torch.ones(3))


class OverflowsInBf16(Base):
    """exp(60) is fine in float64, but float32 and bf16 overflow for large inputs."""

    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, cache)
        return q, k, v * v.abs().exp()


class DividesByZero(Base):
    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, cache)
        return q, k, v / v.norm(dim=-1, keepdim=True)


class NotFiniteUnderAutocast(Base):
    """A product minus 0.999 of its own value: below 0 once the product is rounded to bf16."""

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        square = (x.unsqueeze(-2) @ x.unsqueeze(-1)).squeeze(-1)
        rest = square - 0.999 * x.square().sum(-1, keepdim=True)
        return super().forward(x, frame, cache) * (rest + 1e-6).sqrt()


class LosesDigitsUnderAutocast(Base):
    """Values far from 0: precise enough in float32, but not in bf16."""

    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, cache)
        return q, k, (v + 64) - 64


class DetachesUnderAutocast(Base):
    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, cache)
        return q, k, v.detach() if torch.is_autocast_enabled("cpu") else v


class KeepsNoCache(Base):
    def cache_spec(self) -> None:  # type: ignore[override]
        return None


class TakesNoCache(Base):
    def forward(self, x: Tensor, frame: Frame) -> Tensor:  # type: ignore[override]
        return super().forward(x, frame)


class CachesTheWrongKey(Base):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        if cache is not None:
            k = k * 1.0001
        return super().mix(q, k, v, frame, cache)


class RemembersWhereItWasRecorded(Base):
    graph_safe = True

    def position(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        if frame.padding is not None or frame.rotary is None:
            return super().position(q, k, v, frame)
        q, k = (
            rotate(side, frame.rotary.slice(frame.start, frame.start + frame.time, side)) for side in (q, k)
        )
        return q, k, v


class HidesBytes(Base):
    def new_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Cache:
        cache = super().new_cache(batch, capacity, dtype, device)
        cache.tensors["k"] = torch.zeros(
            batch, self.kv_heads, capacity + 5, self.dim, dtype=dtype, device=device
        )
        return cache


class DeclaresTooLittle(Base):
    def cache_spec(self) -> tuple[Entry, ...]:
        return super().cache_spec()

    def new_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Cache:
        cache = super().new_cache(batch, capacity, dtype, device)
        cache.extra = torch.zeros(10)  # type: ignore[attr-defined]
        return cache


class WrongFlops(Base):
    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        right = super().flops(context, batch, mode)
        return Flops(right.causal, right.full + 2)


class WrongDecodeFlops(Base):
    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        return super().flops(context + (mode == "decode"), batch, mode)


class MoreCausalThanFull(Base):
    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        right = super().flops(context, batch, mode)
        return Flops(right.full * 2, right.full)


class ForgetsACircuit(Base):
    def circuits(self) -> list[Circuit]:
        return [circuit for circuit in super().circuits() if circuit.tag != "ov"]


class UnknownTag(Base):
    def circuits(self) -> list[Circuit]:
        return [Circuit("attention", circuit.parameters) for circuit in super().circuits()]


class CountsTwice(Base):
    def circuits(self) -> list[Circuit]:
        return [*super().circuits(), Circuit("own", ("q.weight",))]


class FollowsWrongly(Base):
    def circuits(self) -> list[Circuit]:
        first, *rest = super().circuits()
        return [Circuit(first.tag, first.parameters, first.decay, follows="ov"), *rest]


class FastIsNotPlain(Base):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        mixed = super().mix(q, k, v, frame, cache)
        return mixed if is_plain() else mixed * (1 + 1e-8)


class FastGradientIsNotPlain(Base):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        if not is_plain():
            v = v + 1e-7 * (v - v.detach())
        return super().mix(q, k, v, frame, cache)


class MapSeesTheFuture(Base):
    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        time = x.shape[1]
        return torch.full((len(x), self.heads, time, time), 1 / time, dtype=x.dtype)


class MapIsSigned(Base):
    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        return -super().attention_map(x, frame)


class MapHasASink(Base):
    """Rows sum to less than 1, and nothing declares it."""

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        return 0.9 * super().attention_map(x, frame)


class MapExceedsOne(Base):
    substochastic = True

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        return 1.01 * super().attention_map(x, frame)


class MapHasEmptyRows(Base):
    substochastic = True

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        return super().attention_map(x, frame).tril(-1)


class MapIsNegativeDespiteItsKind(MapIsSigned):
    substochastic = True


class MapOfTwoKinds(Base):
    signed = substochastic = True


class SoundWithASink(Base):
    """Softmax-plus-one: a map whose rows sum to less than 1, declared and applied."""

    substochastic = True

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        if cache is not None:
            k, v = cache.append("k", k), cache.append("v", v)
        return self._weights(q, k, frame) @ v

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        q, k, _ = self.positioned(x, frame)
        return self._weights(q, k, frame)

    def _weights(self, q: Tensor, k: Tensor, frame: Frame) -> Tensor:
        scores = q @ k.transpose(-2, -1) * self.dim**-0.5
        scores = scores.masked_fill(~frame.mask(q.device, keys=k.shape[-2]), float("-inf"))
        return torch.cat((torch.zeros_like(scores[..., :1]), scores), -1).softmax(-1)[..., 1:]


class BreaksTheGraph(Base):
    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        if x.device.type != "meta" and float(x.detach().abs().max()) > 1e30:
            return x
        return super().forward(x, frame, cache)


class Raises(Base):
    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        raise ValueError("not today")


class CannotBeBuilt(Mechanism):
    name = "unbuildable"

    def __init__(self, shape: Shape, options: object) -> None:
        raise RuntimeError("no such luck")


class Honest(Base):
    """Declares that it supports neither padding nor both directions: those checks are then skipped."""

    supports = Supports(bidirectional=False, padding=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        frame.padding, frame.causal = None, True
        return super().mix(q, k, v, frame, cache)


# Class: the check that must catch it, and a fragment of its message.
CAUGHT: dict[type[Mechanism], tuple[str, str]] = {
    SeesTheFuture: ("causal", "sees the future"),
    SeesTheNextChunk: ("causal", "changing tokens from position 48 on"),
    KnowsTheLength: ("causal", "depend on how many tokens follow"),
    LooksAtNeighbours: ("neighbours", "batch neighbors"),
    RollsDice: ("deterministic", "another output the second time"),
    StartsAtRandom: ("deterministic", "differ between two builds"),
    StartsAlike: ("deterministic", "do not depend on the seed"),
    ChangesTheShape: ("shape", "returned shape"),
    ChangesTheDtype: ("shape", "float32"),
    ClaimsToWriteNothing: ("shape", "its output is not zero"),
    IgnoresPadding: ("padding", "padding changes the outputs"),
    IgnoresDirection: ("bidirectional", "causal = False has no effect"),
    IgnoresPaddingBothWays: ("padded_batch", "in a bidirectional model, a batch with right padding"),
    DetachesAPath: ("gradients", "the gradient of x is wrong"),
    DetachesLateTokens: ("gradients", "the gradient of x is wrong"),
    WrongGradient: ("gradients", "the gradient of"),
    HasADeadParameter: ("gradients", "no gradient reaches unused"),
    OverflowsInBf16: ("finite", "not finite"),
    DividesByZero: ("finite", "all inputs zero"),
    NotFiniteUnderAutocast: ("autocast", "output not finite"),
    LosesDigitsUnderAutocast: ("autocast", "the output has a relative error"),
    DetachesUnderAutocast: ("autocast", "the gradient has a relative error"),
    KeepsNoCache: ("cache_declared", "declares no cache"),
    TakesNoCache: ("cache_declared", "does not accept one"),
    CachesTheWrongKey: ("cache_agrees", "differs from the full forward"),
    RemembersWhereItWasRecorded: ("recorded_agrees", "a step captured at position"),
    HidesBytes: ("cache_bytes", "allocates"),
    DeclaresTooLittle: ("cache_bytes", "outside its declared entries"),
    WrongFlops: ("flops", "were counted"),
    WrongDecodeFlops: ("flops", "mode=decode"),
    MoreCausalThanFull: ("flops", "more with a causal mask"),
    ForgetsACircuit: ("circuits", "is in no parameter group"),
    UnknownTag: ("circuits", "unknown circuit tag 'attention'"),
    CountsTwice: ("circuits", "is in two parameter groups"),
    FollowsWrongly: ("circuits", "only an own circuit can follow"),
    FastIsNotPlain: ("fast_path", "output differs"),
    FastGradientIsNotPlain: ("fast_path", "gradient of"),
    MapSeesTheFuture: ("attention_map", "weight on future tokens"),
    MapIsSigned: ("attention_map", "negative"),
    MapExceedsOne: ("attention_map", "sum to 1.01 to 1.01"),
    Raises: ("shape", "ValueError: not today"),
    CannotBeBuilt: ("build", "no such luck"),
}
WRONG_KIND: dict[type[Mechanism], str] = {
    MapHasASink: "set substochastic = True",
    MapHasEmptyRows: "sum to 0 to",
    MapIsNegativeDespiteItsKind: "negative",
    MapOfTwoKinds: "exclude each other",
}
"""Further mechanisms whose attention map is not of the declared kind."""
LEVEL_WITH = {
    "cache_declared": "raceable",
    "cache_agrees": "raceable",
    "cache_bytes": "raceable",
    "recorded_agrees": "raceable",
}
LEVEL_WITH |= dict.fromkeys(("flops", "circuits", "fast_path", "attention_map", "compiles"), "decodable")
