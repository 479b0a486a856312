"""Two or three projections share one matrix: fewer matrices are learned and, if keys are values, one tensor is cached
instead of two.

    (Q, K=V)      q = W_q x   v = k = W_k x            (Q=K, V)   q = k = W_k x   v = W_v x
    (Q=K=V)       q = k = v = W_k x                    V = aQ + bK   v = a q + b k, fixed or learned per head
    depth 2       q = W_r W_q x, one precomputed product in decoding

Kayyam, Madan Gopal, Lewis, "Do Transformers Need Three Projections?", arXiv 2606.04032; the depth-2 query after
arXiv 2606.21848.

| form | arm | cache per token |
|---|---|---|
| (Q, K=V) | `sharing:tie=kv` | one tensor, half of standard |
| (Q=K, V) | `sharing:tie=qk` | as standard |
| (Q=K=V) | `sharing:tie=qkv` | one tensor |
| grouped | `sharing:tie=kv,kv_heads=2` | one narrow tensor |
| V = Q - K | `sharing:value_mix=(1,-1)` | as standard |
| V = aQ + bK, learned | `sharing:value_mix=learnt` | as standard |
| QVV(3), a depth-2 query | `sharing:tie=kv,query_depth=2` | one tensor |

With rotary positions, a shared K=V must choose what is rotated. `rope=roundtrip` (the default then) rotates keys and values
together and rotates the output back at the query: it depends only on distances, and one rotated tensor is cached. `score`
caches unrotated keys and rotates them again at each step; `rotated` also rotates the values and is not shift-invariant;
`decoupled` rotates a part of the key that is not a value, half of each head (`rotary_key=split`) or one extra key for all
heads (`shared`); `none` rotates nothing. These are different models: train and decode with the same one.

`pos2d=true` is the paper's (X)+, S' = sum_c w_c (S + P_c) + b with fixed sines and cosines P of both indices. Terms of the
query alone cancel in the softmax, which leaves a learned temperature sum(w) and a learned bias by the key's position; this
is what is computed. `score_bias=t5` (Raffel et al., arXiv 1910.10683) and `alibi` (Press et al., arXiv 2108.12409) are its
relative rivals. `kv_norm` normalizes the key of a shared K=V in the score only, for one more cached number per key head.

Arms: sharing:tie=kv sharing:tie=qk sharing:tie=qkv sharing:tie=kv,kv_heads=2 sharing:value_mix=(1,-1)
sharing:tie=kv,query_depth=2

Claims: At 300M (Q, K=V) costs +3.1 % perplexity (5.27 against 5.11) and +2.5 % at 1.2B for half the cache, (Q=K, V) +4.9 %,
(Q=K=V) +25.4 %; with one key head (Q, K=V) +4.9 % for 96.9 % less cache. QVV(3) beats three projections on four of five
models.

Watch: These published losses count padding as text, so the gaps on text are larger; one seed, parameters not matched.
(Q, K=V) has exactly the parameters, FLOPs and cache of grouped attention with half the key heads: `standard:kv_heads=H/2` is
its fair rival. Q=K favors the token itself (`mask_self=true` masks it). The paper's models have learned positions, and its
(X)+ has no causal mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.common.numbers import parse_number
from headtohead.kernels import attention_weights, decode, decode_serves
from headtohead.mechanisms.contract.base import Circuit, Draw, Frame, Mode, Shape, Tags
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.options import Options, option, value_text
from headtohead.mechanisms.contract.projected import Projected, joined_linear
from headtohead.mechanisms.positional import T5_BUCKETS, Term2d, alibi_bias, t5_bias


def _parse_mix(text: str) -> str | tuple[float, float]:
    if text in ("off", "learnt"):
        return text
    try:
        a, b = (parse_number(part, float) for part in text.strip("()").split(","))
    except ValueError:
        raise UserError(f"value_mix takes off, learnt or two numbers such as (1,-1), got '{text}'") from None
    return a, b


@dataclass(frozen=True)
class SharingOptions(Options):
    """Options of projection sharing."""

    cases: ClassVar[str] = """
        kv_heads=2 tie=kv tie=kv,rope=none tie=kv,rope=score tie=kv,rope=rotated tie=kv,kv_heads=2
        tie=kv,kv_heads=1,rope=score tie=qk tie=qk,mask_self=true tie=qkv,rope=roundtrip tie=kv,query_depth=2
        query_depth=2,kv_heads=1 value_mix=(1,-1) value_mix=(1,-1),value_mix_norm=unit,kv_heads=2
        value_mix=learnt,kv_heads=2 value_mix=learnt,value_mix_norm=unit
        tie=kv,rope=decoupled tie=kv,rope=decoupled,kv_heads=2,kv_norm=gain
        tie=kv,rope=decoupled,rotary_key=shared,kv_heads=2,query_depth=2 tie=qkv,rope=decoupled,kv_norm=scale_free
        tie=qk,pos2d=true tie=qkv,pos2d=true,pos2d_m=7,pos2d_init=paper,rope=score tie=qk,score_bias=t5
        tie=kv,kv_heads=2,score_bias=alibi,mask_self=true tie=kv,kv_norm=scale_free tie=kv,kv_norm=gain,kv_heads=2
        tie=kv,kv_norm=gain,rope=score tie=kv,kv_heads=1,kv_norm=gain,rope=none,pos2d=true,score_bias=t5
    """

    tie: str = option(
        "none",
        "which projections share one matrix: kv is (Q, K=V), qk is (Q=K, V)",
        choices=("none", "kv", "qk", "qkv"),
    )
    kv_heads: int = option(0, "key/value heads shared by the query heads; 0: the model's setting", low=0)
    value_mix: str | tuple[float, float] = option(
        "off", "V = aQ + bK instead of a value projection: (a,b) fixed, or learnt per head", parse=_parse_mix
    )
    value_mix_norm: str = option("none", "unit divides the mix by sqrt(a^2 + b^2)", choices=("none", "unit"))
    query_depth: int = option(
        1, "2: the query has two matrices, whose product is precomputed for decoding", low=1, high=2
    )
    rope: str = option(
        "auto",
        "what rotary positions rotate when K=V: none, the score only, score and value with an inverse rotation of the "
        "output (roundtrip), the value too (rotated), or a part of the key that is not a value (decoupled); "
        "auto: roundtrip when K=V, else score",
        choices=("auto", "none", "score", "roundtrip", "rotated", "decoupled"),
    )
    rotary_key: str = option(
        "split",
        "with rope=decoupled, the rotated part: half of each head, or one extra key shared by all heads",
        choices=("split", "shared"),
    )
    pos2d: bool = option(False, "(X)+: a learned temperature and a learned bias by the key's position")
    pos2d_m: int = option(10, "channels of pos2d", low=3)
    pos2d_init: str = option(
        "identity",
        "initial pos2d: identity has no effect; paper is Xavier uniform",
        choices=("identity", "paper"),
    )
    score_bias: str = option(
        "none",
        "bias added to the scores: t5 learns one per bucket of distance, alibi decreases with distance",
        choices=("none", "t5", "alibi"),
    )
    kv_norm: str = option(
        "off",
        "normalize the key of a shared K=V in the score, but not its value; gain: with a learned gain",
        choices=("off", "scale_free", "gain"),
    )
    mask_self: bool = option(False, "a token does not attend to itself unless it is the first")

    def validate(self) -> None:
        """Raise for forms that equal another form or have no effect."""
        if self.tie in ("qk", "qkv") and self.kv_heads:
            raise UserError(
                f"tie={self.tie} with kv_heads={self.kv_heads}: queries are keys, so both have the same number of heads; "
                "leave kv_heads out"
            )
        if self.tie in ("qk", "qkv") and self.query_depth == 2:
            raise UserError(f"query_depth=2 needs a separate query projection; tie={self.tie} has none")
        if self.value_mix == "off":
            if self.value_mix_norm != "none":
                raise UserError("value_mix_norm needs value_mix")
        elif self.tie != "none":
            zero, same = "v would be 0 where a = -b, else (Q=K=V)", "K=V is already the mix (0,1)"
            why = zero if self.tie == "qk" else same
            raise UserError(f"value_mix needs tie=none: with tie={self.tie} {why}")
        elif self.value_mix == (0.0, 0.0):
            raise UserError("value_mix=(0,0) leaves no value")
        if self.tie not in ("kv", "qkv"):
            if self.rope in ("roundtrip", "rotated", "decoupled"):
                raise UserError(
                    f"rope={self.rope} applies to a shared K=V; tie={self.tie} does not share them"
                )
            if self.kv_norm != "off":
                raise UserError(
                    f"kv_norm normalizes the key of a shared K=V; tie={self.tie} does not share them "
                    "(standard:qk_norm=true normalizes queries and keys)"
                )
        if self.rotary_key == "shared":
            if self.rope != "decoupled":
                raise UserError(
                    f"rotary_key=shared needs rope=decoupled; rope={self.rope} has no separate rotated part"
                )
            if self.tie == "qkv":
                raise UserError("rotary_key=shared needs a separate query projection; tie=qkv has none")
        if not self.pos2d and (self.pos2d_m, self.pos2d_init) != (10, "identity"):
            raise UserError("pos2d_m and pos2d_init need pos2d=true")


class Sharing(Projected):
    """Softmax attention in which two or three projections share one matrix."""

    name: ClassVar[str] = "sharing"
    Options: ClassVar[type] = SharingOptions
    # The same for every key, so it cancels in the softmax.
    idle: ClassVar[tuple[str, ...]] = ("pos2d.offset",)

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options, kv_heads=options.kv_heads, strict=options.mask_self)
        if options.tie in ("qk", "qkv") and self.kv_heads != self.heads:  # the model's own setting
            raise UserError(f"sharing: tie={options.tie} needs as many key heads as query heads")
        width, narrow = shape.width, self.kv_heads * self.dim
        self.one_tensor = options.tie in ("kv", "qkv")
        self.rope = options.rope
        if self.rope == "auto":
            self.rope = "roundtrip" if self.one_tensor else "score"
        if shape.positions != "rope":
            self.rope = "none"
        self.turned = self._turned()
        self.shared_key = self.rope == "decoupled" and options.rotary_key == "shared"
        self.carried = self.dim if self.shared_key else self.dim - self.turned
        if options.tie not in ("qk", "qkv"):
            self.q = self.linear(width, width)
        self.k = self.linear(width, narrow)
        if options.tie in ("none", "qk") and options.value_mix == "off":
            self.v = self.linear(width, narrow)
        if options.query_depth == 2:
            self.r = nn.Linear(width, width, bias=False)
        if options.value_mix == "learnt":
            # Not expanded and cloned: on the meta device `clone` imports sympy, which takes 0.5 s.
            self.mix_weights = nn.Parameter(torch.tensor([[0.0] * self.kv_heads, [1.0] * self.kv_heads]))
        if self.shared_key:
            self.no_stage = "{stage} needs one query per key; rotary_key=shared does not have that"
            self.q_rope = self.linear(width, self.heads * self.turned)
            self.k_rope = self.linear(width, self.turned)
        if options.kv_norm == "gain":
            # Rotated keys are cached; a gain that is equal within rotary pairs commutes with the rotation.
            paired = self.rope in ("roundtrip", "rotated")
            self.k_gain = nn.Parameter(torch.ones(self.dim // 2 if paired else self.carried))
        if options.pos2d:
            self.pos2d = Term2d(options.pos2d_m)
        if options.score_bias == "t5":
            self.t5 = nn.Parameter(torch.empty(T5_BUCKETS, self.heads))
        self.o = self.linear(self.heads * self.carried, width, output=True)

    def _turned(self) -> int:
        """Return how many coordinates of a key rotate without being a value: half of a head, in pairs."""
        if self.rope != "decoupled":
            return 0
        if self.dim < 4:
            raise UserError(
                f"sharing: rope=decoupled rotates half of each head in pairs; head width {self.dim} is too small"
            )
        return 2 * (self.dim // 4)

    def initialise(self, draw: Draw) -> None:
        """Set initial values; the second query matrix keeps the scale of the first, and the mix starts as (Q, K=V)."""
        super().initialise(draw)
        with torch.no_grad():
            if self.options.query_depth == 2:
                self.r.weight.copy_(draw("r.weight", self.r.weight.shape, self.shape.width**-0.5))
            if self.options.value_mix == "learnt":
                self.mix_weights.copy_(torch.tensor([[0.0], [1.0]]))
        if self.options.pos2d:
            self.pos2d.initialise(draw, self.options.pos2d_init == "identity")

    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and the value projection; if v is computed from q or k, k is returned in its place."""
        if self.options.query_depth == 2 and cache is not None:
            folded = F.linear(x, cache.folded["query"], cache.folded.get("query_bias"))
            outputs = [folded, *joined_linear(x, [layer for layer in self._inputs() if layer is not self.q])]
        else:
            outputs = list(joined_linear(x, self._inputs()))
            if self.options.query_depth == 2:
                outputs[0] = self.r(outputs[0])
        if self.options.tie in ("qk", "qkv"):
            outputs.insert(0, outputs[0])
        q, k, v = self.in_heads(*(*outputs, outputs[-1])[:3])
        if self.shared_key:
            turning = self.split_heads(self.q_rope(x), self.heads)
            q, k = torch.cat((q, turning), -1), self._with_rotated(k, self.k_rope(x).unsqueeze(1))
        return q, k, v

    def position(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v; a shared or mixed value is computed from the evolved key before rotation."""
        if self.options.value_mix != "off":
            v = self._mixed_value(q, k)
        elif self.one_tensor:
            v = k
        if self.rope == "decoupled":
            return self._position_decoupled(q, k, frame)
        if self.rope != "none":
            turned = frame.rotate(k)
            if self.rope in ("roundtrip", "rotated"):
                v = turned
            q, k = frame.rotate(q), turned
        if self.options.kv_norm != "off":
            k = self._key(v, self._size(v), frame)
        return q, k, v

    def _position_decoupled(self, q: Tensor, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k with their last part rotated, and the rest of k as v."""
        (q, q_turning), (v, k_turning) = (x.split((self.carried, self.turned), -1) for x in (q, k))
        q = torch.cat((q, frame.rotate(q_turning)), -1)
        # A shared part is repeated for each head: rotate it once.
        k_turning = frame.rotate(k_turning[:, :1] if self.shared_key else k_turning)
        content = v if self.options.kv_norm == "off" else self._key(v, self._size(v), frame)
        return q, self._with_rotated(content, k_turning), v

    def _with_rotated(self, k: Tensor, turning: Tensor) -> Tensor:
        """Return keys with the rotated part concatenated; all heads share one part."""
        return torch.cat((k, turning.expand(-1, self.kv_heads, -1, -1)), -1)

    def _size(self, v: Tensor) -> Tensor:
        """Return the root mean square (batch, heads, time, 1) of shared keys, which rotation does not change."""
        return (v.square().mean(-1, keepdim=True) + self.shape.norm_eps).sqrt()

    def _key(self, v: Tensor, size: Tensor, frame: Frame) -> Tensor:
        """Return the normalized keys from cached values, rotated if the cache holds unrotated values."""
        k = v / size
        if self.options.kv_norm == "gain":
            paired = len(self.k_gain) != v.shape[-1]
            k = k * (self.k_gain.repeat_interleave(2) if paired else self.k_gain)
        return frame.rotate(k, keys=k.shape[-2] != frame.time) if self.rope == "score" else k

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values; with K=V the cache holds one tensor, read as keys and as values."""
        if cache is not None and self._one_read(q, v, frame):
            return self._decode(q, cache.append("kv", v), frame, cache.place)
        if cache is not None:
            k, v = self._cached(k, v, frame, cache)
        q, k, scale = self._with_term(q, k, frame)
        mixed = frame.attend(q, k, v, strict=self.strict, scale=scale, bias=self._bias(q, frame))
        # Rotated back at the query's position: sum_j a_ij R_(j-i) k_j, which depends only on distances.
        return frame.rotate(mixed, inverse=True) if self.rope == "roundtrip" else mixed

    def _one_read(self, q: Tensor, v: Tensor, frame: Frame) -> bool:
        """Return whether the decoding kernel applies: one query on a K=V cache, with unbiased scores."""
        fits = self.one_tensor and self.rope != "decoupled" and self._plain_scores and not self.strict
        return fits and frame.time == 1 and frame.padding is None and decode_serves(q, v)

    def _decode(self, q: Tensor, kv: Tensor, frame: Frame, place: Tensor | None) -> Tensor:
        """Return the output of one query with its cache, read once; the kernel applies the rotation of `rope`."""
        if frame.rotary is None or self.rope not in ("score", "roundtrip"):
            return decode(q, kv, None, "nothing", place=place)
        table = frame.rotary.slice(0, kv.shape[-2], kv)
        return decode(q, kv, table[0] if table.ndim == 4 else table, self.rope, place=place)

    def _cached(self, k: Tensor, v: Tensor, frame: Frame, cache: Cache) -> tuple[Tensor, Tensor]:
        """Append the new tokens to the cache; return all keys and values so far."""
        if not self.one_tensor:
            return cache.append("k", k), cache.append("v", v)
        if self.rope == "decoupled":
            turning = k[..., self.carried :]
            if self.shared_key:
                v, turning = cache.append("kv", v), cache.append("turned", turning[:, :1])
            else:
                both = cache.append("kv", torch.cat((v, turning), -1))
                v, turning = both.split((self.carried, self.turned), -1)
                if self.options.kv_norm == "off":
                    return both, v
            content = v if self.options.kv_norm == "off" else self._key(v, self._sizes(v, cache), frame)
            return self._with_rotated(content, turning), v
        v = cache.append("kv", v)
        if self.options.kv_norm != "off":
            return self._key(v, self._sizes(v, cache), frame), v
        # rope=score needs rotated keys and unrotated values: the cache holds unrotated ones, rotated at each step.
        return frame.rotate(v, keys=True) if self.rope == "score" else v, v

    def _sizes(self, v: Tensor, cache: Cache) -> Tensor:
        """Return the sizes of all cached keys; those of new keys are computed once and cached."""
        return cache.append("size", self._size(v[..., cache.length :, :]))

    def _with_term(self, q: Tensor, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor, float | None]:
        """Return q, k and the scale of their scores, None for the default."""
        return self.pos2d(q, k, frame) if self.options.pos2d else (q, k, None)

    def _bias(self, q: Tensor, frame: Frame) -> Tensor | None:
        if self.options.score_bias == "t5":
            return t5_bias(self.t5, frame)
        if self.options.score_bias == "alibi":
            return alibi_bias(self.heads, frame, q.device, q.dtype)
        return None

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the softmax map (batch, heads, time, time)."""
        q, k, _ = self.positioned(x, frame)
        q, k, scale = self._with_term(q, k, frame)
        mask = frame.mask(x.device, strict=self.strict)
        return attention_weights(q, k, mask, scale, self._bias(q, frame))

    def cache_spec(self) -> tuple[Entry, ...]:
        """One tensor when K=V, else keys and values; also the keys' sizes and a shared rotated part."""
        if not self.one_tensor:
            return super().cache_spec()
        entries = [Entry("kv", (self.kv_heads, self.dim))]
        entries += [Entry("turned", (1, self.turned))] if self.shared_key else []
        entries += [Entry("size", (self.kv_heads, 1))] if self.options.kv_norm != "off" else []
        return tuple(entries)

    @property
    def graph_safe(self) -> bool:
        """True if no bias is added to the scores, and keys are not normalized after the cache."""
        return type(self) is Sharing and self._plain_scores and self.graph_safe_stages()

    @property
    def _plain_scores(self) -> bool:
        options = self.options
        return options.kv_norm == "off" and not options.pos2d and options.score_bias == "none"

    def new_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Cache:
        """Return an empty cache, with the product of the two query matrices precomputed."""
        cache = super().new_cache(batch, capacity, dtype, device)
        if self.options.query_depth == 2:
            cache.folded["query"] = self.r.weight @ self.q.weight
            if self.q.bias is not None:
                cache.folded["query_bias"] = self.r.weight @ self.q.bias
        return cache

    def projection_flops(self, mode: Mode) -> float:
        """Return the FLOPs per token of the projections; decoding uses the precomputed query matrix."""
        folded = 2.0 * self.r.weight.numel() if self.options.query_depth == 2 and mode != "train" else 0.0
        return super().projection_flops(mode) - folded

    def key_flops(self, mode: Mode) -> float:
        """Return score and mix per key: a decoupled part is scored but not mixed, pos2d scores one more coordinate."""
        scored = self.carried + self.turned + (1 if self.options.pos2d else 0)
        return 2.0 * self.heads * (scored + self.carried)

    def circuit_tags(self) -> Tags:
        """A projection that serves both circuits is `both`; the mix and the score terms have no weight decay."""
        tags = dict.fromkeys(("r", "q_rope", "k_rope", "k_gain"), "qk")
        if self.one_tensor:
            tags["k"] = "both"
        elif self.options.value_mix != "off":
            tags |= {"q": "both", "k": "both", "r": "both"}
        term = Circuit("own", decay=False, follows="qk")
        return {**tags, "pos2d": term, "t5": term, "mix_weights": Circuit("own", decay=False)}

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
        label += "+" if options.pos2d and options.value_mix == "off" else ""
        plural = "" if options.kv_heads == 1 else "s"
        extras = [f"{options.kv_heads} kv head{plural}"] if options.kv_heads else []
        extras += ["unit"] if options.value_mix_norm == "unit" else []
        extras += ["depth-2 query"] if options.query_depth == 2 else []
        extras += [f"rope {options.rope}"] if options.rope != "auto" else []
        extras += ["shared rotary key"] if options.rotary_key == "shared" else []
        if options.pos2d:
            extras += ["2D term"] if options.value_mix != "off" else []
            extras += [f"{options.pos2d_m} channels"] if options.pos2d_m != 10 else []
            extras += ["paper init"] if options.pos2d_init == "paper" else []
        extras += [f"{options.score_bias} bias"] if options.score_bias != "none" else []
        norms = {"off": [], "scale_free": ["keys normed"], "gain": ["keys normed with gain"]}
        extras += norms[options.kv_norm]
        extras += ["self masked"] if options.mask_self else []
        return ", ".join([label, *extras])
