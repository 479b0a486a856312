"""Multi-head latent attention (MLA): the keys and values of all heads are computed from one small latent per token. Decoding
caches only this latent and one rotary key shared by all heads.

    c = W_D x                   k_h = [W_UK^h c ; R W_KR x]        v_h = W_UV^h c
    q_h = [W_Q^h y ; R W_QR^h y]    y = x, or W_DQ x with a query latent
    o_i = W_O [ sum_j softmax_j(q_h,i . k_h,j / sqrt(d_h + d_R)) v_h,j ]_h

The rotary key R W_KR x is separate because rotary positions on W_UK c could not be absorbed. DeepSeek-AI, "DeepSeek-V2",
arXiv 2405.04434.

Training computes keys and values explicitly. Decoding multiplies the query by W_UK^T and the mixed latents by W_UV
(absorbed), (W_Q y) . (W_UK c) = (W_UK^T W_Q y) . c, and so reads only the latent and the rotary key of each token.
`latent_norm` normalizes the latents as in the published models. Without rotary positions there is no rotary key.

Arms: latent:latent=128,rope_dim=64 latent:query_latent=256

Claims: DeepSeek-V2 has a 93.3 % smaller cache than DeepSeek 67B and a 5.76 times higher maximum generation throughput; its
latent attention is reported to be stronger than multi-head attention at the same size.

Watch: By default `latent` + `rope_dim` equals the model's width, which is the cache of (Q, K=V), its rival at equal cache;
it then has more parameters than standard. Absorbed decoding needs more FLOPs per key, 2H (2 `latent` + `rope_dim`) instead
of 4d: it reads less memory but computes more. The published comparison is between models that differ in many other ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headtohead.common.errors import UserError
from headtohead.kernels import attention_weights, rms_norm
from headtohead.mechanisms.contract.base import Draw, Frame, Mode, Shape
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.contract.projected import Projected, joined_linear


@dataclass(frozen=True)
class LatentOptions(Options):
    """Options of latent attention."""

    cases: ClassVar[str] = """
        latent=6 query_latent=5 rope_dim=6 latent_norm=true latent=7,query_latent=5,rope_dim=2,latent_norm=true
        latent=5,query_latent=6,latent_norm=true
    """

    latent: int = option(
        0,
        "width of the latent; 0: the model's minus the rotary key's, so that the cache equals that of (Q, K=V)",
        low=0,
    )
    query_latent: int = option(0, "width of a latent for the queries; 0: queries come from x", low=0)
    rope_dim: int = option(0, "width of the shared rotary key; 0: a head's, at most half the model's", low=0)
    latent_norm: bool = option(
        False, "normalize the latents, with a learned gain, as in the published models"
    )

    def validate(self) -> None:
        """Raise if the rotary key cannot be rotated in pairs."""
        if self.rope_dim % 2:
            raise UserError(f"rope rotates pairs of coordinates, but rope_dim={self.rope_dim} is odd")


class Latent(Projected):
    """Softmax attention over keys and values computed from a cached latent."""

    name: ClassVar[str] = "latent"
    Options: ClassVar[type] = LatentOptions
    no_stage = "latent decodes without computing keys, so {stage} cannot change them"
    # The latent serves both circuits; queries and rotary keys serve one.
    tags: ClassVar = {"down": "both", "gain": "both"} | dict.fromkeys(
        ("q_down", "q_gain", "q_rope", "k_rope"), "qk"
    )

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options, kv_heads=shape.heads)
        width = shape.width
        self.rope_dim = self._rope_dim()
        self.latent = options.latent or width - self.rope_dim
        source = options.query_latent or width
        # Up-projections have no biases: the latents have them.
        lifted = False if options.query_latent else None
        if options.query_latent:
            self.q_down = self.linear(width, source)
        self.q = self.linear(source, width, bias=lifted)
        self.down = self.linear(width, self.latent)
        self.k = self.linear(self.latent, width, bias=False)
        self.v = self.linear(self.latent, width, bias=False)
        if self.rope_dim:
            self.q_rope = self.linear(source, self.heads * self.rope_dim, bias=lifted)
            self.k_rope = self.linear(width, self.rope_dim)
        if options.latent_norm:
            self.gain = nn.Parameter(torch.ones(self.latent))
            if options.query_latent:
                self.q_gain = nn.Parameter(torch.ones(source))
        self.o = self.linear(width, width, output=True)

    def _rope_dim(self) -> int:
        given, width = self.options.rope_dim, self.shape.width
        if self.shape.positions != "rope":
            if given:
                raise UserError(
                    f"latent: rope_dim={given} needs positions=rope; the model has positions={self.shape.positions}"
                )
            return 0
        if given >= width and not self.options.latent:
            raise UserError(
                f"latent: rope_dim={given} leaves no latent in a width of {width}; set latent too"
            )
        return given or 2 * (min(self.dim, width // 2) // 2)

    def initialise(self, draw: Draw) -> None:
        """Set initial values; the up-projection of an unnormalized latent keeps the scale of one matrix."""
        super().initialise(draw)
        if self.options.latent_norm:
            return
        with torch.no_grad():
            for name in ("k", "v", *(self._query_names if self.options.query_latent else ())):
                up = getattr(self, name)
                up.weight.copy_(draw(f"{name}.weight", up.weight.shape, up.in_features**-0.5))

    # Queries, latents, and the two forms of attention.

    @property
    def _query_names(self) -> tuple[str, ...]:
        return ("q", "q_rope") if self.rope_dim else ("q",)

    def _read(self, x: Tensor, frame: Frame) -> tuple[list[Tensor], Tensor]:
        """Return the queries in heads, content and rotated part, and what the cache stores for the tokens.

        That is (batch, 1, time, latent + rope_dim): a token's latent, then its rotated key.
        """
        eps, normed, small = self.shape.norm_eps, self.options.latent_norm, self.options.query_latent
        names = [
            *(("q_down",) if small else self._query_names),
            "down",
            *(("k_rope",) if self.rope_dim else ()),
        ]
        parts = dict(zip(names, joined_linear(x, [getattr(self, name) for name in names]), strict=True))
        if small:
            source = rms_norm(parts["q_down"], self.q_gain, eps) if normed else parts["q_down"]
            lifted = joined_linear(source, [getattr(self, name) for name in self._query_names])
            parts |= zip(self._query_names, lifted, strict=True)
        queries = [self.split_heads(parts[name], self.heads) for name in self._query_names]
        latent = rms_norm(parts["down"], self.gain, eps) if normed else parts["down"]
        kept = latent.unsqueeze(1)
        if self.rope_dim:
            queries[1] = frame.rotate(queries[1])
            kept = torch.cat((kept, frame.rotate(parts["k_rope"].unsqueeze(1))), -1)
        return queries, kept

    def _explicit(self, queries: list[Tensor], kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k (batch, heads, time, dim + rope_dim) and v (batch, heads, time, dim)."""
        latent, rotary = kept.squeeze(1).split((self.latent, self.rope_dim), -1)
        k, v = (self.split_heads(up, self.heads) for up in joined_linear(latent, [self.k, self.v]))
        if self.rope_dim:
            k = torch.cat((k, rotary.unsqueeze(1).expand(-1, self.heads, -1, -1)), -1)
        return torch.cat(queries, -1), k, v

    def _absorbed(self, queries: list[Tensor], kept: Tensor, frame: Frame) -> Tensor:
        """Return the mixed values (batch, heads, time, dim) with one key, the cached latents, for all heads."""
        lowered = torch.einsum("bhtd,hdc->bhtc", queries[0], self._per_head(self.k))
        q = torch.cat((lowered, *queries[1:]), -1)
        scale = (self.dim + self.rope_dim) ** -0.5
        mixed = frame.attend(q, kept, kept[..., : self.latent], scale=scale)
        return torch.einsum("bhtc,hdc->bhtd", mixed, self._per_head(self.v))

    def _per_head(self, up: nn.Linear) -> Tensor:
        return up.weight.unflatten(0, (self.heads, -1))

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the output of this layer for x: absorbed in decoding, explicit in training and prefill."""
        queries, kept = self._read(x, frame)
        if cache is not None:
            kept = cache.append("latent", kept)
            if frame.start or frame.time == 1:
                return self.write(self._absorbed(queries, kept, frame), frame)
        return self.write(frame.attend(*self._explicit(queries, kept)), frame)

    # Cost, cache and parameter groups.

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the softmax map (batch, heads, time, time)."""
        q, k, _ = self._explicit(*self._read(x, frame))
        return attention_weights(q, k, frame.mask(x.device))

    def cache_spec(self) -> tuple[Entry, ...]:
        """The latent and the shared rotary key, concatenated: keys read both, values the first part."""
        return (Entry("latent", (1, self.latent + self.rope_dim)),)

    def key_flops(self, mode: Mode) -> float:
        """Return score and mix per key, over heads or, absorbed, over latents; projections cost the same in both."""
        wide = self.latent if mode == "decode" else self.dim
        return 2.0 * self.heads * (2 * wide + self.rope_dim)

    @classmethod
    def label(cls, options: Any) -> str:
        """Return MLA with the widths that are set."""
        extras = [f"latent {options.latent}"] if options.latent else []
        extras += [f"query latent {options.query_latent}"] if options.query_latent else []
        extras += [f"rope {options.rope_dim}"] if options.rope_dim else []
        extras += ["normed"] if options.latent_norm else []
        return ", ".join(["MLA", *extras])
