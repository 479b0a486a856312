"""Attention with changed scores: softmax or sigmoid of f(s_ij, head, i, j), with s_ij = q_i . k_j / sqrt(d) and j <= i."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from headtohead.common.errors import first_line
from headtohead.kernels.attention.softmax import per_query_head, view_mask
from headtohead.kernels.path import is_compiling, is_plain, is_stacking
from headtohead.kernels.vmap import folded

NORMALIZATIONS = ("softmax", "sigmoid")

_HIDDEN = float("-inf")
_GRAPHS = 512
"""Compiled graphs kept: one for each score function, shape and precision. Beyond the limit the map would be in memory."""
_numbers = itertools.count()
_compiled_flex: Any = None
# By the number of a function: a compiled model reads constants as keys, but would trace through `functools.cache`.
_prepared: dict[tuple[int, int, int, str], tuple[Callable[..., Tensor], BlockMask]] = {}
_taken: dict[tuple[Any, ...], bool] = {}


class Change(Protocol):
    """(s, head, i, j, *learned) -> scores, elementwise; -inf hides a pair, depending on head, i and j only."""

    number: int

    def __call__(self, s: Tensor, head: Tensor, i: Tensor, j: Tensor, *learned: Tensor) -> Tensor:
        """Return the changed scores."""


def numbered(function: Callable[..., Tensor]) -> Change:
    """Return the function with a number of its own, under which what FlexAttention needs is kept."""
    change = cast(Change, function)
    change.number = next(_numbers)
    return change


def scored_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    change: Change,
    i: Tensor,
    j: Tensor,
    *,
    padding: Tensor | None = None,
    normalize: str = "softmax",
    learned: tuple[Tensor, ...] = (),
) -> Tensor:
    """Return (batch, heads, queries, dim) from q (batch, heads, queries, dim) and k, v (batch, kv_heads, keys, dim).

    The queries are at the last positions of the keys. `i` and `j` are their positions and those of the keys, (queries,)
    and (keys,), or (batch, ...) if `padding` (batch, keys), true at real tokens, shifts them.
    """

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scored_weights(q, k, change, i, j, padding=padding, normalize=normalize, learned=learned)
        return weights.to(v.dtype) @ per_query_head(v, q)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flex = compiled_flex()
        return scored_flex(q, k, v, change, flex) if _takes(q, k, v, change, flex) else dense(q, k, v)

    whole = padding is None and q.shape[-2] == k.shape[-2] > 1
    if not (whole and normalize == "softmax" and _fusible(q, learned)):
        return dense(q, k, v)
    return folded(fused, q, k, v)


def scored_weights(
    q: Tensor,
    k: Tensor,
    change: Change,
    i: Tensor,
    j: Tensor,
    *,
    padding: Tensor | None = None,
    normalize: str = "softmax",
    learned: tuple[Tensor, ...] = (),
) -> Tensor:
    """Plain reference: the attention map (batch, heads, queries, keys), in float32 or wider."""
    queries, keys = q.shape[-2], k.shape[-2]
    s = (q * q.shape[-1] ** -0.5) @ per_query_head(k, q).mT
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    head = torch.arange(q.shape[1], device=q.device).view(-1, 1, 1)
    # (queries, 1) and (keys,), or (batch, 1, queries, 1) and (batch, 1, 1, keys)
    i = i.unsqueeze(-1) if i.ndim == 1 else i[:, None, :, None]
    j = j if j.ndim == 1 else j[:, None, None, :]
    row = torch.arange(keys - queries, keys, device=q.device).unsqueeze(-1)
    own = row == torch.arange(keys, device=q.device)
    mask = view_mask(queries, keys, q.device, True, padding) | own
    scores = visible_to_itself(s, change(s, head, i, j, *learned), own).masked_fill(~mask, _HIDDEN)
    return torch.sigmoid(scores) if normalize == "sigmoid" else torch.softmax(scores, -1)


def visible_to_itself(s: Tensor, scores: Tensor, own: Tensor) -> Tensor:
    """Return the scores with s where a query's own key is hidden: no row is empty."""
    return torch.where(own & (scores == _HIDDEN), s, scores)


def _fusible(q: Tensor, learned: tuple[Tensor, ...]) -> bool:
    """Return whether FlexAttention applies to a whole causal sequence.

    It has no backward on CPU. Learned tables would be captured buffers, one for each row of a population, and a compiled
    population traces through `vmap`: both are dense.
    """
    usable = q.is_cuda and q.dtype != torch.float64 and not learned and not is_plain()
    return usable and not (is_stacking() and is_compiling())


def scored_flex(q: Tensor, k: Tensor, v: Tensor, change: Change, flex: Any) -> Tensor:
    """Return the same through FlexAttention for a whole causal sequence, without the map in memory."""
    heads, time, device = q.shape[1], q.shape[-2], str(q.device)
    key = (change.number, heads, time, device)
    if key not in _prepared:
        _prepared[key] = (_score_mod(change), _block_mask(change, heads, time, device))
    score_mod, blocks = _prepared[key]
    # Heads that share keys get copies: torch 2.11 has no kernel for shared keys in float32.
    k, v = per_query_head(k, q), per_query_head(v, q)
    output: Tensor = flex(q, k, v, score_mod=score_mod, block_mask=blocks)
    return output


def _score_mod(change: Change) -> Callable[..., Tensor]:
    """Return the function in FlexAttention's form; layers with equal options share it, and so a graph."""

    def score_mod(s: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return visible_to_itself(s, change(s, head, i, j), i == j)

    return score_mod


def _block_mask(change: Change, heads: int, time: int, device: str) -> BlockMask:
    """Return which blocks of pairs have a visible one; the others are skipped."""

    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        zero = torch.zeros((), device=device)
        return (j <= i) & ((change(zero, head, i, j) != _HIDDEN) | (i == j))

    with torch.inference_mode(False):  # cached for training too, which rejects inference tensors
        return create_block_mask(visible, None, heads, time, time, device=device)


def compiled_flex() -> Any:
    """Return FlexAttention, compiled once for all score functions."""
    global _compiled_flex
    if _compiled_flex is None:
        limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = limit
        _compiled_flex = torch.compile(flex_attention, dynamic=False)
    return _compiled_flex


def _takes(q: Tensor, k: Tensor, v: Tensor, change: Change, flex: Any) -> bool:
    """Return whether FlexAttention compiles and runs these tensors, found by one trial; if not, warn with the reason."""
    if is_compiling():
        return True
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    key = (change.number, q.shape, k.shape, v.shape, q.dtype, q.device, trained)
    if key not in _taken:
        _taken[key] = _trial(q, k, v, change, flex, trained)
    return _taken[key]


def _trial(q: Tensor, k: Tensor, v: Tensor, change: Change, flex: Any, trained: bool) -> bool:
    """Run forward, and backward in training: its kernel is compiled separately."""
    copies = [tensor.detach().requires_grad_(trained) for tensor in (q, k, v)]
    try:
        output = scored_flex(copies[0], copies[1], copies[2], change, flex)
        if trained:
            torch.autograd.grad(output.sum(), copies)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        name, reason = getattr(change, "__name__", "the score function"), first_line(error)
        words = f"FlexAttention cannot run {name} ({reason}); it runs dense, with the attention map in memory"
        warnings.warn(words, RuntimeWarning, stacklevel=2)
        return False
    return True
