"""Attention on the torus: tokens are oscillators, and every coordinate th[t, j] of a state is an angle. Scores are gated
cosines of phase differences, values are the raw phases, and a token's phases are pulled towards the weighted circular mean
of those it attends to.

    s[t, u]   = sum_j g_j cos(th[t, j] - th[u, j] + w_j (t - u))      gated cosine score, rotary drift
    A[t, .]   = softmax over u < t
    dth[t, j] = kappa_j sum_u A[t, u] sin(th[u, j] - th[t, j])        the tangent part of the weighted circular mean

    with successor=mix and harmonics=K, for k = 1 .. K and delay d = 0, 1:
    dth[t, j] = sum_(k, d) c_(k, d, j) sum_u A[t, u] sin(k (th[u + d, j] - th[t, j]))

Nunley, "Kuramoto Attention", arXiv 2606.11585, as far as its abstract specifies the layer; successor values and harmonics
after the same author's arXiv 2606.18694, whose coefficients c are complex and here real. This implements the published
abstract, with our choices where it is silent. The default is its literal reading except for kappa, which is learned from 1:
the abstract's update has no gain (`gain=one`).

Score and mean are dot products of features F = [cos, sin], so the layer is softmax attention with q = g F(th + t w),
k = F(th + t w), v = F(th) and scale 1 (harmonics add F(2 th), ... to v): no map is materialized, and the strict mask is a
shift by one. State and update are those of its residual space, `torus`: angles in float32, no norms, a feed-forward block
and an output layer that take features. The same holds for any compact group: derive from `h2h.Group` (features, score,
mean, pull, step) and return it from `make_group` in a class derived from `h2h.Kuramoto`.

Arms: kuramoto:cache=i16 kuramoto:gate=pair kuramoto:successor=replace kuramoto:successor=mix,harmonics=3
kuramoto:heads=full

Claims: On enwik8 at 1M, 1.637 +- 0.010 bits per character against 1.616 +- 0.004 for a tuned transformer; at 5M, median
1.448 against 1.452, mean 1.468 against 1.456. The follow-up: the layer finds where a context occurred, but not what came
next; a kernel with a delay of one step and harmonics has 1.5953 against 1.611 at 1M after 50 epochs. `successor=mix` has
the delay, `harmonics` the harmonics; how many the published kernel has, and how they start, is not known here.

Watch: The layer itself has almost no parameters; they are in a feed-forward block and an untied output layer with inputs of
twice the width, so match with `shape = params`. Learning rates matter more for phases than for a transformer: tune both on
one grid. With `mask=inclusive` a token attends to itself and the layer becomes the identity. The cache is one number per
coordinate, but in float32 (`cache=i16` halves it). In a hybrid with other mechanisms, a linear adapter connects the residual
spaces, and a tied head needs `tied = false`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.kernels import attend, attention_weights, circle_harmonics, project
from headtohead.kernels.attention.softmax import view_mask
from headtohead.kernels.path import is_plain
from headtohead.mechanisms.contract.base import (
    Circuit,
    Draw,
    Flops,
    Frame,
    Mechanism,
    Mode,
    Shape,
    Supports,
    circuits_by_name,
)
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.projected import mean_keys
from headtohead.mechanisms.families import groups
from headtohead.mechanisms.families.groups import Group, TorusOptions
from headtohead.mechanisms.families.kuramoto_options import KuramotoOptions

_TURNS = 2**16 / (2 * math.pi)  # an int16 angle: steps of 2 pi / 65,536, at most 4.8e-5 rad off
_BASE = 10_000.0


class Synchrony(NamedTuple):
    """How far phases agree, and what couples them."""

    order: Tensor
    """|mean over tokens of e^(i th)|, (batch, width): 1 if all tokens have the same phase."""
    pull: Tensor
    """r = |sum_u A[t, u] e^(i th_u)|, (batch, time, width): agreement of what a token couples to."""
    gain: Tensor
    """kappa, (width,); with harmonics that of the first, as is r."""
    gates: Tensor | None
    """g, (heads, 1, blocks) or (batch, heads, time, blocks); None if the weights are not learned."""


class Kuramoto(Mechanism):
    """Softmax coupling of oscillators; the state is the value, the output a tangent of the torus."""

    name: ClassVar[str] = "kuramoto"
    Options: ClassVar[type] = KuramotoOptions
    residual: ClassVar[str] = "torus"
    # Coupling is to previous states; the successor of a key has no counterpart in a bidirectional model.
    supports: ClassVar[Supports] = Supports(bidirectional=False)

    frozen_q: Tensor
    frozen_k: Tensor

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        self.group = self.make_group(options)
        full, numbers = options.heads == "full", self.group.numbers
        wide = shape.width if full else shape.head_dim
        if wide % numbers:
            raise UserError(
                f"{self.name}: {self.group.name} has blocks of {numbers} coordinates, which do not divide the "
                f"{wide} of {'the width' if full else 'a head'}"
            )
        if options.drift == "half" and wide < 2 * numbers:
            raise UserError(f"{self.name}: drift=half needs two blocks per head; this shape has one")
        self.heads = shape.heads
        self.key_heads = 1 if full else shape.heads
        """With full heads the gates are applied to the queries, so all heads share one key."""
        self.blocks = wide // numbers
        """Blocks per head."""
        blocks = shape.width // numbers
        features = blocks * self.group.width
        self.start_gain = options.gain_start / (shape.heads if full else 1)
        self.drifts = shape.positions == "rope" and options.drift != "none" and bool(self.group.turned)
        if options.coupling == "softmax":
            self._make_scores(blocks, features)
        elif options.coupling == "random_frozen":
            self.register_buffer("frozen_q", torch.zeros(shape.context, features))
            self.register_buffer("frozen_k", torch.zeros(shape.context, features))
        if options.coupling == "off":
            return
        if options.value == "dense":
            self.v = nn.Linear(features, shape.width, bias=False)
        elif options.successor != "mix" and options.gain != "one":
            raw = self.start_gain
            if options.gain == "capped":
                raw = math.log(raw / (2 - raw))
            self.kappa = self._coefficients(blocks, raw)
        if options.successor == "mix":
            start = 1.0 if options.value == "dense" else self.start_gain
            self.here = self._coefficients(blocks, start)
            self.after = self._coefficients(blocks, 0.0)

    def make_group(self, options: Any) -> Group:
        """Return the group of a block; a derived class may return its own."""
        if options.group in ("son", "sphere"):
            return (groups.Orthogonal if options.group == "son" else groups.Sphere)(options.order)
        kinds: dict[str, type[Group]] = {
            "s1": groups.Circle,
            "s3": groups.Quaternions,
            "so3": groups.Rotations,
        }
        return kinds[options.group]()

    def _coefficients(self, blocks: int, start: float) -> nn.Parameter:
        """Return coefficients of the coupling, harmonics innermost: the first of each block is `start`, the others 0."""
        value = torch.zeros(blocks, self.options.harmonics)
        value[:, 0] = start
        return nn.Parameter(value.flatten())

    def _make_scores(self, blocks: int, features: int) -> None:
        options = self.options
        # Vectors, not matrices: exempt from weight decay.
        if options.gate != "const":
            self.gate = nn.Parameter(torch.full((self.heads * self.blocks,), self._raw_gate()))
        if options.gate == "token":
            self.token_gate = nn.Parameter(
                torch.empty(self.heads, self.blocks, self.blocks * self.group.width)
            )
        if options.gate == "pair":
            self.gate_q, self.gate_k = nn.Linear(features, blocks), nn.Linear(features, blocks)
        if options.phase_map in ("query", "both"):
            self.q = nn.Linear(features, blocks, bias=False)
        if options.phase_map in ("key", "both"):
            self.k = nn.Linear(features, blocks, bias=False)
        if options.mask == "strict_null":
            self.null = nn.Parameter(torch.zeros(features))
        if self.drifts and options.drift == "learned":
            rates = _BASE ** (-torch.arange(self.blocks) / self.blocks)
            self.rate = nn.Parameter(rates.repeat(self.key_heads))

    def initialise(self, draw: Draw) -> None:
        """Set initial values: maps of features at a quarter of unit variance."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim >= 2:
                    std = 0.5 / math.sqrt(parameter.shape[-1])
                    parameter.copy_(draw(name, parameter.shape, None if name == "v.weight" else std))
                elif name.endswith("bias"):
                    parameter.zero_()
            for name, table in self.named_buffers():
                normal = draw(name, (len(table), self.shape.width), 1.0)
                free = self._points(self.group.scatter(self._points(normal)).flatten(-2))
                table.copy_(self.group.features(self.group.place(free)).flatten(-2))

    # The layer.

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the tangent (batch, time, width) along which the states x move."""
        if self.options.coupling == "off":
            return x * 0.0  # a function of x, so that its gradient exists and is zero
        state, own, q, k, v = self._read(x, frame, cache)
        return self._write(state, own, self._mix(q, k, v, frame)).to(x.dtype)

    def _read(
        self, x: Tensor, frame: Frame, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the states and their features, and q, k, v of every token so far."""
        state = x.to(torch.promote_types(x.dtype, torch.float32))
        own = self._features(state)
        v = self._values(state, own, cache)
        softmax = self.options.coupling == "softmax"
        q, k = self._queries_keys(state, own, v, frame, cache) if softmax else self._fixed(v, frame)
        return state, own, q, k, v

    def _values(self, state: Tensor, own: Tensor, cache: Cache | None) -> Tensor:
        """Return the raw features (batch, key heads, keys, dim) of every token so far."""
        if cache is None:
            return self._split(own)
        if self.options.cache == "features":
            return cache.append("v", self._split(own)).to(own.dtype)
        if self.options.cache == "i16":
            turns = torch.remainder((state * _TURNS).round(), 2.0**16)
            state = cache.append("state", torch.where(turns < 2**15, turns, turns - 2**16)) / _TURNS
        else:
            state = cache.append("state", state)
        return self._split(self._features(state.to(own.dtype)))

    def _queries_keys(
        self, state: Tensor, own: Tensor, v: Tensor, frame: Frame, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """Return gated, drifted q (batch, heads, time, dim) and k (batch, key heads, keys, dim) of every token so far.

        The whole gate is applied to the query: g cos(a - b) does not depend on which side has g.
        """
        maps = self._maps(own)
        if self._keeps_keys:
            k = self._drift(self._split(self._moved(state, own, maps.get("k"))), frame)
            if "gate_k" in maps:
                k = k * self._per_feature(2 * torch.sigmoid(maps["gate_k"]))
            k = k if cache is None else cache.append("k", k).to(k.dtype)
        else:
            k = self._drift(v, frame, keys=True)
        if cache is None and not self._mapped_keys and "q" not in maps:
            q = k
        else:
            q = self._drift(self._split(self._moved(state, own, maps.get("q"))), frame)
        q = q * self._gates(own)
        if "gate_q" in maps:
            q = q * self._per_feature(2 * torch.sigmoid(maps["gate_q"]))
        return q, k

    def _fixed(self, v: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        """Return q and k independent of the tokens: zeros for equal weights, or frozen random points."""
        batch, _, _, dim = v.shape
        if self.options.coupling == "uniform":
            return v.new_zeros(batch, self.heads, frame.time, dim), torch.zeros_like(v)
        if frame.start + frame.time > len(self.frozen_q):
            raise UserError(
                f"coupling=random_frozen has frozen weights for {len(self.frozen_q)} tokens; "
                f"{frame.start + frame.time} were requested"
            )
        q = self.frozen_q[frame.positions(v.device)] * (self.options.sharpness / self.blocks)
        k = self.frozen_k[frame.positions(v.device, keys=True)]
        q, k = (self._split(table.to(v.dtype).expand(batch, -1, -1)) for table in (q, k))
        return q.expand(-1, self.heads, -1, -1), k

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> Tensor:
        """Return sum_u A[t, u] times the value coupled to key u, (batch, heads, time, dim x harmonics).

        A query's keys end one before its own position, so the strict mask is the causal mask over all keys but the last:
        no mask is materialized without padding. The plain reference masks the diagonal instead.
        """
        v = self._harmonics(v)
        if self.options.mask == "inclusive":
            return frame.attend(q, k, v, scale=1.0)
        v = self._coupled(v)
        if self.options.mask == "strict_null":
            k, padding = self._with_null(k, frame)
            return attend(q, k, F.pad(v, (0, 0, 1, 0)), padding=padding, scale=1.0)
        first = 1 if frame.start == 0 else 0
        if is_plain():
            mixed = frame.attend(q, k, F.pad(v, (0, 0, 0, 1)), strict=True, scale=1.0)
        elif frame.time == first:
            mixed = q.new_zeros(*q.shape[:-1], v.shape[-1])
        else:
            padding = None if frame.padding is None else frame.padding[:, :-1]
            mixed = attend(q[..., first:, :], k[..., :-1, :], v, padding=padding, scale=1.0)
            mixed = F.pad(mixed, (0, 0, first, 0))
            if padding is None:
                return mixed
        return mixed * self._sees(frame, mixed)

    def _coupled(self, v: Tensor) -> Tensor:
        """Return, for every key but the last, the value coupled to it: its own, its successor's, or both."""
        if self.options.successor == "none":
            return v[..., :-1, :]
        if self.options.successor == "replace":
            return v[..., 1:, :]
        return v[..., :-1, :] * self._row(self.here) + v[..., 1:, :] * self._row(self.after)

    def _with_null(self, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor | None]:
        null = self.null.to(k.dtype).view(self.key_heads, 1, -1).expand(len(k), -1, -1, -1)
        padding = None if frame.padding is None else F.pad(frame.padding[:, :-1], (1, 0), value=True)
        return torch.cat((null, k[..., :-1, :]), -2), padding

    def _write(self, state: Tensor, own: Tensor, mixed: Tensor) -> Tensor:
        """Return the update (batch, time, width); contributions of heads that share coordinates are summed."""
        full = self.options.heads == "full"
        mean = mixed.sum(1) if full else mixed.transpose(1, 2).flatten(2)
        if self.options.value == "dense":
            output: Tensor = self.v(mean.to(self.v.weight.dtype))
            return output
        width = self.group.width
        own, mean = self._harmonics(own).unflatten(-1, (-1, width)), mean.unflatten(-1, (-1, width))
        pull = self.group.pull(self._points(state), own, mean).flatten(-2)
        gain = self._gain()
        if self.options.update == "embed":
            return torch.atan2(gain * pull, 1 + gain * (own * mean).sum(-1))
        if isinstance(gain, Tensor):
            gain = gain.repeat_interleave(self.group.numbers)
        moved = pull if isinstance(gain, float) and gain == 1.0 else gain * pull
        harmonics = self.options.harmonics
        return moved if harmonics == 1 else moved.unflatten(-1, (-1, harmonics)).sum(-1)

    # Helpers.

    def _points(self, state: Tensor) -> Tensor:
        return state.unflatten(-1, (-1, self.group.numbers))

    def _features(self, state: Tensor) -> Tensor:
        """Return (batch, time, features) of states (batch, time, width), block by block."""
        return self.group.features(self._points(state)).flatten(-2)

    def _harmonics(self, features: Tensor) -> Tensor:
        """Return the features of every harmonic, (..., dim x harmonics), block by block; those of th are first."""
        count = self.options.harmonics
        if count == 1:
            return features
        return circle_harmonics(features.unflatten(-1, (-1, 2)), count).flatten(-3)

    def _split(self, features: Tensor) -> Tensor:
        """Return (batch, key heads, time, dim)."""
        return features.unflatten(-1, (self.key_heads, -1)).transpose(1, 2)

    def _moved(self, state: Tensor, own: Tensor, shift: Tensor | None) -> Tensor:
        return own if shift is None else self._features(state + shift)

    def _maps(self, own: Tensor) -> dict[str, Tensor]:
        """Return the outputs of the maps of the features, by name, each (batch, time, blocks)."""
        children = self.named_children()
        layers = {name: layer for name, layer in children if name != "v" and isinstance(layer, nn.Linear)}
        if not layers:
            return {}
        weights = [layer.weight for layer in layers.values()]
        given = project(own.to(weights[0].dtype), weights)
        return {
            name: output if layer.bias is None else output + layer.bias
            for (name, layer), output in zip(layers.items(), given, strict=True)
        }

    def _per_feature(self, blockwise: Tensor) -> Tensor:
        """Return (batch, key heads, time, dim) from one number per block, (batch, time, blocks)."""
        return self._split(blockwise.repeat_interleave(self.group.width, -1))

    def _row(self, blockwise: Tensor) -> Tensor:
        """Return (key heads, 1, dim) from one number per block."""
        return blockwise.repeat_interleave(self.group.width).view(self.key_heads, 1, -1)

    def _raw_gate(self) -> float:
        """Return the parameter value whose gate is sharpness / blocks."""
        start = self.options.sharpness / self.blocks
        if self.options.gate_map == "softplus":
            return start + math.log(-math.expm1(-start))  # ln(e^start - 1) without overflow
        return {"exp": math.log(start), "sigmoid_scaled": 0.0, "free": start}[self.options.gate_map]

    def _gates(self, own: Tensor) -> Tensor | float:
        """Return g, (heads, 1, dim) or (batch, heads, time, dim)."""
        start, kind = self.options.sharpness / self.blocks, self.options.gate_map
        if self.options.gate == "const":
            return start
        gate = self.gate.view(self.heads, 1, self.blocks)
        if self.options.gate == "token":
            gate = gate + self._split(own).to(gate.dtype) @ self.token_gate.mT
        if kind in ("softplus", "exp"):
            gate = F.softplus(gate) if kind == "softplus" else gate.exp()
        elif kind == "sigmoid_scaled":
            gate = 2 * start * torch.sigmoid(gate)
        return gate.repeat_interleave(self.group.width, -1)

    def _gain(self) -> Tensor | float:
        if self.options.successor == "mix":
            return 1.0  # the values already include the two coefficients
        if self.options.gain == "one":
            return self.start_gain
        return 2 * torch.sigmoid(self.kappa) if self.options.gain == "capped" else self.kappa

    def _drift(self, features: Tensor, frame: Frame, keys: bool = False) -> Tensor:
        """Return features (batch, key heads, time, dim) rotated by their positions; a phase is a rotary pair."""
        if not self.drifts or frame.rotary is None:
            return features
        if self.options.drift == "fixed" and self.group.turned == ((0, 1),) and self.group.width == 2:
            return frame.rotate(features, keys)
        table = self._angles(frame, features, keys)
        return groups.turn(self.group, features.unflatten(-1, (self.blocks, -1)), table).flatten(-2)

    def _angles(self, frame: Frame, like: Tensor, keys: bool) -> Tensor:
        """Return cosine and sine (..., key heads or 1, time, blocks, 2) of the drift, computed in float64."""
        assert frame.rotary is not None
        if self.options.drift == "learned":
            rates = self.rate.double().view(self.key_heads, 1, self.blocks)
        else:
            turning = self.blocks // 2 if self.options.drift == "half" else self.blocks
            place = torch.arange(turning, dtype=torch.float64, device=like.device)
            rates = F.pad(frame.rotary.theta ** (-place / turning), (0, self.blocks - turning))[None, None]
        angles = frame.positions(like.device, keys).double()[..., None, :, None] * rates
        return torch.stack((angles.cos(), angles.sin()), -1).to(like.dtype)

    def _sees(self, frame: Frame, like: Tensor) -> Tensor:
        """Return (time, 1) or (batch, 1, time, 1): 1 if there is an earlier token, else 0."""
        seen = (frame.positions(like.device) > 0).to(like.dtype).unsqueeze(-1)
        return seen if frame.padding is None else seen.unsqueeze(1)

    @property
    def _mapped_keys(self) -> bool:
        return self.options.gate == "pair" or self.options.phase_map in ("key", "both")

    @property
    def _keeps_keys(self) -> bool:
        """Whether the decoding cache stores keys: they are expensive to recompute, or `cache` requests the features."""
        return self._mapped_keys or self.options.cache == "features"

    # Cost, cache and parameter groups.

    @property
    def residual_options(self) -> TorusOptions:
        """The torus with this mechanism's options."""
        options = self.options
        return TorusOptions(self.group, options.ffn, options.ffn_start, options.readout, options.spread)

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor | None:
        """Return A (batch, heads, time, time); a null key's weight is on the diagonal, where coupling has no effect."""
        if self.options.coupling == "off":
            return None
        _, _, q, k, _ = self._read(x, frame, None)
        if self.options.mask == "strict_null":
            k, padding = self._with_null(k, frame)
            mask = view_mask(frame.time, frame.time, x.device, True, padding)
            weights = attention_weights(q, k, mask, 1.0)
            return F.pad(weights[..., 1:], (0, 1)) + torch.diag_embed(weights[..., 0])
        strict = self.options.mask == "strict"
        weights = attention_weights(q, k, frame.mask(x.device, strict=strict), 1.0)
        return weights * self._sees(frame, weights) if strict else weights

    def synchrony(self, x: Tensor, frame: Frame) -> Synchrony | None:
        """Return how far the phases of x (batch, time, width) agree; None without coupling or without angles."""
        if self.options.coupling == "off" or self.group.width != 2 or self.group.numbers != 1:
            return None
        state, own, q, k, v = self._read(x, frame, None)
        mixed = self._mix(q, k, v, frame)
        mean = mixed.sum(1) if self.options.heads == "full" else mixed.transpose(1, 2).flatten(2)
        gates = None
        if self.options.coupling == "softmax":
            gates = torch.as_tensor(self._gates(own)).to(state)
            gates = (gates if gates.ndim else gates.expand(self.heads, 1, 2 * self.blocks))[..., ::2]
        gain = torch.as_tensor(1.0 if self.options.value == "dense" else self._gain()).to(state)
        order, pull = (part.unflatten(-1, (-1, 2)).norm(dim=-1) for part in (own.mean(1), mean))
        first = slice(None, None, self.options.harmonics)
        gain = gain[first] if gain.ndim else gain.expand(state.shape[-1])
        return Synchrony(order, pull[..., first], gain, gates)

    @property
    def cache_error(self) -> float:  # type: ignore[override]
        """Angles in 16 bits have an error of up to 4.8e-5 rad, each harmonic that many times its number."""
        return 1e-3 * self.options.harmonics if self.options.cache == "i16" else 0.0

    def cache_spec(self) -> tuple[Entry, ...]:
        """The states at the layer's input; also the keys if maps compute them; or the features of both."""
        if self.options.coupling == "off":
            return ()
        head = (self.key_heads, self.blocks * self.group.width)
        keys = (Entry("k", head),) if self.options.coupling == "softmax" and self._keeps_keys else ()
        if self.options.cache == "features":
            return (*keys, Entry("v", head))
        narrow = torch.int16 if self.options.cache == "i16" else None
        return (*keys, Entry("state", (self.shape.width,), dtype=narrow, least=torch.float32))

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return maps and pull, and score and mix over the visible keys (causal) or all keys (full)."""
        if self.options.coupling == "off":
            return Flops(0.0, 0.0)
        blocks = self.shape.width // self.group.numbers
        maps = 2.0 * sum(parameter.numel() for parameter in self.parameters() if parameter.ndim >= 2)
        if self.options.value != "dense":
            maps += blocks * self.group.pull_flops
        per_key = 2.0 * (1 + self.options.harmonics) * self.heads * self.blocks * self.group.width
        strict = self.options.mask == "strict"
        if mode == "decode":
            return Flops(maps + per_key * (context - strict), maps + per_key * context)
        # With a strict mask the first token has no key, but mean_keys counts it as attending to itself.
        seen = mean_keys(context, strict=strict) - strict / context
        return Flops(maps + per_key * seen, maps + per_key * context)

    def circuits(self) -> list[Circuit]:
        """Maps of the score are qk, the dense value ov; gates and drift follow qk, gains follow ov."""
        gains = dict.fromkeys(("kappa", "here", "after"), Circuit("own", follows="ov"))
        return circuits_by_name(self, gains, rest=Circuit("own", follows="qk"))
