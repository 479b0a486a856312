"""The built-in score functions of `flex`; each is elementwise in s, head, i and j <= i, and -inf hides a pair."""

from __future__ import annotations

import torch
from torch import Tensor

from headtohead.mechanisms.contract.options import option
from headtohead.mechanisms.contract.score import Learned, Score, learned, score

_HIDDEN = float("-inf")


@score
def plain(s: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The score itself: standard attention, as a control."""
    return s


@score
def alibi(s: Tensor, head: Tensor, i: Tensor, j: Tensor, heads: int) -> Tensor:
    """A penalty linear in the distance: s - m (i - j), m = 2^(-8 (head + 1) / heads)."""
    slope = torch.exp2((head + 1).to(s.dtype) * (-8.0 / heads))
    return s - slope * (i - j)


@score
def softcap(
    s: Tensor, head: Tensor, i: Tensor, j: Tensor, cap: float = option(30.0, "bound of the scores", low=1e-3)
) -> Tensor:
    """Scores bounded by tanh: cap tanh(s / cap)."""
    return cap * torch.tanh(s / cap)


@score
def relative(
    s: Tensor,
    head: Tensor,
    i: Tensor,
    j: Tensor,
    reach: int = option(
        128, "number of distances with a bias of their own; larger ones share the last", low=1, high=2**17
    ),
    table: Learned = learned("heads", "reach"),  # noqa: B008  a declaration
) -> Tensor:
    """A learned bias for each head and distance: s + b[head, min(i - j, reach - 1)]."""
    return s + table[head, (i - j).clamp_max(reach - 1)]


@score
def sandwich(
    s: Tensor,
    head: Tensor,
    i: Tensor,
    j: Tensor,
    heads: int,
    dim: int = option(
        128, "width of the sinusoidal embeddings: twice the number of frequencies", low=2, high=4096
    ),
) -> Tensor:
    """The product of two sinusoidal embeddings: s + heads / (8 (head + 1)) sum_k cos((i - j) / 10000^(2 k / dim))."""
    distance = (i - j).to(s.dtype)
    bias = torch.cos(distance)
    for k in range(1, dim // 2):
        bias = bias + torch.cos(distance * 10_000.0 ** (-2 * k / dim))
    return s + bias * (heads / 8.0) / (head + 1)


@score(normalize="sigmoid")
def sigmoid(
    s: Tensor,
    head: Tensor,
    i: Tensor,
    j: Tensor,
    n: int = option(0, "sequence length in the bias -log n; 0: the i + 1 keys so far", low=0),
) -> Tensor:
    """Each weight by itself: sigmoid(s - log n), without a sum over keys."""
    return s - torch.log(((i + 1) * (n == 0) + n).to(s.dtype))


@score
def sliding(
    s: Tensor,
    head: Tensor,
    i: Tensor,
    j: Tensor,
    window: int = option(64, "number of visible keys, the own included", low=1),
) -> Tensor:
    """The last keys: i - j < window."""
    return torch.where(i - j < window, s, _HIDDEN)


@score
def dilated(
    s: Tensor,
    head: Tensor,
    i: Tensor,
    j: Tensor,
    dilation: int = option(4, "distance between visible keys", low=1),
    window: int = option(0, "number of visible keys, the own included; 0: all", low=0),
) -> Tensor:
    """Every dilation-th key: (i - j) mod dilation = 0, and i - j < window dilation if there is a window."""
    seen = (i - j) % dilation == 0
    return torch.where(seen & (i - j < window * dilation) if window else seen, s, _HIDDEN)


@score
def prefix(
    s: Tensor,
    head: Tensor,
    i: Tensor,
    j: Tensor,
    prefix: int = option(16, "number of first tokens that all later ones see", low=0),
    window: int = option(64, "number of last keys that are visible too, the own included", low=1),
) -> Tensor:
    """The first tokens and the last ones: j < prefix or i - j < window; causal inside the prefix too."""
    return torch.where((j < prefix) | (i - j < window), s, _HIDDEN)


SCORES: dict[str, Score] = {
    one.name: one for one in (plain, alibi, softcap, relative, sandwich, sigmoid, sliding, dilated, prefix)
}
