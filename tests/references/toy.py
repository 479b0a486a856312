"""The toy model from its formula: token by token, whole matrices, gradients by autograd, float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def loss(weights: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of sequences (count, time) of token ids; the last token is the query.

    `weights` holds W_Q and W_K, or W_QK; and W_O and W_V, or W_OV: all 50 x 50.
    """
    if "Q" in weights:
        scores = weights["Q"].T @ weights["K"]  # s(q, l) = (W_Q e_q).(W_K e_l)
    else:
        scores = weights["QK"]
    ov = weights["O"] @ weights["V"] if "O" in weights else weights["OV"]
    total = torch.zeros((), dtype=torch.float64)
    for sequence, label in zip(tokens, labels):
        weight = torch.softmax(scores[sequence[-1]][sequence] / math.sqrt(50), 0)
        mixed = weight @ torch.eye(50, dtype=torch.float64)[sequence]
        total = total - torch.log_softmax(ov @ mixed, 0)[label]
    return total / len(tokens)
