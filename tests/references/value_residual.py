"""Value residuals of one sequence: values a v_1 + b v."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.references.heads import affine, attended, in_heads, joined, projected


def expected(
    x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str, first: Tensor | None = None
) -> Tensor:
    """Return one sequence's output (time, width); `first` are the first layer's values (time, ...), by default its own."""
    q, k, _ = projected(x, p, options, heads, positions)
    own = affine(x, p, "v")
    a, b = p["shares"] if options.mix == "learned" else (0.5, 0.5)
    values = a * (own if first is None else first) + b * own
    v = in_heads(values, x.shape[1] // heads, heads)
    return affine(joined(attended(q, k, v, options.window)), p, "o")
