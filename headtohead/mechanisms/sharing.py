"""Projections shared between queries, keys and values: (Q, K=V), (Q=K, V), (Q=K=V), V = aQ + bK, depth-2 queries.

Kayyam, Madan Gopal, Lewis, "Do Transformers Need Three Projections?", arXiv 2606.04032.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.mechanisms.base import Cache, Draw, Entry, Frame, Mode, Shape
from headtohead.mechanisms.options import Options, option, value_text
from headtohead.mechanisms.projected import Projected, joined_linear


def _parse_mix(text: str) -> str | tuple[float, float]:
    if text in ("off", "learnt"):
        return text
    try:
        a, b = (float(part) for part in text.strip("()").split(","))
    except ValueError:
        raise UserError(f"value_mix takes off, learnt or two numbers such as (1,-1), got '{text}'") from None
    return a, b


@dataclass(frozen=True)
class SharingOptions(Options):
    """Options of projection sharing."""

    tie: str = option(
        "none",
        "which projections are one: kv is (Q, K=V), qk is (Q=K, V)",
        choices=("none", "kv", "qk", "qkv"),
    )
    kv_heads: int = option(
        0, "key/value heads shared by the query heads; 0: as many as the model says", low=0
    )
    value_mix: str | tuple[float, float] = option(
        "off", "V = aQ + bK in place of its own projection: (a,b) fixed, or learnt per head", parse=_parse_mix
    )
    value_mix_norm: str = option("none", "unit divides the mix by sqrt(a^2 + b^2)", choices=("none", "unit"))
    query_depth: int = option(
        1, "2: the query goes through two matrices, multiplied out for decoding", low=1, high=2
    )
    rope: str = option(
        "auto",
        "what rotary positions turn when K=V: none, the score alone, score and value with the way back "
        "(roundtrip), or the value too (rotated); auto: roundtrip when K=V, else score",
        choices=("auto", "none", "score", "roundtrip", "rotated"),
    )
    mask_self: bool = option(False, "a token does not see itself unless it is the first")

    def validate(self) -> None:
        """Refuse forms that are another form in disguise, or nothing at all."""
        if self.tie in ("qk", "qkv") and self.query_depth == 2:
            raise UserError(f"query_depth=2 needs a query of its own; tie={self.tie} has none")
        if self.value_mix == "off":
            if self.value_mix_norm != "none":
                raise UserError("value_mix_norm needs value_mix")
        elif self.tie != "none":
            why = (
                "v would be 0 where a = -b, else (Q=K=V)"
                if self.tie == "qk"
                else "K=V is the mix (0,1) already"
            )
            raise UserError(f"value_mix needs tie=none: with tie={self.tie} {why}")
        elif self.value_mix == (0.0, 0.0):
            raise UserError("value_mix=(0,0) leaves no value")
        if self.rope in ("roundtrip", "rotated") and self.tie not in ("kv", "qkv"):
            raise UserError(
                f"rope={self.rope} says how a shared K=V is turned; tie={self.tie} does not share them"
            )

    @classmethod
    def examples(cls) -> list[Options]:
        """Every value at least once, and the forms the paper races."""
        return [
            cls(),
            cls(kv_heads=2),
            cls(tie="kv"),
            cls(tie="kv", rope="none"),
            cls(tie="kv", rope="score"),
            cls(tie="kv", rope="rotated"),
            cls(tie="kv", kv_heads=2),
            cls(tie="kv", kv_heads=1, rope="score"),
            cls(tie="qk"),
            cls(tie="qk", mask_self=True),
            cls(tie="qkv", rope="roundtrip"),
            cls(tie="kv", query_depth=2),
            cls(query_depth=2, kv_heads=1),
            cls(value_mix=(1.0, -1.0)),
            cls(value_mix=(1.0, -1.0), value_mix_norm="unit", kv_heads=2),
            cls(value_mix="learnt", kv_heads=2),
            cls(value_mix="learnt", value_mix_norm="unit"),
        ]


class Sharing(Projected):
    """Softmax attention in which two or three of the projections are one."""

    name: ClassVar[str] = "sharing"
    Options: ClassVar[type] = SharingOptions

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options, kv_heads=options.kv_heads, strict=options.mask_self)
        if options.tie in ("qk", "qkv") and self.kv_heads != self.heads:
            raise UserError(
                f"sharing: tie={options.tie} with kv_heads={self.kv_heads} would make the heads of a group identical; "
                f"it needs kv_heads={self.heads}"
            )
        width, narrow = shape.width, self.kv_heads * self.dim
        self.one_tensor = options.tie in ("kv", "qkv")
        self.rope = options.rope
        if self.rope == "auto":
            self.rope = "roundtrip" if self.one_tensor else "score"
        if shape.positions != "rope":
            self.rope = "none"
        if options.tie not in ("qk", "qkv"):
            self.q = self.linear(width, width)
        self.k = self.linear(width, narrow)
        if options.tie in ("none", "qk") and options.value_mix == "off":
            self.v = self.linear(width, narrow)
        if options.query_depth == 2:
            self.r = nn.Linear(width, width, bias=False)
        if options.value_mix == "learnt":
            self.mix_weights = nn.Parameter(torch.tensor([[0.0], [1.0]]).expand(2, self.kv_heads).clone())
        self.o = self.linear(width, width, output=True)

    def initialise(self, draw: Draw) -> None:
        """Set start values; the second query matrix keeps the scale of the first, and the mix starts as (Q, K=V)."""
        super().initialise(draw)
        with torch.no_grad():
            if self.options.query_depth == 2:
                self.r.weight.copy_(draw("r.weight", self.r.weight.shape, self.shape.width**-0.5))
            if self.options.value_mix == "learnt":
                self.mix_weights.copy_(torch.tensor([[0.0], [1.0]]))

    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and the value's own projection; where v comes from q or k, k stands in for it."""
        if self.options.query_depth == 2 and cache is not None:
            folded = F.linear(x, cache.folded["query"], cache.folded.get("query_bias"))
            outputs = [folded, *joined_linear(x, [layer for layer in self._inputs() if layer is not self.q])]
        else:
            outputs = list(joined_linear(x, self._inputs()))
            if self.options.query_depth == 2:
                outputs[0] = self.r(outputs[0])
        if self.options.tie in ("qk", "qkv"):
            outputs.insert(0, outputs[0])
        q, k, v = (*outputs, outputs[-1])[:3]
        return (
            self.split_heads(q, self.heads),
            self.split_heads(k, self.kv_heads),
            self.split_heads(v, self.kv_heads),
        )

    def position(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v; a shared value is the evolved key before it is turned, as is a mixed one."""
        if self.options.value_mix != "off":
            v = self._mixed_value(q, k)
        elif self.one_tensor:
            v = k
        if self.rope == "none":
            return q, k, v
        turned = frame.rotate(k)
        if self.rope in ("roundtrip", "rotated"):
            v = turned
        return frame.rotate(q), turned, v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values; with K=V the cache holds one tensor and both sides read it."""
        if cache is not None and self.one_tensor:
            # rope=score scores turned keys and carries unturned ones: the unturned are kept, and turned at each step.
            v = cache.append("kv", v)
            k = frame.rotate(v, keys=True) if self.rope == "score" else v
        elif cache is not None:
            k, v = cache.append("k", k), cache.append("v", v)
        mixed = frame.attend(q, k, v, strict=self.strict)
        # Turned back at the query's place: sum_j a_ij R_(j-i) k_j, which depends on distances alone.
        return frame.rotate(mixed, inverse=True) if self.rope == "roundtrip" else mixed

    def cache_spec(self) -> tuple[Entry, ...]:
        """One tensor when K=V, else keys and values."""
        if self.one_tensor:
            return (Entry("kv", (self.kv_heads, self.dim)),)
        return super().cache_spec()

    def new_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Cache:
        """Return an empty cache, with the two query matrices multiplied out."""
        cache = super().new_cache(batch, capacity, dtype, device)
        if self.options.query_depth == 2:
            cache.folded["query"] = self.r.weight @ self.q.weight
            if self.q.bias is not None:
                cache.folded["query_bias"] = self.r.weight @ self.q.bias
        return cache

    def projection_flops(self, mode: Mode) -> float:
        """Return the FLOPs per token of the projections; decoding uses the folded query."""
        folded = 2.0 * self.r.weight.numel() if self.options.query_depth == 2 and mode != "train" else 0.0
        return super().projection_flops(mode) - folded

    def circuit_tags(self) -> dict[str, str]:
        """A projection that serves both jobs is `both`; the learnt mix is its own."""
        tags = super().circuit_tags() | {"r": "qk"}
        if self.one_tensor:
            tags["k"] = "both"
        elif self.options.value_mix != "off":
            tags |= {"q": "both", "k": "both", "r": "both"}
        return tags

    def _inputs(self) -> list[nn.Linear]:
        return [getattr(self, name) for name in ("q", "k", "v") if hasattr(self, name)]

    def _mixed_value(self, q: Tensor, k: Tensor) -> Tensor:
        """Return a q + b k, q averaged over the query heads that share a key head."""
        q = q.unflatten(1, (self.kv_heads, -1)).mean(2)
        if self.options.value_mix == "learnt":
            a, b = (weights[:, None, None] for weights in self.mix_weights.unbind(0))
            scale = (a.square() + b.square()).sqrt() if self.options.value_mix_norm == "unit" else 1.0
            return (a * q + b * k) / scale
        a, b = self.options.value_mix
        scale = math.hypot(a, b) if self.options.value_mix_norm == "unit" else 1.0
        return (a / scale) * q + (b / scale) * k

    @classmethod
    def label(cls, options: Any) -> str:
        """Return the tuple that names the form: (Q, K=V), (Q=K, V), (Q=K=V), V = Q - K."""
        forms = {"none": "QKV", "kv": "(Q, K=V)", "qk": "(Q=K, V)", "qkv": "(Q=K=V)"}
        label = forms[options.tie]
        if options.value_mix == (1.0, -1.0):
            label = "V = Q - K"
        elif options.value_mix == "learnt":
            label = "V = aQ + bK"
        elif options.value_mix != "off":
            label = f"V = mix{value_text(options.value_mix)}"
        plural = "" if options.kv_heads == 1 else "s"
        extras = [f"{options.kv_heads} kv head{plural}"] if options.kv_heads else []
        extras += ["unit"] if options.value_mix_norm == "unit" else []
        extras += ["depth-2 query"] if options.query_depth == 2 else []
        extras += [f"rope {options.rope}"] if options.rope != "auto" else []
        extras += ["self masked"] if options.mask_self else []
        return ", ".join([label, *extras])
