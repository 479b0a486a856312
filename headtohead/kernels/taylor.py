"""Attention by the second-order Taylor weights of exp: w_ij = 1 + s_ij + s_ij^2 / 2, normed over what i sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from headtohead.kernels.attention import per_query_head, view_mask
from headtohead.kernels.path import is_plain

_compiled_flex: Any = None
_causal_blocks: dict[tuple[int, str], BlockMask] = {}


def taylor_attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, padding: Tensor | None = None
) -> Tensor:
    """Return (batch, heads, queries, dim) from q (batch, heads, queries, dim) and k, v (batch, kv_heads, keys, dim).

    The queries stand at the last positions of the keys; `padding` (batch, keys) is true at real tokens.
    """
    if _fused(q, k, causal, padding):
        return _taylor_flex(q, k, v, _compiled())
    mask = view_mask(q.shape[-2], k.shape[-2], q.device, causal, padding)
    return taylor_weights(q, k, mask).to(v.dtype) @ per_query_head(v, q)


def taylor_weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The definition: the map (batch, heads, queries, keys), in float32 at least."""
    scores = (q * q.shape[-1] ** -0.5) @ per_query_head(k, q).transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # 1 + s + s^2 / 2 = ((1 + s)^2 + 1) / 2, at least 1/2 whatever s is: no row sums to less than half its keys.
    weights = (((1 + scores).square() + 1) / 2).masked_fill(~mask, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def taylor_score(score: Tensor, *place: Tensor) -> Tensor:
    """Return log(1 + s + s^2 / 2): the score whose softmax has the Taylor weights; its slope lies in [-1, 1]."""
    return torch.log1p(score + 0.5 * score * score)


def _fused(q: Tensor, k: Tensor, causal: bool, padding: Tensor | None) -> bool:
    """Return whether FlexAttention serves: it has no backward on CPU, and a decoding step needs no fusing."""
    whole = causal and padding is None and q.shape[-2] == k.shape[-2] > 1
    return q.is_cuda and whole and q.dtype != torch.float64 and not is_plain()


def _taylor_flex(q: Tensor, k: Tensor, v: Tensor, flex: Any) -> Tensor:
    """Return the same through the log-score, with no map in memory."""
    time, key = q.shape[-2], (q.shape[-2], str(q.device))
    if key not in _causal_blocks:
        _causal_blocks[key] = create_block_mask(_not_later, None, None, time, time, device=str(q.device))
    output: Tensor = flex(
        q,
        k,
        v,
        score_mod=taylor_score,
        block_mask=_causal_blocks[key],
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return output


def _not_later(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _compiled() -> Any:
    global _compiled_flex
    if _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention, dynamic=False)
    return _compiled_flex
