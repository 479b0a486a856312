"""The attention core: softmax(q k^T * scale) v under a causal, windowed or padded view."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from headtohead.kernels.path import is_plain

# Stated, not left to the library: measured on an H200, cuDNN runs forward + backward in 0.6x Flash's time.
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
) -> Tensor:
    """Return (batch, heads, queries, dim) from q (batch, heads, queries, dim) and k, v (batch, kv_heads, keys, dim).

    The queries stand at the last positions of the keys. `padding` (batch, keys) is true at real tokens; `window` is
    how many keys back a query sees, itself included, 0 for all; under `strict` a query does not see itself unless
    it sees nothing else.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    if causal and window and queries == 1 and keys > window:
        k, v = k[..., -window:, :], v[..., -window:, :]
        padding = None if padding is None else padding[:, -window:]
        keys = window
    mask = None
    if padding is not None or window or strict or (causal and 1 < queries < keys):
        mask = view_mask(queries, keys, q.device, causal, padding, window, strict)
    whole = causal and mask is None and queries > 1
    if is_plain():
        return attend_plain(q, k, v, causal=whole, mask=mask, scale=scale)
    with _backends(q):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    """The definition, with the whole map formed."""
    if causal:
        mask = view_mask(q.shape[-2], k.shape[-2], q.device, True)
    return attention_weights(q, k, mask, scale) @ per_query_head(v, q)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Return the map (batch, heads, queries, keys) of softmax attention."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ per_query_head(k, q).transpose(-2, -1)
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
) -> Tensor:
    """Return what each query may see, (queries, keys) or (batch, 1, queries, keys); true is visible.

    A query with nothing to see, such as one at a padded position, sees itself, so that no row is empty.
    """
    row = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
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
    """Return the library kernel that would serve these tensors under a causal view."""
    with _backends(q):
        gqa = q.shape[1] != k.shape[1]
        return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=gqa)).name.lower()


def _backends(q: Tensor) -> AbstractContextManager[None]:
    return sdpa_kernel(BACKENDS, set_priority=True) if q.is_cuda else nullcontext()


def per_query_head(k: Tensor, q: Tensor) -> Tensor:
    """Return k with each key head repeated for the query heads that share it."""
    groups = q.shape[1] // k.shape[1]
    return k if groups == 1 else k.repeat_interleave(groups, 1)
