"""Query-key and output-value circuit token by token, head by head, from the definitions.

factored:   s_ij = (W_Q x_i) . (W_K x_j) / sqrt(k), o_i = sum_h W_O^h sum_j a_ij W_V^h x_j
collapsed:  s_ij = x_j . (W_QK^h x_i) / sqrt(k),    o_i = sum_h W_OV^h sum_j a_ij x_j
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def expected(x: Tensor, p: dict[str, Tensor], options: Any, *, heads: int, positions: str) -> Tensor:
    """Return one sequence's output (time, width)."""
    time, width = x.shape
    k = options.inner or width // heads
    zero = torch.zeros((), dtype=x.dtype)
    rows = []
    for i in range(time):
        written = torch.zeros(width, dtype=x.dtype)
        for h in range(heads):
            narrow, wide = slice(h * k, (h + 1) * k), slice(h * width, (h + 1) * width)
            scores = []
            for j in range(i + 1):
                if options.form.startswith("CA"):
                    bias = p["qk.bias"][wide] if "qk.bias" in p else zero
                    score = x[j] @ (p["qk.weight"][wide] @ x[i] + bias)
                else:
                    query, key = (
                        p[f"{name}.weight"][narrow] @ token
                        + (p[f"{name}.bias"][narrow] if f"{name}.bias" in p else zero)
                        for name, token in (("q", x[i]), ("k", x[j]))
                    )
                    score = query @ key
                scores.append(score / math.sqrt(k))
            weights = torch.softmax(torch.stack(scores), 0)
            for j in range(i + 1):
                if options.form.endswith("CO"):
                    carried = p["ov.weight"][:, wide] @ x[j]
                else:
                    value = p["v.weight"][narrow] @ x[j]
                    value = value + (p["v.bias"][narrow] if "v.bias" in p else zero)
                    carried = p["o.weight"][:, narrow] @ value
                written = written + weights[j] * carried
        last = "ov" if options.form.endswith("CO") else "o"
        rows.append(written + p.get(f"{last}.bias", zero))
    return torch.stack(rows)
