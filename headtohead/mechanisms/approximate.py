"""Second-order Taylor weights instead of exp: close to softmax, and linear in features of q and k.

    a_ij = w_ij / sum_(m <= i) w_im        w = 1 + s + s^2/2        s_ij = q_i . k_j / sqrt(d)

Approximate of Xue, Moosavi, Aletras, "Deconstructing Attention", arXiv 2510.11602, eq. 6, after BASED (Arora et al.,
arXiv 2402.18668). `features=outer` uses the full (q . k)^2 / 2d, a true distribution. It is dense on CPU and uses
FlexAttention with the log-score log(1 + s + s^2/2) on a GPU, without the map in memory. `features=elementwise` uses
sum_u (q_u k_u)^2 / 2d: a state of fixed size, and weights that can be negative. `normaliser=per_order` normalizes the three
orders separately and takes their mean.

Arms: approximate:features=elementwise even(approximate)

Claims: Used in every layer, 47.9 word perplexity on WikiText against 38.1 (500M, 15B tokens), the best of the substitutes
used this way; with every second layer standard, 39.4.

Watch: The paper can be read in three ways; `outer` with a joint normalizer is our default, the published state size matches
`elementwise`, and `per_order` divides by first-order sums that change sign (it is included to show that). `outer` has
standard's cache: its own state would equal the keys and values of 1,089 tokens at head width 64. One run per cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.kernels import linear_attend, taylor_attend
from headtohead.kernels.attention.softmax import per_query_head
from headtohead.kernels.attention.taylor import taylor_weights
from headtohead.mechanisms.contract.base import Flops, Frame, Mode, Shape
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.families.deconstructed import Deconstructed, DeconstructedOptions

# Bounds a sum of signed weights, which can vanish; outer weights sum to at least half their keys.
_LEAST = 1e-12


@dataclass(frozen=True)
class ApproximateOptions(DeconstructedOptions):
    """Options of Taylor weights."""

    cases: ClassVar[str] = """
        features=elementwise,normaliser=per_order features=elementwise,kv_heads=2,qk_norm=true features=elementwise
    """

    features: str = option(
        "outer",
        "the second order: outer is the square of the dot product, elementwise the dot product of squares",
        choices=("outer", "elementwise"),
    )
    normaliser: str = option(
        "joint",
        "joint normalizes the sum of all orders; per_order each order separately, whose first changes sign and is unstable",
        choices=("joint", "per_order"),
    )

    def validate(self) -> None:
        """Raise for a combination that would need the map in memory."""
        if self.normaliser == "per_order" and self.features == "outer":
            raise UserError(
                "normaliser=per_order needs features=elementwise: orders of outer features are summed in one softmax"
            )


class Approximate(Deconstructed):
    """Attention with the second-order Taylor weights of exp."""

    name: ClassVar[str] = "approximate"
    Options: ClassVar[type] = ApproximateOptions

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        self.recurrent = self.signed = self.singular = options.features == "elementwise"

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values (batch, heads, time, dim)."""
        if self.recurrent:
            return self._recur(q, k, v, frame, cache)
        if cache is not None:
            k, v = cache.append("k", k), cache.append("v", v)
        return taylor_attend(q, k, v, causal=frame.causal, padding=frame.padding)

    def attention_map(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the map (batch, heads, time, time)."""
        q, k, _ = self.positioned(x, frame)
        mask = frame.mask(x.device)
        if not self.recurrent:
            return taylor_weights(q, k, mask)
        parts = []
        for left, right in zip(self._orders(q), self._orders(per_query_head(k, q)), strict=True):
            weights = (left @ right.transpose(-2, -1)).masked_fill(~mask, 0.0)
            parts.append(weights / (weights.sum(-1, keepdim=True) + _LEAST))
        return torch.stack(parts).mean(0)

    def _recur(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the same from sums over the prefix: of values and, in one extra column, of weights."""
        values = F.pad(v, (0, 1), value=1.0)
        lefts, rights = self._orders(q), self._orders(k)
        widths = [right.shape[-1] for right in rights]
        if frame.padding is not None:
            real = frame.padding[:, None, frame.start :, None]
            rights = [right * real for right in rights]
        states = [None] * len(widths) if cache is None else cache.tensors["state"].split(widths, -2)
        mixed, ended = [], []
        for left, right, state in zip(lefts, rights, states, strict=True):
            sums, state = linear_attend(left, right, values, state, frame.causal)
            mixed.append(sums[..., :-1] / (sums[..., -1:] + _LEAST))
            ended.append(state)
        if cache is not None:
            cache.tensors["state"].copy_(torch.cat(ended, -2))
        return torch.stack(mixed).mean(0).to(v.dtype)

    def _orders(self, x: Tensor) -> list[Tensor]:
        """Return the features that are normalized together: 1, y, y^2 / sqrt 2 with y = x / d^(1/4)."""
        y = x.to(torch.promote_types(x.dtype, torch.float32)) * self.dim**-0.25
        orders = [torch.ones_like(y[..., :1]), y, y.square() * 2**-0.5]
        return orders if self.options.normaliser == "per_order" else [torch.cat(orders, -1)]

    def cache_spec(self) -> tuple[Entry, ...]:
        """Keys and values of every token; for elementwise features only their sums."""
        if not self.recurrent:
            return super().cache_spec()
        return (
            Entry("state", (self.kv_heads, 1 + 2 * self.dim, self.dim + 1), "sequence", least=torch.float32),
        )

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return projections and the mix; elementwise features read and write their sums once per token."""
        if not self.recurrent:
            return super().flops(context, batch, mode)
        linear = self.linear_flops(mode)
        linear += 2.0 * (self.heads + self.kv_heads) * (1 + 2 * self.dim) * (self.dim + 1)
        return Flops(linear, linear)
