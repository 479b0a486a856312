"""Forgetting attention of one sequence: score_ij + sum_(l = j+1..i) log f_l, term by term."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.references.heads import affine, attended, joined, projected


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""
    f = 1 / (1 + torch.exp(-affine(x, p, "forget_gate")))

    def weigh(head: int, i: int, seen: list[int], scores: Tensor) -> Tensor:
        decays = [sum((torch.log(f[t, head]) for t in range(j + 1, i + 1)), x.new_zeros(())) for j in seen]
        return torch.softmax(scores + torch.stack(decays), 0)

    q, k, v = projected(x, p, options, heads, positions if options.rope else "none")
    return affine(joined(attended(q, k, v, options.window, weigh)), p, "o")
