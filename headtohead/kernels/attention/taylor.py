"""Attention with second-order Taylor weights of exp: w_ij = 1 + s_ij + s_ij^2 / 2, normalized over the keys of query i."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from headtohead.kernels.attention.scored import compiled_flex
from headtohead.kernels.attention.softmax import per_query_head, view_mask
from headtohead.kernels.path import eager_cpu, is_plain, is_stacking

_causal_blocks: dict[tuple[int, str], BlockMask] = {}


def taylor_attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, padding: Tensor | None = None
) -> Tensor:
    """Return (batch, heads, queries, dim) from q (batch, heads, queries, dim) and k, v (batch, kv_heads, keys, dim).

    The queries are at the last positions of the keys; `padding` (batch, keys) is true at real tokens.
    """
    if _fused(q, k, causal, padding):
        return _taylor_flex(q, k, v, compiled_flex())
    if causal and padding is None and q.shape[-2] == k.shape[-2] and eager_cpu(q):
        return _Taylor.apply(q, per_query_head(k, q), per_query_head(v, q))
    mask = view_mask(q.shape[-2], k.shape[-2], q.device, causal, padding)
    return taylor_weights(q, k, mask).to(v.dtype) @ per_query_head(v, q)


def taylor_weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Plain reference: the attention map (batch, heads, queries, keys), in float32 or wider."""
    scores = (q * q.shape[-1] ** -0.5) @ per_query_head(k, q).transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # 1 + s + s^2 / 2 = ((1 + s)^2 + 1) / 2 >= 1/2 for every s: a row sums to at least half its number of keys.
    weights = (((1 + scores).square() + 1) / 2).masked_fill(~mask, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def taylor_score(score: Tensor, *place: Tensor) -> Tensor:
    """Return log(1 + s + s^2 / 2): the score whose softmax has the Taylor weights; its slope is in [-1, 1]."""
    return torch.log1p(score + 0.5 * score * score)


def _fused(q: Tensor, k: Tensor, causal: bool, padding: Tensor | None) -> bool:
    """Return whether FlexAttention applies: it has no backward on CPU, and a decoding step needs no fused kernel."""
    whole = causal and padding is None and q.shape[-2] == k.shape[-2] > 1
    return q.is_cuda and whole and q.dtype != torch.float64 and not (is_plain() or is_stacking())


def _taylor_flex(q: Tensor, k: Tensor, v: Tensor, flex: Any) -> Tensor:
    """Return the same through the log-score, without the map in memory."""
    time, key = q.shape[-2], (q.shape[-2], str(q.device))
    if key not in _causal_blocks:
        with torch.inference_mode(False):  # cached for training too, which rejects inference tensors
            _causal_blocks[key] = create_block_mask(_not_later, None, None, time, time, device=str(q.device))
    # Heads that share keys get copies: torch 2.11 has no kernel for shared keys in float32.
    k, v = per_query_head(k, q), per_query_head(v, q)
    return flex(q, k, v, score_mod=taylor_score, block_mask=_causal_blocks[key])


def _not_later(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


class _Taylor(torch.autograd.Function):
    """One causal sequence at a time from u = 1 + s, w = u^2 + 1: a few passes instead of autograd's dozen.

    The factor 1/2 of the weights cancels in the quotient; d w / d u = 2 u, which is 0 at masked keys.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale, one = q.shape[-1] ** -0.5, q.new_ones(1)
        output, sums = v.new_empty(v.shape), q.new_empty(*q.shape[:-1], 1)
        q, k, v = (tensor.contiguous() for tensor in (q, k, v))
        for q_part, k_part, v_part, out, total in _sequences(q, k, v, output, sums):
            weights = torch.baddbmm(one, q_part, k_part.mT, alpha=scale).square_().add_(1.0).tril_()
            torch.sum(weights, -1, keepdim=True, out=total)
            out.copy_(torch.bmm(weights, v_part).div_(total))
        ctx.save_for_backward(q, k, v, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, output, sums = ctx.saved_tensors
        scale, one = q.shape[-1] ** -0.5, q.new_ones(1)
        grads = tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))
        grad = grad / sums
        along = (grad * output).sum(-1, keepdim=True)
        for q_part, k_part, v_part, part, inner, *found in _sequences(q, k, v, grad, along, *grads):
            ones = torch.baddbmm(one, q_part, k_part.mT, alpha=scale).tril_()
            found[2].copy_(torch.bmm(ones.square().add_(1.0).tril_().mT, part))
            slope = torch.baddbmm(inner, part, v_part.mT, beta=-1).mul_(ones.mul_(2 * scale))
            found[0].copy_(torch.bmm(slope, k_part))
            found[1].copy_(torch.bmm(slope.mT, q_part))
        return grads


def _sequences(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same sequences and heads of every (batch, heads, time, dim), as many as keep a map in a core's cache."""
    size = max(1, 2**18 // tensors[0].shape[-2] ** 2)
    return zip(*(tensor.flatten(0, 1).split(size) for tensor in tensors), strict=True)
