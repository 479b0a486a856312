"""The difference of two softmax maps: what both have in common cancels, like noise in a differential amplifier.

    O_j = (A_1 - lambda A_2) v_j
    version 1:  lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init, one per layer; each head's output is normalized
    version 2:  lambda = sigmoid(W_lambda x), one per token and head; two queries share a key and a value; no norm

Version 1: Ye et al., "Differential Transformer", arXiv 2410.05258; half the heads, with values twice as wide.
Version 2: the authors' note and code of January 2026; twice the queries. Both are computed as differences of attention
outputs, so no map is materialized.

Arms: differential:version=2 differential:version=2,kv_heads=2

Claims: Version 1 needs about 65 % of the parameters or tokens of a transformer for the same loss (6.8B against 11B), with
fewer outliers and better retrieval. Version 2: loss 0.02 to 0.03 lower near 1T tokens, standard's decoding speed, fewer
gradient spikes.

Watch: Version 2 has 5 D² + D h parameters per layer where standard has 4 D²: race it with `shape = params`. Version 1 has
values twice as wide, so FLOPs differ at equal parameters. The map is signed and its rows sum to 1 - lambda. Others report
failed small runs of version 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headtohead.common.errors import UserError
from headtohead.kernels import attention_weights, rms_norm
from headtohead.mechanisms.contract.base import Circuit, Draw, Frame, Mode, Shape
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.contract.projected import Projected, joined_linear

NORM_EPS = 1e-5  # of version 1's norm per head, as published; not the model's eps


@dataclass(frozen=True)
class DifferentialOptions(Options):
    """Options of Differential Attention."""

    cases: ClassVar[str] = "version=2 version=2,kv_heads=1 version=2,kv_heads=2"

    version: int = option(
        1,
        "1: half the heads, twice as wide, normalized; 2: twice the queries, lambda from the token, no norm",
        choices=(1, 2),
    )
    kv_heads: int = option(
        0, "version 2: key/value heads shared by the queries; 0: the model's setting", low=0
    )

    def validate(self) -> None:
        """Raise for grouped keys if each query has its own key."""
        if self.version == 1 and self.kv_heads:
            raise UserError("version=1 gives every query its own key; kv_heads needs version=2")


class Differential(Projected):
    """Softmax attention minus a learned fraction of a second one over the same values."""

    name: ClassVar[str] = "differential"
    Options: ClassVar[type] = DifferentialOptions
    # Lambda sets the weight of the second map; the norm's gain scales the values.
    tags: ClassVar = {"gain": "ov"} | dict.fromkeys(
        ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_map"), Circuit("own", follows="qk")
    )
    signed = True

    def __init__(self, shape: Shape, options: Any) -> None:
        first = options.version == 1
        super().__init__(shape, options, kv_heads=shape.heads if first else options.kv_heads)
        width, dim = shape.width, self.dim
        if first:
            if shape.heads % 2:
                raise UserError(f"differential needs an even number of heads; got {shape.heads}")
            self.pairs, self.lambda_init = shape.heads // 2, lambda_init(shape.layer)
            self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
                nn.Parameter(torch.zeros(dim)) for _ in range(4)
            )
            self.gain = nn.Parameter(torch.ones(2 * dim))
        else:
            self.pairs, self.heads = shape.heads, 2 * shape.heads
            self.lambda_map = nn.Linear(width, self.pairs, bias=False)
        self.q = self.linear(width, self.heads * dim)
        self.k = self.linear(width, self.kv_heads * dim)
        self.v = self.linear(width, self.kv_heads * dim)
        self.o = self.linear(width, width, output=True)

    def initialise(self, draw: Draw) -> None:
        """Set initial values; version 1's four vectors have standard deviation 0.1."""
        super().initialise(draw)
        if self.options.version == 1:
            with torch.no_grad():
                for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                    getattr(self, name).copy_(draw(name, (self.dim,), 0.1))
                self.gain.fill_(1.0)

    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k in heads of width d, queries 2j and 2j + 1 as a pair; v in heads of 2d (1) or d (2)."""
        q, k, v = joined_linear(x, [self.q, self.k, self.v])
        values = self.pairs if self.options.version == 1 else self.kv_heads
        return self.in_heads(q, k, v, values=values)

    def forward(self, x: Tensor, frame: Frame, cache: Cache | None = None) -> Tensor:
        """Return the output of this layer for x (batch, time, width)."""
        q, k, v = self.positioned(x, frame, cache)
        if cache is not None:
            k, v = cache.append("k", k), cache.append("v", v)
        if self.options.version == 1:
            # (A_1 - lambda A_2) v = A_1 v - lambda A_2 v: no map is materialized.
            wanted = frame.attend(q[:, 0::2], k[:, 0::2], v)
            common = frame.attend(q[:, 1::2], k[:, 1::2], v)
        else:
            mixed = frame.attend(q, k, v)
            wanted, common = mixed[:, 0::2], mixed[:, 1::2]
        return self.write(wanted - self.share(x) * common, frame)

    def share(self, x: Tensor) -> Tensor:
        """Return lambda: a scalar (version 1), or (batch, pairs, time, 1) (version 2)."""
        if self.options.version == 2:
            return torch.sigmoid(self.lambda_map(x)).transpose(1, 2).unsqueeze(-1)
        q1, k1, q2, k2 = (
            vector.to(torch.promote_types(vector.dtype, torch.float32))
            for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        )
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def write(self, mixed: Tensor, frame: Frame) -> Tensor:
        """Return (batch, time, width); version 1 normalizes each head first, with 1 - lambda_init inside the gain."""
        if self.options.version == 1:
            mixed = rms_norm(mixed, self.gain * (1 - self.lambda_init), NORM_EPS)
        return super().write(mixed, frame)

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return A_1 - lambda A_2, (batch, pairs, time, time); its rows sum to 1 - lambda."""
        q, k, _ = self.positioned(x, frame)
        maps = attention_weights(q, k, frame.mask(x.device))
        return maps[:, 0::2] - self.share(x) * maps[:, 1::2]

    def cache_spec(self) -> tuple[Entry, ...]:
        """Keys and values of every token."""
        if self.options.version == 1:
            return (Entry("k", (self.heads, self.dim)), Entry("v", (self.pairs, 2 * self.dim)))
        return super().cache_spec()

    def key_flops(self, mode: Mode) -> float:
        """Return 6 D for version 1, whose two maps read the same values, and 8 D for version 2, with twice the queries."""
        return (6.0 if self.options.version == 1 else 4.0) * self.heads * self.dim

    @classmethod
    def label(cls, options: Any) -> str:
        """Return `differential V1`, or V2 with its kv heads."""
        plural = "" if options.kv_heads == 1 else "s"
        groups = f", {options.kv_heads} kv head{plural}" if options.kv_heads else ""
        return f"differential V{options.version}{groups}"


def lambda_init(layer: int) -> float:
    """Return 0.8 - 0.6 exp(-0.3 l) for layer l, counted from 0: 0.2 in the first, 0.727 in the eighth."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)
