"""Attention: softmax(q k^T * scale) v with a causal, windowed or padding mask."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from headtohead.kernels.path import is_plain, is_stacking
from headtohead.kernels.vmap import folded

# Set explicitly instead of PyTorch's default: on an H200, cuDNN runs forward + backward in 0.6x Flash's time.
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    padding: Tensor | None = None,
    window: int = 0,
    strict: bool = False,
    scale: float | None = None,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return (batch, heads, queries, dim) from q (batch, heads, queries, dim) and k, v (batch, kv_heads, keys, dim).

    The queries are at the last positions of the keys. `padding` (batch, keys) is true at real tokens. `window` is the
    number of keys a query attends to, itself included, 0 for all. With `strict`, a query does not attend to itself unless
    it has no other key. Values may have another width than keys; outputs have the width of the values. `bias`
    (heads, queries, keys) or (batch, heads, queries, keys) is added to the scaled scores. `rows` (batch,) selects one
    query of each sequence, (batch, heads, 1, dim), or is the position of the single given query, (1,) for all sequences;
    it excludes `bias`. A given `mask` (queries, keys), true where a key is visible, is used instead of all this.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    if rows is not None:
        assert bias is None
        q = q if queries == 1 else q[torch.arange(len(q), device=q.device), :, rows].unsqueeze(2)
        queries = 1
    elif causal and window and queries == 1 and keys > window:
        k, v = k[..., -window:, :], v[..., -window:, :]
        padding = None if padding is None else padding[:, -window:]
        bias = None if bias is None else bias[..., -window:]
        keys = window
    biased = bias is not None and queries > 1
    viewed = padding is not None or rows is not None or window or strict
    if mask is None and (viewed or (causal and (biased or 1 < queries < keys))):
        mask = view_mask(queries, keys, q.device, causal, padding, window, strict, rows)
    whole = causal and mask is None and queries > 1
    if is_plain():
        return attend_plain(q, k, v, causal=whole, mask=mask, scale=scale, bias=bias)
    if bias is not None:
        return _biased(q, k, v, mask, bias, scale)
    if queries == 1 and q.shape[1] != k.shape[1]:
        # One query per head: the heads that share a key are treated as its queries, so that no key is repeated.
        q = q.squeeze(2).unflatten(1, (k.shape[1], -1))
        return _fused(q, k, v, mask, False, scale).flatten(1, 2).unsqueeze(2)
    if is_stacking() or v.shape[-1] != q.shape[-1]:
        return _fused(q, k, v, mask, whole, scale)
    with _backends(q):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _biased(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor, scale: float | None
) -> Tensor:
    """Return attention with biased scores; on a GPU a trained bias is processed sequence by sequence.

    Its gradient is as large as the attention map, and PyTorch forms it for the whole batch it is given.
    """
    joined = bias.to(q.dtype) if bias.ndim == 4 else bias.to(q.dtype).unsqueeze(0)
    if mask is not None:
        joined = joined.masked_fill(~mask, float("-inf"))
    if not (q.is_cuda and bias.requires_grad):
        return _fused(q, k, v, joined, False, scale)
    own = joined.expand(len(q), -1, -1, -1).split(1)
    parts = zip(q.split(1), k.split(1), v.split(1), own, strict=True)
    return torch.cat([_fused(*part, False, scale) for part in parts])


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Return PyTorch's attention; values of another width than the keys are padded to fit its kernels."""
    width = v.shape[-1]
    if width != q.shape[-1]:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = _fitted(q, k, v)

    def library(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa)

    if mask is not None and is_stacking():
        heads = q.shape[1] if mask.ndim > 2 and mask.shape[-3] > 1 else 1
        mask = mask.expand(len(q), heads, *mask.shape[-2:])
    with _backends(q):
        mixed = folded(library, q, k, v, mask)
    return mixed[..., :width]


def _fitted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v padded with zeros: on CPU to one common width, as its kernel requires; else to multiples of eight.

    On CPU a few queries over many keys are not padded: their map is small, and padding would copy the whole cache.
    """
    if q.is_cuda:
        keys, values = (-(-tensor.shape[-1] // 8) * 8 for tensor in (q, v))
    elif q.shape[-2] < k.shape[-2]:
        return q, k, v
    else:
        keys = values = max(q.shape[-1], v.shape[-1])
    return _filled(q, keys), _filled(k, keys), _filled(v, values)


def _filled(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Plain reference, with the whole map in memory."""
    if causal:
        mask = view_mask(q.shape[-2], k.shape[-2], q.device, True)
    return attention_weights(q, k, mask, scale, bias) @ per_query_head(v, q)


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return the attention map (batch, heads, queries, keys) of softmax attention."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ per_query_head(k, q).transpose(-2, -1)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1)


def view_mask(
    queries: int,
    keys: int,
    device: torch.device,
    causal: bool,
    padding: Tensor | None = None,
    window: int = 0,
    strict: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the mask (queries, keys) or (batch, 1, queries, keys); true means visible.

    A query without a visible key, such as one at a padding position, attends to itself, so that no row is empty. `rows`
    (batch,) is the position of the single query of each sequence, (1,) if it is the same for all; without it, the queries
    are at the last positions of the keys.
    """
    if rows is None:
        row = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    else:
        row = rows[:, None, None, None]
    column = torch.arange(keys, device=device)
    mask = column <= row if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    if window:
        mask = mask & ((row - column).abs() < window)
    if strict:
        mask = mask & (column != row)
    if padding is not None:
        mask = mask & padding[:, None, None, :]
    if strict or padding is not None:
        mask = mask | ((column == row) & ~mask.any(-1, keepdim=True))
    return mask


def backend_name(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the name of the PyTorch kernel that these tensors use with a causal mask."""
    with _backends(q):
        gqa = q.shape[1] != k.shape[1]
        return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=gqa)).name.lower()


def _backends(q: Tensor) -> AbstractContextManager[None]:
    return sdpa_kernel(BACKENDS, set_priority=True) if q.is_cuda else nullcontext()


def per_query_head(k: Tensor, q: Tensor) -> Tensor:
    """Return k with each key head repeated for the query heads that share it."""
    groups = q.shape[1] // k.shape[1]
    return k if groups == 1 else k.repeat_interleave(groups, 1)
