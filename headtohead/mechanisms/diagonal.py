"""One projection is query, key and value, made different by three learned diagonals: the cheapest fix for (Q=K=V).

    s = W_s x        q = s * Dq        k = s * Dk        v = s * Dv
    o_i = W_o sum_j softmax_j(q_i . k_j / sqrt(d)) v_j

Kowsher et al., "Does Self-Attention Need Separate Weights in Transformers?", arXiv 2412.00359. `init=signs` makes half of
the query's entries negative, which avoids the positive form that favors the token itself.

Claims: In BERT, 66.53 % fewer parameters in the attention block, 10 % less training time, and GLUE accuracy 0.38 % above
three projections, 5.81 % above a symmetric form (v1 of the paper; encoders only).

Watch: Half of standard's attention parameters: use `shape = params`. Rotary positions affect only the scores here; (Q=K=V)
of `sharing` also has them in the value and does better for it (results/sharing-1m).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headtohead.mechanisms.contract.base import Draw, Frame, Shape
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.contract.projected import Projected


@dataclass(frozen=True)
class DiagonalOptions(Options):
    """Options of the diagonal form."""

    init: str = option(
        "ones",
        "initial diagonals: ones is (Q=K=V); signs flips half of the query's entries, to avoid the positive form",
        choices=("ones", "signs"),
    )


class Diagonal(Projected):
    """Softmax attention from one projection with three diagonals; one tensor is cached."""

    name: ClassVar[str] = "diagonal"
    Options: ClassVar[type] = DiagonalOptions
    no_stage = "diagonal recomputes its keys from one cached tensor, so {stage} cannot change them"
    tags: ClassVar = {"s": "both", "q_diagonal": "qk", "k_diagonal": "qk", "v_diagonal": "ov"}

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options, kv_heads=shape.heads)
        width = shape.width
        self.s = self.linear(width, width)
        self.q_diagonal = nn.Parameter(torch.ones(width))
        self.k_diagonal = nn.Parameter(torch.ones(width))
        self.v_diagonal = nn.Parameter(torch.ones(width))
        self.o = self.linear(width, width, output=True)

    def initialise(self, draw: Draw) -> None:
        """Set initial values."""
        super().initialise(draw)
        with torch.no_grad():
            for diagonal in (self.q_diagonal, self.k_diagonal, self.v_diagonal):
                diagonal.fill_(1.0)
            if self.options.init == "signs":
                self.q_diagonal[draw("signs", (self.shape.width,), 1.0) < 0] = -1.0

    def project(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, the shared tensor s, and s again: its diagonals are applied on read."""
        s = self.split_heads(self.s(x), self.heads)
        return s * self._per_head(self.q_diagonal), s * self._per_head(self.k_diagonal), s

    def position(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q and k; v stays s."""
        return frame.rotate(q), frame.rotate(k), v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values; the value's diagonal is applied once, to the output."""
        if cache is not None:
            v = cache.append("s", v)
            k = frame.rotate(v * self._per_head(self.k_diagonal), keys=True)
        return frame.attend(q, k, v) * self._per_head(self.v_diagonal)

    def cache_spec(self) -> tuple[Entry, ...]:
        """Only the shared tensor."""
        return (Entry("s", (self.heads, self.dim)),)

    def _per_head(self, diagonal: Tensor) -> Tensor:
        return diagonal.view(self.heads, 1, self.dim)
